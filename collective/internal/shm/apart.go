package shm

import "context"

// ReduceApart is the first half of an AllReduce that may turn out not to be wanted: data stays as
// it is, and the part of the reduction that [kernel.Split] gives this member goes into own. It
// reports whether all members have said yes.
func (m *Member) ReduceApart(ctx context.Context, d Desc, data, own []byte, yes bool, r *Reduction) (all bool, err error) {
	if err := m.meetSaying(ctx, d, yes); err != nil {
		return false, err
	}
	all = true
	for i := range m.areas {
		all = all && m.said(i)
	}
	m.split(m.src, data, r.Size, m.members)
	m.dst[m.index] = own
	return all, m.exchange(ctx, r, false)
}

// GatherApart is the second half: if the last member says yes, data becomes what all members have
// in own, elements of size bytes. Otherwise it stays as it is. All members find the same.
func (m *Member) GatherApart(ctx context.Context, d Desc, data, own []byte, size int, yes bool) (wanted bool, err error) {
	if err := m.meetSaying(ctx, d, yes); err != nil || !m.said(m.members-1) {
		return false, err
	}
	m.split(m.dst, data, size, m.members)
	copy(m.dst[m.index], own)
	return true, m.exchange(ctx, nil, true)
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
