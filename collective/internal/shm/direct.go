package shm

import (
	"context"
	"encoding/binary"
	"fmt"
)

// Data that lies in the members' arenas needs no slots: all can read all of it where it is. Each
// member tells in its cell where its data lies, and only if all do is that path taken.

const (
	// directLeast is the least data that is reduced so, in out slots, 4 MiB: slots stay in the
	// caches, where tensors do not.
	directLeast = 16
	// readLeast is the least data that is read where it lies, if nothing is reduced, in out slots.
	readLeast = 1
	// readPiece is how many bytes are copied before the next look at the abort word.
	readPiece = 256 << 10
)

// regions is what a member knows of the others' arenas.
type regions struct {
	announced bool // this member's own
	met       bool // all have tried to map all others'
	usable    bool // and all could
	peers     []*mapping
	tensors   [][]byte // of the operation under way, by member
}

// regionName is where a member announces its arena.
type regionName struct {
	invitation [invitationSize]byte
	_          [128 - invitationSize]byte
}

// announceData puts into the cell where data lies: 0, or the place in this process's arena.
func (m *Member) announceData(c *cell, data []byte) {
	at, ok := arenaOffset(data)
	if ok && !m.regions.announced {
		copy(m.own.region.invitation[:], region.Load().encode())
		m.regions.announced = true
	}
	binary.LittleEndian.PutUint64(c.data[:], at)
}

// direct says, after the arrival, whether all data lies in arenas that all can read. All members
// find the same.
func (m *Member) direct(ctx context.Context, d Desc, data []byte) (bool, error) {
	for i := range m.areas {
		if m.where(i) == 0 {
			return false, nil
		}
	}
	if !m.regions.met {
		if err := m.mapArenas(ctx, d, data); err != nil {
			return false, err
		}
	}
	if !m.regions.usable {
		return false, nil
	}
	for i, p := range m.regions.peers {
		if i == m.index {
			m.regions.tensors[i] = data
			continue
		}
		at, n := m.where(i), uint64(len(data))
		if at > p.size || n > p.size-at {
			return false, fmt.Errorf("shm: member %d names data outside of its memory", i)
		}
		m.regions.tensors[i] = p.memory[at : at+n]
	}
	return true, nil
}

// where is what a member has put into its cell by tell.
func (m *Member) where(i int) uint64 { return binary.LittleEndian.Uint64(m.cellOf(i).data[:]) }

// mapArenas maps the others' arenas and agrees with them once whether all could. It takes an
// arrival of its own, which tells again where data lies.
func (m *Member) mapArenas(ctx context.Context, d Desc, data []byte) error {
	m.regions.peers, m.regions.tensors = make([]*mapping, m.members), make([][]byte, m.members)
	good := byte(1)
	for i := range m.areas {
		if i == m.index {
			continue
		}
		name := m.areas[i].region
		p, err := openArenaOf(name.invitation[:])
		if err != nil {
			good = 0
			break
		}
		m.regions.peers[i] = p
	}
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	m.announceData(c, data)
	c.data[8] = good
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	m.regions.met, m.regions.usable = true, true
	for i := range m.areas {
		m.regions.usable = m.regions.usable && m.cellOf(i).data[8] == 1
	}
	if !m.regions.usable {
		m.regions.close()
	}
	return nil
}

func (r *regions) close() {
	for i, p := range r.peers {
		if p != nil {
			p.close()
		}
		r.peers[i] = nil
	}
}

// allReduceDirect has each member reduce its part straight from the others' data into its own, in
// rounds, while the others copy from there what is finished. No member writes into the memory of
// another; this member returns when no other reads its own any more.
//
// A member that is aborted may return earlier, and its caller may then change the data while others
// still read it. They look for an abort after their last read, so none of them takes what it has
// read for a result.
func (m *Member) allReduceDirect(ctx context.Context, data []byte, r *Reduction) error {
	m.split(m.dst, data, r.Size, m.members)
	last := m.roundsOf(len(m.dst[0]))
	err := m.reduceDirect(0, r)
	for t := 0; t < last && err == nil; t++ {
		if t+1 < last {
			err = m.reduceDirect(t+1, r)
		}
		if err == nil {
			err = m.takeDirect(ctx, t)
		}
	}
	if err == nil {
		err = m.awaitReaders(ctx, m.rounds+uint64(last))
	}
	m.finish(last)
	clear(m.regions.tensors)
	return err
}

