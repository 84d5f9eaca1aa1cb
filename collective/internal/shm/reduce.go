package shm

import (
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// The number of bytes of each part that are moved in one round. Members that share a core also
// share its caches, so their rounds are short.
const (
	roomyRound          = 256 << 10
	oversubscribedRound = 32 << 10
	block               = 16 << 10 // bytes that are combined at once: the result is still in the cache when it is copied
)

// Barrier blocks until all members have called it.
func (m *Member) Barrier(ctx context.Context, d Desc) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	return m.arrive(ctx, c, d)
}

// AllReduce replaces data by the members' reduction, in place. On error data is undefined.
func (m *Member) AllReduce(ctx context.Context, d Desc, data []byte, r *Reduction) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(data) <= payload:
		return m.allReduceCells(ctx, c, d, data, r)
	case len(data) <= m.layout.bank:
		return m.allReduceBanks(ctx, c, d, data, r)
	}
	direct, err := m.arriveWith(ctx, c, d, data, directLeast)
	if err != nil {
		return err
	}
	return m.allReduceLong(ctx, data, r, direct)
}

// allReduceLong performs the rest of AllReduce, after the arrival, with data that does not fit into
// a bank.
func (m *Member) allReduceLong(ctx context.Context, data []byte, r *Reduction, direct bool) error {
	if direct {
		return m.allReduceDirect(ctx, data, r)
	}
	m.split(m.src, data, r.Size, m.members)
	m.split(m.dst, data, r.Size, m.members)
	return m.exchange(ctx, r, true)
}

// said is the index in a cell's data of the byte with the member's answer, yes or no.
const said = payload - 1

// AllReduceSaying performs AllReduce with length bytes of each member if all members pass true as
// yes. Otherwise it reduces nothing. Only members that pass true have data. It reports whether all
// have passed true.
func (m *Member) AllReduceSaying(ctx context.Context, d Desc, length int, data []byte, yes bool, r *Reduction) (all bool, err error) {
	c, err := m.begin(ctx)
	if err != nil {
		return false, err
	}
	turn, far := m.op%2, length >= directLeast*m.layout.out
	switch {
	case length <= said:
		copy(c.data[:said], data)
	case far:
		m.announceData(c, data)
	default:
		m.storeSmall(nil, m.own.banks[turn], data)
	}
	c.say(yes)
	if err := m.arrive(ctx, c, d); err != nil || !m.allSay() {
		return false, err
	}
	switch {
	case length <= said:
		m.reduceSmall(data, r, func(i int) []byte { return m.cellOf(i).data[:length] })
	case length <= m.layout.bank:
		m.reduceSmall(data, r, func(i int) []byte { return m.areas[i].banks[turn][:length] })
	default:
		direct := false
		if far {
			direct, err = m.direct(ctx, d, data)
		}
		if err == nil {
			err = m.allReduceLong(ctx, data, r, direct)
		}
	}
	return err == nil, err
}

// say stores the member's answer.
func (c *cell) say(yes bool) {
	c.data[said] = 0
	if yes {
		c.data[said] = 1
	}
}

// allSay reports, after the arrival, whether all members have passed yes.
func (m *Member) allSay() bool {
	for i := range m.areas {
		if m.cellOf(i).data[said] != 1 {
			return false
		}
	}
	return true
}

// reduceSmall reduces all of data from the copies of all members.
func (m *Member) reduceSmall(data []byte, r *Reduction, operand func(member int) []byte) {
	m.in(Reducing)
	for i := range m.operands {
		m.operands[i] = operand(i)
	}
	r.all(data, data, m.operands)
}

// allReduceCells performs AllReduce with data that fits a cell. Every member reduces all of it.
func (m *Member) allReduceCells(ctx context.Context, c *cell, d Desc, data []byte, r *Reduction) error {
	n := copy(c.data[:], data)
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.reduceSmall(data, r, func(i int) []byte { return m.cellOf(i).data[:n] })
	return nil
}

// allReduceBanks is like allReduceCells, with one bank of every member. Two banks used in turn are
// enough: a member that writes a bank has seen all members arrive at the previous operation, and
// they had read the same bank before, in the operation before that.
func (m *Member) allReduceBanks(ctx context.Context, c *cell, d Desc, data []byte, r *Reduction) error {
	turn := m.op % 2
	n := copy(m.own.banks[turn], data)
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.reduceSmall(data, r, func(i int) []byte { return m.areas[i].banks[turn][:n] })
	return nil
}

