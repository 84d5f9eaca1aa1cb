package line

import (
	"bytes"
	"fmt"
	"iter"
	"sync"

	"github.com/hvdrun/hvdrun/plan"
)

// mostDifferences is the longest chain of differences that a worker keeps before it decodes them. A
// worker that connects to the others decodes each at once.
const mostDifferences = 16

// MembersDifference describes new members by old ones. It has parts in order of the new ranks. Each
// part gives the number of old members to skip (LeftOut), the number of old members to take after
// those (Taken), and the number of members of Added that follow (Followed). An old member that has
// changed in any way is skipped and added.
type MembersDifference struct {
	LeftOut, Taken, Followed []uint32
	Added                    *Members
}

// Append appends the encoded difference to b.
func (d *MembersDifference) Append(b []byte) []byte {
	return d.Added.Append(appendNumbers(appendNumbers(appendNumbers(b, d.LeftOut), d.Taken), d.Followed))
}

func decodeDifference(b []byte) (*MembersDifference, error) {
	d := &decoder{rest: b}
	m := &MembersDifference{d.numbers(), d.numbers(), d.numbers(), d.members()}
	return m, d.end()
}

// members are the members of a world that a worker has received. They are decoded on demand, since
// decoding costs a worker that does not connect to them more than everything else.
type members struct {
	number uint64 // identifies them to the driver; 0: they have no number
	size   int

	mu    sync.Mutex
	whole []byte // encoded Members; nil once decoded, or with a difference
	// The difference from base; nil once decoded.
	base       *members
	difference []byte // an encoded MembersDifference
	depth      int    // number of differences to decode
	columns    *Members
	err        error
}

// differsFrom sets the difference of the new m from base. It decodes m after mostDifferences.
func (m *members) differsFrom(base *members, difference []byte) {
	base.mu.Lock()
	m.depth = base.depth + 1
	base.mu.Unlock()
	m.base, m.difference = base, difference
	if m.depth >= mostDifferences {
		_, _ = m.decode() // later calls return the same error
	}
}

// decode returns the members. It does not check that no two members are in the same slot.
func (m *members) decode() (*Members, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.columns == nil && m.err == nil {
		m.columns, m.err = m.read()
		m.whole, m.base, m.difference, m.depth = nil, nil, nil, 0
	}
	return m.columns, m.err
}

func (m *members) read() (*Members, error) {
	var c *Members
	if m.base != nil {
		old, err := m.base.decode()
		var d *MembersDifference
		if err == nil {
			d, err = decodeDifference(m.difference)
		}
		if err == nil {
			c, err = apply(old, d, m.size)
		}
		if err != nil {
			return nil, err
		}
	} else {
		d := &decoder{rest: m.whole}
		if c = d.members(); d.end() != nil {
			return nil, d.err
		}
	}
	if n := len(c.Indices); n != m.size {
		return nil, fmt.Errorf("%d members are given of a world of %d", n, m.size)
	}
	return c, check(c)
}

// check checks everything about members except that no two members are in the same slot.
func check(m *Members) error {
	if err := checkHosts(m); err != nil {
		return err
	}
	return checkAddrs(m)
}

// row is one member of Members.
type row struct {
	of            *Members
	host          string
	index         uint32
	starts, ports []uint32
	handle        []byte
}

// rows returns the members of Members, which must have passed check, by rank.
func rows(m *Members) iter.Seq2[int, row] {
	return func(yield func(int, row) bool) {
		rank, next := 0, 0
		for h, host := range m.Hosts {
			for range m.Counts[h] {
				end := next + int(m.AddressCounts[rank])
				r := row{m, host, m.Indices[rank], m.AddressStarts[next:end], m.AddressPorts[next:end], nil}
				if len(m.Handles) > 0 {
					r.handle = m.Handles[rank]
				}
				if !yield(rank, r) {
					return
				}
				rank, next = rank+1, end
			}
		}
	}
}

func (r row) slot() plan.SlotID { return plan.SlotID{Host: r.host, Index: int(r.index)} }

// equal reports whether two rows describe the same member.
func (r row) equal(o row) bool {
	if r.host != o.host || r.index != o.index || len(r.ports) != len(o.ports) || !bytes.Equal(r.handle, o.handle) {
		return false
	}
	for i, port := range r.ports {
		if port != o.ports[i] || r.of.Starts[r.starts[i]] != o.of.Starts[o.starts[i]] {
			return false
		}
	}
	return true
}

func (c columns) addRow(r row) {
	c.add(r.host, r.index, len(r.ports), r.handle)
	for i, port := range r.ports {
		c.address(r.of.Starts[r.starts[i]], port)
	}
}

// Difference returns the difference of fresh from old. A member at another place in the order is
// removed and added.
func Difference(old, fresh *Members) *MembersDifference {
	ranks := make(map[plan.SlotID]int, len(old.Indices))
	olds := make([]row, 0, len(old.Indices))
	for rank, r := range rows(old) {
		ranks[r.slot()] = rank
		olds = append(olds, r)
	}
	d := &MembersDifference{}
	part := func(leftOut, taken, followed uint32) {
		d.LeftOut, d.Taken, d.Followed = append(d.LeftOut, leftOut), append(d.Taken, taken), append(d.Followed, followed)
	}
	added := newColumns(0)
	next := 0 // old member
	for _, r := range rows(fresh) {
		last := len(d.Taken) - 1
		at, known := ranks[r.slot()]
		switch {
		case !known || at < next || !r.equal(olds[at]):
			added.addRow(r)
			if last < 0 {
				part(0, 0, 1)
			} else {
				d.Followed[last]++
			}
			continue
		case last < 0 || at > next || d.Followed[last] > 0:
			part(uint32(at-next), 1, 0)
		default:
			d.Taken[last]++
		}
		next = at + 1
	}
	d.Added = added.m
	return d
}

// apply returns the size members that d makes of old. It checks all sizes before it allocates
// memory: each old member and each added one may be taken at most once.
func apply(old *Members, d *MembersDifference, size int) (*Members, error) {
	parts := len(d.Taken)
	if len(d.LeftOut) != parts || len(d.Followed) != parts {
		return nil, fmt.Errorf("the parts of the difference do not match: %d, %d and %d", len(d.LeftOut), parts, len(d.Followed))
	}
	if err := check(d.Added); err != nil {
		return nil, fmt.Errorf("added members: %w", err)
	}
	var passed, taken, followed uint64 // no overflow: a message has less than 2^32 parts
	for i, n := range d.Taken {
		passed += uint64(d.LeftOut[i]) + uint64(n)
		taken += uint64(n)
		followed += uint64(d.Followed[i])
	}
	if had, added := len(old.Indices), len(d.Added.Indices); passed > uint64(had) ||
		followed != uint64(added) || taken+followed != uint64(size) {
		return nil, fmt.Errorf("the difference uses %d of %d old members and %d of %d added ones for a world of %d", passed, had, followed, added, size)
	}
	c := newColumns(size)
	olds, stopOlds := iter.Pull2(rows(old))
	defer stopOlds()
	adds, stopAdds := iter.Pull2(rows(d.Added))
	defer stopAdds()
	for i, n := range d.Taken {
		for range d.LeftOut[i] {
			olds()
		}
		for range n {
			_, r, _ := olds()
			c.addRow(r)
		}
		for range d.Followed[i] {
			_, r, _ := adds()
			c.addRow(r)
		}
	}
	return c.m, nil
}
