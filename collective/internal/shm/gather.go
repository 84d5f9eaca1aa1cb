package shm

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"
)

// Broadcast replaces data by the data of the member root.
func (m *Member) Broadcast(ctx context.Context, d Desc, data []byte, root int) error {
	if len(data) > m.layout.bank {
		return m.broadcastLong(ctx, d, data, root)
	}
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	turn := m.op % 2
	if m.index == root {
		m.storeSmall(c.data[:], m.own.banks[turn], data)
	}
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.in(CopyingOut)
	if m.index != root {
		m.loadSmall(data, m.cellOf(root).data[:], m.areas[root].banks[turn])
	}
	return nil
}

// Posts reports whether Post of the given number of bytes is possible: every other member must have
// called this member's last operation, and the bytes must fit a bank. Posts and Post must not
// overlap with other operations of this member.
func (m *Member) Posts(bytes int) bool {
	if m.closed || m.round == 0 || bytes > m.layout.bank {
		return false
	}
	for i := range m.areas {
		// A member that has called an operation no longer needs the data of the previous operation
		// in cells and banks, which are used in turn.
		if i != m.index && atomic.LoadUint64(&m.cellOf(i).seq) < m.op {
			return false
		}
	}
	return true
}

// Post broadcasts this member's data without waiting for the others, which call Broadcast. Posts
// must have returned true. If the calls differ, only the others get an error.
func (m *Member) Post(ctx context.Context, d Desc, data []byte) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	m.storeSmall(c.data[:], m.own.banks[m.op%2], data)
	c.desc = d
	m.publish(&c.seq, m.op)
	return nil
}

// broadcastLong performs Broadcast with data that does not fit into a bank.
func (m *Member) broadcastLong(ctx context.Context, d Desc, data []byte, root int) error {
	direct, err := m.meetWith(ctx, d, data, readLeast)
	switch {
	case err != nil:
		return err
	case direct:
		return m.broadcastDirect(ctx, data, root)
	}
	m.dst[root] = data
	return m.exchangeOne(ctx)
}

// exchangeOne is like exchange, for a dst of which only one member has a part. A round of that part
// is as long as a round of all parts together.
func (m *Member) exchangeOne(ctx context.Context) error {
	usual := m.round
	defer func() { m.round = usual }()
	m.round = min(m.layout.out, usual*m.members)
	return m.exchange(ctx, nil, true)
}

// storeSmall copies data into a cell or, if it does not fit, into a bank. It does nothing if data
// fits neither.
func (m *Member) storeSmall(cell, bank, data []byte) {
	switch {
	case len(data) <= len(cell):
		copy(cell, data)
	case len(data) <= len(bank):
		copy(bank, data)
	}
}

// loadSmall reads data that storeSmall has written.
func (m *Member) loadSmall(data, cell, bank []byte) {
	if len(data) <= len(cell) {
		copy(data, cell)
	} else {
		copy(data, bank)
	}
}

// AllGather gives every member's own data to all members. The lengths may differ: place is called
// on every member when all lengths are known, and returns for each other member a buffer of exactly
// that length; it must not keep lengths. AllGather returns an error of place; the caller must then
// abort, since the others do not know of the error.
func (m *Member) AllGather(ctx context.Context, d Desc, own []byte, place func(lengths []int) ([][]byte, error)) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	turn := m.op % 2
	binary.LittleEndian.PutUint64(c.data[:], uint64(len(own)))
	m.storeSmall(c.data[8:], m.own.banks[turn], own)
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.in(CopyingOut)
	for i := range m.lengths {
		if err := m.setLength(i, binary.LittleEndian.Uint64(m.cellOf(i).data[:])); err != nil {
			return err
		}
	}
	buffers, err := m.placed(place)
	if err != nil {
		return err
	}
	long := false
	for i, n := range m.lengths {
		switch {
		case n > m.layout.bank:
			long = true
			m.dst[i] = own
			if i != m.index {
				m.dst[i] = buffers[i]
			}
		case i != m.index:
			m.loadSmall(buffers[i], m.cellOf(i).data[8:], m.areas[i].banks[turn])
		}
	}
	if long {
		return m.exchange(ctx, nil, true)
	}
	return nil
}

// setLength records the length n that a member has announced for its data. It returns an error if
// no slice can have that length.
func (m *Member) setLength(member int, n uint64) error {
	if n > math.MaxInt {
		return fmt.Errorf("shm: member %d announces %d bytes, which no slice can have", member, n)
	}
	m.lengths[member] = int(n)
	return nil
}