// Reduce performs the first half of AllReduce. The first owners members, at least one, own a part
// of the reduction as divided by [kernel.Split], which is written to its place in the owner's data.
// The rest of data is undefined. If all members own a part and their data is in arenas, others may
// read data until this member has arrived at the next operation.
func (m *Member) Reduce(ctx context.Context, d Desc, data []byte, owners int, r *Reduction) error {
	direct, err := false, error(nil)
	if owners < m.members {
		err = m.Barrier(ctx, d)
	} else {
		direct, err = m.meetWith(ctx, d, data, directLeast)
	}
	if err != nil {
		return err
	}
	m.split(m.dst, data, r.Size, owners)
	if direct {
		return m.reduceOwn(r)
	}
	m.split(m.src, data, r.Size, owners)
	return m.exchange(ctx, r, false)
}

// ReduceSaying writes this member's part of the reduction of data to result; data is not changed.
// It reports whether all members have passed yes.
func (m *Member) ReduceSaying(ctx context.Context, d Desc, data, result []byte, yes bool, r *Reduction) (all bool, err error) {
	c, err := m.begin(ctx)
	if err != nil {
		return false, err
	}
	c.say(yes)
	if err := m.arrive(ctx, c, d); err != nil {
		return false, err
	}
	all = m.allSay()
	m.split(m.src, data, r.Size, m.members)
	m.dst[m.index] = result
	return all, m.exchange(ctx, r, false)
}

// Gather performs the second half of AllReduce: each of the first owners members gives its part of
// data, as divided by [kernel.Part] into units of size bytes, to all members.
func (m *Member) Gather(ctx context.Context, d Desc, data []byte, size, owners int) error {
	direct, err := m.meetWith(ctx, d, data, readLeast)
	if err != nil {
		return err
	}
	m.split(m.dst, data, size, owners)
	if direct {
		return m.gatherDirect(ctx)
	}
	return m.exchange(ctx, nil, true)
}

// ReduceScatter writes the reduction of the members' parts for this member to result. Each member
// has one part for every member; the parts for one member have the same length on all members. They
// are not changed.
func (m *Member) ReduceScatter(ctx context.Context, d Desc, parts [][]byte, result []byte, r *Reduction) error {
	if len(parts) != m.members {
		return fmt.Errorf("shm: %d parts are given for %d members", len(parts), m.members)
	}
	if len(result) != len(parts[m.index]) {
		return fmt.Errorf("shm: the result has %d bytes, and its part %d", len(result), len(parts[m.index]))
	}
	if err := m.Barrier(ctx, d); err != nil {
		return err
	}
	copy(m.src, parts)
	m.dst[m.index] = result
	return m.exchange(ctx, r, false)
}

// meetWith begins an operation and waits for all members. Its result is that of arriveWith.
func (m *Member) meetWith(ctx context.Context, d Desc, data []byte, least int) (direct bool, err error) {
	c, err := m.begin(ctx)
	if err != nil {
		return false, err
	}
	return m.arriveWith(ctx, c, d, data, least)
}

// arriveWith arrives, and reports whether data has at least the size of least out slots and all
// members can read all data in place.
func (m *Member) arriveWith(ctx context.Context, c *cell, d Desc, data []byte, least int) (direct bool, err error) {
	far := len(data) >= least*m.layout.out
	if far {
		m.announceData(c, data)
	}
	if err := m.arrive(ctx, c, d); err != nil || !far {
		return false, err
	}
	return m.direct(ctx, d, data)
}

// split cuts data, which consists of units of size bytes, into parts for the first owners members.
// The parts of the other members are empty.
func (m *Member) split(parts [][]byte, data []byte, size, owners int) {
	for i := range parts {
		parts[i] = nil
	}
	for i := range min(owners, len(parts)) {
		parts[i] = kernel.Part(data, size, owners, i)
	}
}

// exchange moves data in rounds. Each round covers some bytes of every member's part, so that the
// data in flight remains in the caches. Each round t has three steps:
//
//	give     copies the parts of src that other members own to this member's in slot, and sets the
//	         counter given to t+1
//	reduce   combines the own part, from the own src and the others' in slots, into dst and, if
//	         gather, into these slots; without a reduction it copies dst to the own out slot; then it
//	         sets the counter reduced to t+1
//	take     if gather, copies the other parts to dst, from the own in slot or, without a reduction,
//	         from the owners' out slots
//
// Returning results through the same slots saves a quarter of the time: half as much memory is
// moved between two cores' caches, and a core that has just read a line can write it sooner.
//
// The order of the steps is give 0, then give t+1, reduce t, take t for each t. Slots are used in
// turn, slot t%2 in round t, and are free when they are used again:
//
//   - Give t writes in slot t%2, which the owners read and wrote in reduce t−2, and this member
//     read in take t−2. Before that this member waits until the owners' counters reduced are at
//     least t−1: in take t−2 or, without a take, in give t.
//   - Reduce t writes the in slots t%2 of other members, after it has waited for their give t.
//   - Reduce t writes out slot t%2, which others read in take t−2. It first waits until all
//     counters given are t+1. A member sets its counter to t+1 in give t, which follows its take
//     t−2.
//
// Between operations the arrival of all members gives the same guarantee. Counters continue from
// operation to operation.
func (m *Member) exchange(ctx context.Context, r *Reduction, gather bool) error {
	longest := 0
	for i := range m.dst {
		longest = max(longest, len(m.dst[i]), len(m.src[i]))
	}
	m.streams = r == nil && m.overflow(m.dst)
	last := m.roundsOf(longest)
	err := inRounds(last, func(t int) error { return m.give(ctx, t) }, func(t int) error {
		if err := m.reduce(ctx, t, r, gather); err != nil || !gather {
			return err
		}
		return m.take(ctx, t, r != nil)
	})
	m.finish(last)
	return err
}