// reduceOwn reduces this member's part straight from the others' data into its own. Nothing else
// becomes of their data before they have arrived at the next operation, with this member, unless
// they are aborted, for which it looks after its last read.
func (m *Member) reduceOwn(r *Reduction) error {
	last := m.roundsOf(len(m.dst[0]))
	var err error
	for t := 0; t < last && err == nil; t++ {
		err = m.reduceDirect(t, r)
	}
	if err == nil && m.aborted() {
		err = ErrAborted
	}
	m.finish(last)
	clear(m.regions.tensors)
	return err
}

// meetReading begins an operation in which data is only read, and waits for all. It reports whether
// all can read all others' where it lies.
func (m *Member) meetReading(ctx context.Context, d Desc, data []byte) (direct bool, err error) {
	c, err := m.begin(ctx)
	if err != nil {
		return false, err
	}
	return m.arriveWith(ctx, c, d, data, readLeast)
}

// gatherDirect copies the others' parts from where they lie, and returns when no other reads this
// member's own any more.
func (m *Member) gatherDirect(ctx context.Context) error {
	m.in(CopyingOut)
	m.streams = m.overflow(m.dst)
	var err error
	for d := 1; d < m.members && err == nil; d++ { // each begins with another one
		o := (m.index + d) % m.members
		err = m.copyFrom(m.dst[o], o, m.offset(o))
	}
	return m.endReading(ctx, true, err)
}

// broadcastDirect copies data of the root from where it lies.
func (m *Member) broadcastDirect(ctx context.Context, data []byte, root int) error {
	m.in(CopyingOut)
	m.streams = len(data) >= streamLeast/m.members
	var err error
	if m.index != root {
		err = m.copyFrom(data, root, 0)
	}
	return m.endReading(ctx, m.index == root, err)
}

// copyFrom copies some of a member's data, from a place of it on, once it is complete.
func (m *Member) copyFrom(part []byte, of, at int) error {
	for len(part) > 0 {
		if m.aborted() {
			return ErrAborted
		}
		n := m.copyOut(part[:min(len(part), readPiece)], m.regions.tensors[of][at:])
		part, at = part[n:], at+n
	}
	return nil
}

// endReading ends an operation in which members have read each other's data: where this member's is
// read, once all are done with it.
func (m *Member) endReading(ctx context.Context, read bool, err error) error {
	switch {
	case err != nil:
	case read:
		err = m.awaitReaders(ctx, m.rounds+1)
	default:
		m.publish(&m.own.given.word, m.rounds+1)
		if m.aborted() {
			err = ErrAborted
		}
	}
	m.finish(1)
	clear(m.regions.tensors)
	return err
}

func (m *Member) reduceDirect(t int, r *Reduction) error {
	m.in(Reducing)
	if m.aborted() {
		return ErrAborted
	}
	target := m.inRound(m.dst[m.index], t)
	base := m.offset(m.index) + t*m.round
	for lo := 0; lo < len(target); lo += block {
		hi := min(lo+block, len(target))
		m.combineDirect(target[lo:hi], base+lo, r)
	}
	m.publish(&m.own.reduced.word, m.rounds+uint64(t)+1)
	return nil
}

// combineDirect reduces one block. All partial results but the last are kept elsewhere, since
// target is an operand too.
func (m *Member) combineDirect(target []byte, at int, r *Reduction) {
	n := len(target)
	for i := range m.operands {
		m.operands[i] = m.regions.tensors[i][at : at+n]
	}
	r.all(target, m.own.out[0][:n], m.operands)
}

// offset is where a member's part begins in data.
func (m *Member) offset(i int) int {
	at := 0
	for _, part := range m.dst[:i] {
		at += len(part)
	}
	return at
}

func (m *Member) takeDirect(ctx context.Context, t int) error {
	m.in(CopyingOut)
	at := t * m.round
	for o := range m.dst {
		part := m.inRound(m.dst[o], t)
		if o != m.index && len(part) > 0 {
			if err := m.wait(ctx, o, &m.areas[o].reduced.word, m.rounds+uint64(t)+1); err != nil {
				return err
			}
			m.copyOut(part, m.regions.tensors[o][at:])
		}
		at += len(m.dst[o])
	}
	return nil
}

// awaitReaders waits until all are done with this member's data.
func (m *Member) awaitReaders(ctx context.Context, value uint64) error {
	m.publish(&m.own.given.word, value)
	for i := range m.areas {
		if i != m.index {
			if err := m.wait(ctx, i, &m.areas[i].given.word, value); err != nil {
				return err
			}
		}
	}
	if m.aborted() {
		return ErrAborted
	}
	return nil
}
