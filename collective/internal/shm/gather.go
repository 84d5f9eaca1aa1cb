package shm

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"
)

// Broadcast replaces data by that of the member root.
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

// Posts reports whether Post of so many bytes is possible: every other member has called the last
// operation of this one, and they fit. It and Post belong to this member's operations, which do not
// overlap.
func (m *Member) Posts(bytes int) bool {
	if m.closed || m.round == 0 || bytes > m.layout.bank {
		return false
	}
	for i := range m.areas {
		// A member that has called an operation no longer needs what the one before it left in
		// cells and banks, which are used in turn.
		if i != m.index && atomic.LoadUint64(&m.cellOf(i).seq) < m.op {
			return false
		}
	}
	return true
}

// Post is Broadcast of this member's data that does not wait for the others, where Posts allows it.
// The others call Broadcast. Where their calls differ they notice alone.
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

// broadcastLong is Broadcast of data that no bank has room for.
func (m *Member) broadcastLong(ctx context.Context, d Desc, data []byte, root int) error {
	direct, err := m.meetReading(ctx, d, data)
	switch {
	case err != nil:
		return err
	case direct:
		return m.broadcastDirect(ctx, data, root)
	}
	m.dst[root] = data
	return m.exchangeOne(ctx)
}

// exchangeOne is exchange where a single member has a part of dst, which moves alone: its rounds
// are as long as those of all parts together.
func (m *Member) exchangeOne(ctx context.Context) error {
	usual := m.round
	defer func() { m.round = usual }()
	m.round = min(m.layout.out, usual*m.members)
	return m.exchange(ctx, nil, true)
}

// storeSmall puts data that is small enough into a cell, or into a bank. Otherwise it does nothing.
func (m *Member) storeSmall(cell, bank, data []byte) {
	switch {
	case len(data) <= len(cell):
		copy(cell, data)
	case len(data) <= len(bank):
		copy(bank, data)
	}
}

// loadSmall gets what storeSmall has put there.
func (m *Member) loadSmall(data, cell, bank []byte) {
	if len(data) <= len(cell) {
		copy(data, cell)
	} else {
		copy(data, bank)
	}
}

// AllGather gives every member's own data to all. The lengths may differ: place, which is called on
// every member once all lengths are known, returns for each other member a buffer of just that
// length; it must not keep lengths. Its error is returned, and the caller aborts then, since the
// others do not know of it.
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
		if err := m.setLength(i, i, binary.LittleEndian.Uint64(m.cellOf(i).data[:])); err != nil {
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

// setLength notes how long what a member tells of is.
func (m *Member) setLength(i, member int, n uint64) error {
	if n > math.MaxInt {
		return fmt.Errorf("shm: member %d announces %d bytes", member, n)
	}
	m.lengths[i] = int(n)
	return nil
}

// placed gets the buffers for what m.lengths tells.
func (m *Member) placed(place func(lengths []int) ([][]byte, error)) ([][]byte, error) {
	buffers, err := place(m.lengths)
	if err != nil {
		return nil, err
	}
	if len(buffers) != m.members {
		return nil, fmt.Errorf("shm: %d buffers for %d members", len(buffers), m.members)
	}
	for i, n := range m.lengths {
		if i != m.index && len(buffers[i]) != n {
			return nil, fmt.Errorf("shm: a buffer of %d bytes for %d", len(buffers[i]), n)
		}
	}
	return buffers, nil
}

// AllToAll gives parts[i] to member i; the own part stays where it is. Place is as in AllGather,
// for what the others give to this member.
//
// Each member lays out the lengths of its parts in a bank, and the parts behind them if there is
// room. Otherwise they go through its in slots, whose sections other members read.
func (m *Member) AllToAll(ctx context.Context, d Desc, parts [][]byte, place func(lengths []int) ([][]byte, error)) error {
	if len(parts) != m.members {
		return fmt.Errorf("shm: %d parts for %d members", len(parts), m.members)
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
		if err := m.setLength(i, i, lengthIn(m.areas[i].banks[turn], m.index)); err != nil {
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

func lengthIn(bank []byte, i int) uint64 { return binary.LittleEndian.Uint64(bank[8*i:]) }

// storeParts writes a bank of AllToAll.
func (m *Member) storeParts(bank []byte, parts [][]byte) {
	for i, p := range parts {
		n := len(p)
		if i == m.index {
			n = 0 // it goes nowhere
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

// partIn is where part i begins in a bank of AllToAll, if all parts lie there.
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

// exchangeParts moves src through the own in slots, and the others' sections for this member to
// dst. What is said at [Member.exchange] holds: the counter reduced says here that this member has
// read its sections of the others' slots.
func (m *Member) exchangeParts(ctx context.Context, longest int) error {
	last := m.roundsOf(longest)
	err := m.give(ctx, 0)
	for t := 0; t < last && err == nil; t++ {
		if t+1 < last {
			err = m.give(ctx, t+1)
		}
		if err == nil {
			err = m.fetch(ctx, t)
		}
	}
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
