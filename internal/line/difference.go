package line

import (
	"bytes"
	"fmt"
	"iter"
	"sync"

	"github.com/hvdrun/hvdrun/plan"
)

// mostDifferences is how many answers may tell how members differ before a worker decodes them. A
// worker that connects to the others decodes each.
const mostDifferences = 16

// MembersDifference makes members of others, which are called the old ones. By part of the new
// members, in order of rank: how many old members are left out, how many are taken then, and how
// many of Added follow. An old member of which anything has changed is left out, and added.
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

// members are the members of a world that a worker has received. They are decoded on demand: that
// takes longer than all else for a worker that does not connect to them.
type members struct {
	number uint64 // names them towards the driver; 0: they have no name
	size   int

	mu    sync.Mutex
	whole []byte // Members, encoded; nil once decoded, and if there is a difference
	// The members differ from base; nil once decoded.
	base       *members
	difference []byte // a MembersDifference, encoded
	depth      int    // how many differences are to be decoded
	columns    *Members
	err        error
}

// differsFrom says how m, which is new, differs from others. They are decoded if there are many.
func (m *members) differsFrom(base *members, difference []byte) {
	base.mu.Lock()
	m.depth = base.depth + 1
	base.mu.Unlock()
	m.base, m.difference = base, difference
	if m.depth >= mostDifferences {
		_, _ = m.decode() // it returns the same error again
	}
}

// decode returns the members, which are valid apart from two in one slot.
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
		return nil, fmt.Errorf("%d members of %d", n, m.size)
	}
	return c, check(c)
}

// check checks all of members but that each is in a slot of its own.
func check(m *Members) error {
	if err := checkHosts(m); err != nil {
		return err
	}
	return checkAddrs(m)
}

// row is a member of Members.
type row struct {
	of            *Members
	host          string
	index         uint32
	starts, ports []uint32
	handle        []byte
}

// rows returns the members of Members that check has checked, by rank.
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

// equal reports whether two rows say the same of a member.
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

// Difference returns how members differ from old ones. Members whose order has changed are left out
// and added.
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

// apply returns the members, as many as size, that differ from old ones in that way. All sizes are
// checked before memory is taken: each old member and each added one is taken at most once.
func apply(old *Members, d *MembersDifference, size int) (*Members, error) {
	parts := len(d.Taken)
	if len(d.LeftOut) != parts || len(d.Followed) != parts {
		return nil, fmt.Errorf("a difference of %d, %d and %d parts", len(d.LeftOut), parts, len(d.Followed))
	}
	if err := check(d.Added); err != nil {
		return nil, fmt.Errorf("added members: %w", err)
	}
	var passed, taken, followed uint64 // no sum overflows: a message has less than 2^32 parts
	for i, n := range d.Taken {
		passed += uint64(d.LeftOut[i]) + uint64(n)
		taken += uint64(n)
		followed += uint64(d.Followed[i])
	}
	if had, added := len(old.Indices), len(d.Added.Indices); passed > uint64(had) ||
		followed != uint64(added) || taken+followed != uint64(size) {
		return nil, fmt.Errorf("a difference that takes %d of %d members, and %d of %d added, for %d", passed, had, followed, added, size)
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
