package rendezvous

import (
	"bytes"
	"fmt"
	"iter"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

// mostDifferences is how many answers may tell how members differ before a worker decodes them. A
// worker that connects to the others decodes each.
const mostDifferences = 16

// members are the members of a world that a worker has received. They are decoded on demand: that
// takes longer than all else for a worker that does not connect to them.
type members struct {
	number uint64 // names them towards the driver; 0: they have no name
	size   int

	mu    sync.Mutex
	whole []byte // a rendezvouspb.Members; nil once decoded, and if there is a difference
	// The members differ from base; nil once decoded.
	base       *members
	difference []byte // a rendezvouspb.MembersDifference
	depth      int    // how many differences are to be decoded
	columns    *rendezvouspb.Members
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
func (m *members) decode() (*rendezvouspb.Members, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.columns == nil && m.err == nil {
		m.columns, m.err = m.read()
		m.whole, m.base, m.difference, m.depth = nil, nil, nil, 0
	}
	return m.columns, m.err
}

func (m *members) read() (*rendezvouspb.Members, error) {
	c := &rendezvouspb.Members{}
	if m.base != nil {
		var d rendezvouspb.MembersDifference
		old, err := m.base.decode()
		if err == nil {
			err = proto.Unmarshal(m.difference, &d)
		}
		if err == nil {
			c, err = apply(old, &d, m.size)
		}
		if err != nil {
			return nil, err
		}
	} else if err := proto.Unmarshal(m.whole, c); err != nil {
		return nil, err
	}
	if n := len(c.GetIndices()); n != m.size {
		return nil, fmt.Errorf("%d members of %d", n, m.size)
	}
	return c, check(c)
}

// check checks all of members but that each is in a slot of its own.
func check(m *rendezvouspb.Members) error {
	if err := checkHosts(m); err != nil {
		return err
	}
	return checkAddrs(m)
}

// row is a member of Members.
type row struct {
	of            *rendezvouspb.Members
	host          string
	index         uint32
	starts, ports []uint32
	handle        []byte
}

// rows returns the members of Members that check has checked, by rank.
func rows(m *rendezvouspb.Members) iter.Seq2[int, row] {
	return func(yield func(int, row) bool) {
		rank, next := 0, 0
		for h, host := range m.GetHosts() {
			for range m.GetCounts()[h] {
				end := next + int(m.GetAddressCounts()[rank])
				r := row{m, host, m.GetIndices()[rank], m.GetAddressStarts()[next:end], m.GetAddressPorts()[next:end], nil}
				if len(m.GetHandles()) > 0 {
					r.handle = m.GetHandles()[rank]
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
		if port != o.ports[i] || r.of.GetStarts()[r.starts[i]] != o.of.GetStarts()[o.starts[i]] {
			return false
		}
	}
	return true
}

func (c columns) addRow(r row) {
	c.add(r.host, r.index, len(r.ports), r.handle)
	for i, port := range r.ports {
		c.address(r.of.GetStarts()[r.starts[i]], port)
	}
}

// difference returns how members differ from old ones. Members whose order has changed are left out
// and added.
func difference(old, fresh *rendezvouspb.Members) *rendezvouspb.MembersDifference {
	ranks := make(map[plan.SlotID]int, len(old.GetIndices()))
	olds := make([]row, 0, len(old.GetIndices()))
	for rank, r := range rows(old) {
		ranks[r.slot()] = rank
		olds = append(olds, r)
	}
	d := &rendezvouspb.MembersDifference{}
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
func apply(old *rendezvouspb.Members, d *rendezvouspb.MembersDifference, size int) (*rendezvouspb.Members, error) {
	parts := len(d.GetTaken())
	if len(d.GetLeftOut()) != parts || len(d.GetFollowed()) != parts {
		return nil, fmt.Errorf("a difference of %d, %d and %d parts", len(d.GetLeftOut()), parts, len(d.GetFollowed()))
	}
	if err := check(d.GetAdded()); err != nil {
		return nil, fmt.Errorf("added members: %w", err)
	}
	var passed, taken, followed uint64 // no sum overflows: a message has less than 2^32 parts
	for i, n := range d.GetTaken() {
		passed += uint64(d.GetLeftOut()[i]) + uint64(n)
		taken += uint64(n)
		followed += uint64(d.GetFollowed()[i])
	}
	if had, added := len(old.GetIndices()), len(d.GetAdded().GetIndices()); passed > uint64(had) ||
		followed != uint64(added) || taken+followed != uint64(size) {
		return nil, fmt.Errorf("a difference that takes %d of %d members, and %d of %d added, for %d", passed, had, followed, added, size)
	}
	c := newColumns(size)
	olds, stopOlds := iter.Pull2(rows(old))
	defer stopOlds()
	adds, stopAdds := iter.Pull2(rows(d.GetAdded()))
	defer stopAdds()
	for i, n := range d.GetTaken() {
		for range d.GetLeftOut()[i] {
			olds()
		}
		for range n {
			_, r, _ := olds()
			c.addRow(r)
		}
		for range d.GetFollowed()[i] {
			_, r, _ := adds()
			c.addRow(r)
		}
	}
	return c.m, nil
}
