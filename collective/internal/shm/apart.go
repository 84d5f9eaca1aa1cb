package shm

import (
	"context"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Aside is memory of this member that the others read in GatherApart, and its length the same on
// all members. The operations of the member, which it belongs to, write to it too.
func (m *Member) Aside() []byte { return m.own.out[0] }

// ReduceApart is the first half of an AllReduce that may turn out not to be wanted: data stays as
// it is, and the part of the reduction that [kernel.Split] gives this member, for which there must
// be room, goes to the beginning of Aside. It reports whether all members have said yes.
func (m *Member) ReduceApart(ctx context.Context, d Desc, data []byte, yes bool, r *Reduction) (all bool, err error) {
	if err := m.meetSaying(ctx, d, yes); err != nil {
		return false, err
	}
	all = true
	for i := range m.areas {
		all = all && m.said(i)
	}
	m.split(m.src, data, r.Size, m.members)
	m.dst[m.index] = m.own.out[0][:len(m.src[m.index])]
	return all, m.exchange(ctx, r, false)
}

// GatherApart is the second half, and the next operation of all members: if the last one says yes,
// data becomes what lies at the beginning of all members' Aside, in parts of elements of size
// bytes. Otherwise it stays as it is. All members find the same.
//
// They read what the others had put there before they came. No member writes there again before it
// has seen all others arrive at its next operation.
func (m *Member) GatherApart(ctx context.Context, d Desc, data []byte, size int, yes bool) (wanted bool, err error) {
	if err := m.meetSaying(ctx, d, yes); err != nil || !m.said(m.members-1) {
		return false, err
	}
	m.in(CopyingOut)
	for i := range m.areas { // each begins with what another one has
		o := (m.index + 1 + i) % m.members
		copy(kernel.Part(data, size, m.members, o), m.areas[o].out[0])
	}
	if m.aborted() {
		return false, ErrAborted
	}
	return true, nil
}

// meetSaying is meetFor, with a word for all.
func (m *Member) meetSaying(ctx context.Context, d Desc, yes bool) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	c.data[0] = 0
	if yes {
		c.data[0] = 1
	}
	return m.arrive(ctx, c, d)
}

// said is what a member has told with meetSaying.
func (m *Member) said(i int) bool { return m.cellOf(i).data[0] != 0 }