// inRounds runs the rounds from 0 to last−1: begin, and then complete. It begins each round before
// it completes the previous one, so that other members have what they need early.
func inRounds(last int, begin, complete func(t int) error) error {
	err := begin(0)
	for t := 0; t < last && err == nil; t++ {
		if t+1 < last {
			err = begin(t + 1)
		}
		if err == nil {
			err = complete(t)
		}
	}
	return err
}

// roundsOf returns the number of rounds if the longest part has the given number of bytes.
func (m *Member) roundsOf(longest int) int { return max(1, (longest+m.round-1)/m.round) }

// finish ends an exchange.
func (m *Member) finish(rounds int) {
	m.rounds += uint64(rounds)
	m.streams = false
	clear(m.src)
	clear(m.dst)
}

// inRound returns the bytes of a part that round t covers.
func (m *Member) inRound(part []byte, t int) []byte {
	lo := min(t*m.round, len(part))
	return part[lo:min(lo+m.round, len(part))]
}

func (m *Member) give(ctx context.Context, t int) error {
	m.in(CopyingIn)
	for o := range m.src {
		part := m.inRound(m.src[o], t)
		if o == m.index || len(part) == 0 {
			continue
		}
		if t >= slots {
			if err := m.wait(ctx, o, &m.areas[o].reduced.word, m.rounds+uint64(t-slots)+1); err != nil {
				return err
			}
		}
		copy(m.section(m.index, o, t), part)
	}
	if m.aborted() {
		return ErrAborted
	}
	m.publish(&m.own.given.word, m.rounds+uint64(t)+1)
	return nil
}

// section returns the memory in a member's in slot for the data that an owner reduces.
func (m *Member) section(member, owner, t int) []byte {
	at := owner * m.round
	return m.areas[member].in[t%slots][at : at+m.round]
}

func (m *Member) reduce(ctx context.Context, t int, r *Reduction, gather bool) error {
	m.in(Reducing)
	target := m.inRound(m.dst[m.index], t)
	if len(target) == 0 {
		return nil
	}
	for i := range m.areas {
		if i == m.index {
			continue
		}
		if err := m.wait(ctx, i, &m.areas[i].given.word, m.rounds+uint64(t)+1); err != nil {
			return err
		}
	}
	if r == nil {
		copy(m.own.out[t%slots], target)
	} else {
		m.combine(target, t, r, gather)
	}
	m.publish(&m.own.reduced.word, m.rounds+uint64(t)+1)
	return nil
}

// combine reduces block by block, in the order of the members, in the slot of the first other
// member, whose operand is the first or the second. It copies each block to target, which may be
// the own operand, and, if back is true, to the other slots.
func (m *Member) combine(target []byte, t int, r *Reduction, back bool) {
	own := m.inRound(m.src[m.index], t)
	if m.members == 1 {
		r.all(target, target, [][]byte{own})
		return
	}
	other := 0
	if m.index == 0 {
		other = 1
	}
	for lo := 0; lo < len(target); lo += block {
		hi := min(lo+block, len(target))
		for i := range m.operands {
			m.operands[i] = m.operand(i, t, own)[lo:hi]
		}
		sum := m.section(other, m.index, t)[lo:hi]
		r.all(sum, sum, m.operands)
		copy(target[lo:hi], sum)
		for i := other + 1; back && i < m.members; i++ {
			if i != m.index {
				copy(m.section(i, m.index, t)[lo:hi], sum)
			}
		}
	}
}

// operand returns the data of a member for round t of this member's part.
func (m *Member) operand(member, t int, own []byte) []byte {
	if member == m.index {
		return own
	}
	return m.section(member, m.index, t)
}

func (m *Member) take(ctx context.Context, t int, back bool) error {
	m.in(CopyingOut)
	for o := range m.dst {
		part := m.inRound(m.dst[o], t)
		if o == m.index || len(part) == 0 {
			continue
		}
		if err := m.wait(ctx, o, &m.areas[o].reduced.word, m.rounds+uint64(t)+1); err != nil {
			return err
		}
		from := m.areas[o].out[t%slots]
		if back {
			from = m.section(m.index, o, t)
		}
		m.copyOut(part, from)
	}
	if m.aborted() {
		return ErrAborted
	}
	return nil
}
