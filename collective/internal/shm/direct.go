package shm

import (
	"context"
	"encoding/binary"
	"fmt"
)

// Data in the members' arenas needs no slots: all members can read all of it in place. Each member
// writes the location of its data to its cell. Data is read in place only if the data of all
// members is in arenas.

const (
	// directLeast is the least size of data that is reduced in place, as a number of out slots (4
	// MiB): slots remain in the caches, tensors do not.
	directLeast = 16
	// readLeast is the least size of data that is read in place if nothing is reduced, as a number
	// of out slots.
	readLeast = 1
	// readPiece is the number of bytes copied between two checks of the abort word.
	readPiece = 256 << 10
)

// regions is what a member knows about the others' arenas.
type regions struct {
	announced bool // this member has announced its arena
	met       bool // all members have tried to map all arenas
	usable    bool // all members could map all arenas
	peers     []*mapping
	tensors   [][]byte // of the operation in progress, by member
}

// regionName is where a member announces its arena.
type regionName struct {
	invitation [invitationSize]byte
	_          [128 - invitationSize]byte
}

// announceData writes the location of data to the cell: its offset in this process's arena, or 0 if
// it is not there.
func (m *Member) announceData(c *cell, data []byte) {
	at, ok := arenaOffset(data)
	if ok && !m.regions.announced {
		copy(m.own.region.invitation[:], region.Load().encode())
		m.regions.announced = true
	}
	binary.LittleEndian.PutUint64(c.data[:], at)
}

// direct reports, after the arrival, whether all data is in arenas that all members can read. The
// result is the same on all members.
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

// where returns the location that a member has written to its cell by announceData.
func (m *Member) where(i int) uint64 { return binary.LittleEndian.Uint64(m.cellOf(i).data[:]) }

// mapArenas maps the others' arenas, and agrees with the others once whether all could. It needs a
// separate arrival, in which the locations of data are announced again.
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

// allReduceDirect reduces this member's part directly from the others' data into its own, in
// rounds, and copies the finished rounds of the other members from theirs. No member writes to the
// memory of another. It returns when no other member reads this member's data any more.
//
// A member that is aborted may return earlier, and its caller may then change the data while others
// still read it. They check for an abort after their last read, so none of them returns such data
// as a result.
func (m *Member) allReduceDirect(ctx context.Context, data []byte, r *Reduction) error {
	m.split(m.dst, data, r.Size, m.members)
	return m.exchangeDirect(ctx, func(t int) error { return m.reduceDirect(t, r) })
}

// exchangeDirect computes this member's part round by round, and copies the rounds of the other
// members' parts. It returns when no other member reads this member's data any more.
func (m *Member) exchangeDirect(ctx context.Context, compute func(t int) error) error {
	last := m.roundsOf(len(m.dst[0]))
	err := inRounds(last, compute, func(t int) error { return m.takeDirect(ctx, t) })
	if err == nil {
		err = m.awaitReaders(ctx, m.rounds+uint64(last))
	}
	m.finish(last)
	clear(m.regions.tensors)
	return err
}

// reduceOwn reduces this member's part directly from the others' data into its own. The others do
// not change their data before all have arrived at the next operation, unless they are aborted;
// reduceOwn checks for that after its last read.
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

// gatherDirect copies the others' parts from their memory, and returns when no other member reads
// this member's part any more.
func (m *Member) gatherDirect(ctx context.Context) error {
	m.in(CopyingOut)
	m.streams = m.overflow(m.dst)
	var err error
	for d := 1; d < m.members && err == nil; d++ { // each member begins with a different one
		o := (m.index + d) % m.members
		err = m.copyFrom(m.dst[o], o, m.offset(o))
	}
	return m.endReading(ctx, true, err)
}

// broadcastDirect copies data of the root from the root's memory.
func (m *Member) broadcastDirect(ctx context.Context, data []byte, root int) error {
	m.in(CopyingOut)
	m.streams = len(data) >= streamLeast/m.members
	var err error
	if m.index != root {
		err = m.copyFrom(data, root, 0)
	}
	return m.endReading(ctx, m.index == root, err)
}

// copyFrom copies a part of the data of member of, which begins at the offset at.
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

// endReading ends an operation in which members have read each other's data. If this member's data
// is read, it waits until all have finished.
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

// reduceDirect reduces round t of this member's part.
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

// combineDirect reduces one block. All partial results but the last are written to other memory,
// since target is an operand too.
func (m *Member) combineDirect(target []byte, at int, r *Reduction) {
	n := len(target)
	for i := range m.operands {
		m.operands[i] = m.regions.tensors[i][at : at+n]
	}
	r.all(target, m.own.out[0][:n], m.operands)
}

// offset returns the offset of a member's part in data.
func (m *Member) offset(i int) int {
	at := 0
	for _, part := range m.dst[:i] {
		at += len(part)
	}
	return at
}

// takeDirect copies round t of the other members' parts, each once it is reduced.
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

// awaitReaders waits until all members have finished reading this member's data.
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