// placed returns the buffers that place returns for m.lengths, and checks their lengths.
func (m *Member) placed(place func(lengths []int) ([][]byte, error)) ([][]byte, error) {
	buffers, err := place(m.lengths)
	if err != nil {
		return nil, err
	}
	if len(buffers) != m.members {
		return nil, fmt.Errorf("shm: %d buffers are given for %d members", len(buffers), m.members)
	}
	for i, n := range m.lengths {
		if i != m.index && len(buffers[i]) != n {
			return nil, fmt.Errorf("shm: a buffer has %d bytes, and its part %d", len(buffers[i]), n)
		}
	}
	return buffers, nil
}

// AllToAll gives parts[i] to member i; this member's own part is not moved. place is as in
// AllGather, for the parts that the others give to this member.
//
// Each member writes the lengths of its parts to a bank, followed by the parts if they fit.
// Otherwise the parts are moved through its in slots, whose sections the other members read.
func (m *Member) AllToAll(ctx context.Context, d Desc, parts [][]byte, place func(lengths []int) ([][]byte, error)) error {
	if len(parts) != m.members {
		return fmt.Errorf("shm: %d parts are given for %d members", len(parts), m.members)
	}
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	turn := m.op % 2
	m.storeParts(m.own.banks[turn], parts)
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.in(CopyingOut)
	for i := range m.lengths {
		if err := m.setLength(i, lengthIn(m.areas[i].banks[turn], m.index)); err != nil {
			return err
		}
	}
	buffers, err := m.placed(place)
	if err != nil {
		return err
	}
	longest := 0
	for i := range m.areas {
		bank := m.areas[i].banks[turn]
		if at, ok := m.partIn(bank, m.index); ok {
			if i != m.index {
				copy(buffers[i], bank[at:])
			}
			continue
		}
		for j := range m.members {
			if n := lengthIn(bank, j); j != i && n <= math.MaxInt {
				longest = max(longest, int(n))
			}
		}
		if i == m.index {
			copy(m.src, parts)
		} else {
			m.dst[i] = buffers[i]
		}
	}
	if longest == 0 {
		return nil
	}
	return m.exchangeParts(ctx, longest)
}

// lengthIn returns the length of part i in a bank of AllToAll.
func lengthIn(bank []byte, i int) uint64 { return binary.LittleEndian.Uint64(bank[8*i:]) }

// storeParts writes a bank of AllToAll.
func (m *Member) storeParts(bank []byte, parts [][]byte) {
	for i, p := range parts {
		n := len(p)
		if i == m.index {
			n = 0 // the own part is not moved
		}
		binary.LittleEndian.PutUint64(bank[8*i:], uint64(n))
	}
	if _, ok := m.partIn(bank, 0); !ok {
		return
	}
	at := 8 * m.members
	for i, p := range parts {
		if i != m.index {
			at += copy(bank[at:], p)
		}
	}
}

// partIn returns the offset of part i in a bank of AllToAll, if all parts are in the bank.
func (m *Member) partIn(bank []byte, i int) (int, bool) {
	at, found := 8*m.members, 0
	for j := range m.members {
		if j == i {
			found = at
		}
		n := lengthIn(bank, j)
		if n > uint64(len(bank)-at) {
			return 0, false
		}
		at += int(n)
	}
	return found, true
}

// exchangeParts moves src through this member's in slots, and the others' sections for this member
// to dst. The rules of [Member.exchange] apply; the counter reduced means here that this member has
// read its sections of the others' slots.
func (m *Member) exchangeParts(ctx context.Context, longest int) error {
	last := m.roundsOf(longest)
	err := inRounds(last, func(t int) error { return m.give(ctx, t) }, func(t int) error { return m.fetch(ctx, t) })
	m.finish(last)
	return err
}

func (m *Member) fetch(ctx context.Context, t int) error {
	m.in(CopyingOut)
	for i := range m.dst {
		part := m.inRound(m.dst[i], t)
		if i == m.index || len(part) == 0 {
			continue
		}
		if err := m.wait(ctx, i, &m.areas[i].given.word, m.rounds+uint64(t)+1); err != nil {
			return err
		}
		copy(part, m.section(i, m.index, t))
	}
	m.publish(&m.own.reduced.word, m.rounds+uint64(t)+1)
	return nil
}
