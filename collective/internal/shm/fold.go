package shm

import (
	"context"
	"encoding/binary"
	"fmt"
)

// Operand identifies one of the parts of a member in [Member.Fold].
type Operand struct{ Member, Number int }

// Folding describes how a result is computed from the members' parts.
type Folding struct {
	Size     int       // of an element, in bytes
	Operands []Operand // in the order in which Block gets them
	Most     int       // largest number of parts of one member
	// Block sets target, of at most 16 KiB, to the result of the operands, which have the same
	// length and do not overlap with target.
	Block func(target []byte, operands [][]byte)
}

// Folds reports whether Fold is possible. most is the largest number of parts of a member.
func (m *Member) Folds(most int) bool {
	return 8*(most+1) <= m.layout.bank && most <= m.layout.out/line
}

// Fold computes a result from parts of all members, each as long as the result, and gives it to all
// members: each member computes a share of it. If parts and results of all members are in arenas
// that all can read, Fold reads the parts in place, otherwise it uses slots. Parts are not changed.
// Folds must have returned true.
func (m *Member) Fold(ctx context.Context, d Desc, parts [][]byte, result []byte, f *Folding) error {
	c, err := m.begin(ctx)
	if err != nil {
		return err
	}
	turn := m.op % 2
	m.announceParts(m.own.banks[turn], parts, result)
	m.announceData(c, result)
	if err := m.arrive(ctx, c, d); err != nil {
		return err
	}
	direct, err := m.direct(ctx, d, result)
	if err != nil {
		return err
	}
	if direct {
		operands, err := m.operandsOf(int(turn), len(result), parts, f)
		if operands != nil && err == nil {
			return m.foldDirect(ctx, result, operands, f)
		}
		clear(m.regions.tensors)
		if err != nil {
			return err
		}
	}
	return m.foldInSlots(ctx, parts, result, f)
}

// announceParts writes the locations of parts to a bank, after a word that is 0 if some of them are
// not in this process's arena.
func (m *Member) announceParts(bank []byte, parts [][]byte, result []byte) {
	all := uint64(1)
	for i, p := range parts {
		at, ok := arenaOffset(p)
		if !ok {
			all = 0
		}
		binary.LittleEndian.PutUint64(bank[8*(i+1):], at)
	}
	binary.LittleEndian.PutUint64(bank, all)
}

// operandsOf returns the operands in the members' arenas, or nil if some are not in an arena. All
// members get the same result.
func (m *Member) operandsOf(turn, n int, parts [][]byte, f *Folding) ([][]byte, error) {
	for i := range m.areas {
		if binary.LittleEndian.Uint64(m.areas[i].banks[turn]) == 0 {
			return nil, nil
		}
	}
	all := make([][]byte, len(f.Operands))
	for i, o := range f.Operands {
		if o.Member == m.index {
			all[i] = parts[o.Number]
			continue
		}
		p := m.regions.peers[o.Member]
		at := binary.LittleEndian.Uint64(m.areas[o.Member].banks[turn][8*(o.Number+1):])
		if at > p.size || uint64(n) > p.size-at {
			return nil, fmt.Errorf("shm: member %d names data outside of its memory", o.Member)
		}
		all[i] = p.memory[at : at+uint64(n)]
	}
	return all, nil
}

// foldDirect is like allReduceDirect, for operands that are separate from the results.
func (m *Member) foldDirect(ctx context.Context, result []byte, operands [][]byte, f *Folding) error {
	m.split(m.dst, result, f.Size, m.members)
	m.streams = m.overflow(m.dst)
	blocks := make([][]byte, len(operands))
	return m.exchangeDirect(ctx, func(t int) error { return m.foldRound(t, operands, blocks, f) })
}

// foldRound computes round t of this member's share.
func (m *Member) foldRound(t int, operands, blocks [][]byte, f *Folding) error {
	m.in(Reducing)
	if m.aborted() {
		return ErrAborted
	}
	target := m.inRound(m.dst[m.index], t)
	base := m.offset(m.index) + t*m.round
	for lo := 0; lo < len(target); lo += block {
		hi := min(lo+block, len(target))
		for i, o := range operands {
			blocks[i] = o[base+lo : base+hi]
		}
		f.Block(target[lo:hi], blocks)
	}
	m.publish(&m.own.reduced.word, m.rounds+uint64(t)+1)
	return nil
}

// foldInSlots is like [Member.exchange], for members that give several parts: the parts are one
// after another in a section of the in slot, and the result replaces the first.
func (m *Member) foldInSlots(ctx context.Context, parts [][]byte, result []byte, f *Folding) error {
	usual := m.round
	defer func() { m.round = usual }()
	s := slotFold{Member: m, Folding: f, parts: parts, operands: make([][]byte, len(f.Operands))}
	s.width = max(1, f.Most)
	m.round = min(usual, m.layout.out/s.width) &^ (line - 1)
	m.split(m.dst, result, f.Size, m.members)
	last := m.roundsOf(len(m.dst[0]))
	err := inRounds(last, func(t int) error { return s.give(ctx, t) }, func(t int) error {
		if err := s.fold(ctx, t); err != nil {
			return err
		}
		return s.take(ctx, t)
	})
	m.finish(last)
	return err
}

// slotFold is a Fold in slots.
type slotFold struct {
	*Member
	*Folding
	parts    [][]byte
	width    int // number of parts in a section
	operands [][]byte
}

// part returns the memory for the data of one of a member's parts that it gives to an owner in
// round t. The memory of the first part later has the result.
func (s *slotFold) part(member, owner, number, t int) []byte {
	return s.areas[member].in[t%slots][(owner*s.width+number)*s.round:][:s.round]
}

func (s *slotFold) give(ctx context.Context, t int) error {
	s.in(CopyingIn)
	at := t * s.round
	for o := range s.dst {
		n := len(s.inRound(s.dst[o], t))
		if o != s.index && n > 0 {
			if t >= slots {
				if err := s.wait(ctx, o, &s.areas[o].reduced.word, s.rounds+uint64(t-slots)+1); err != nil {
					return err
				}
			}
			for i, p := range s.parts {
				copy(s.part(s.index, o, i, t), p[at:at+n])
			}
		}
		at += len(s.dst[o])
	}
	if s.aborted() {
		return ErrAborted
	}
	s.publish(&s.own.given.word, s.rounds+uint64(t)+1)
	return nil
}

func (s *slotFold) fold(ctx context.Context, t int) error {
	s.in(Reducing)
	target := s.inRound(s.dst[s.index], t)
	if len(target) == 0 {
		return nil
	}
	for i := range s.areas {
		if i == s.index {
			continue
		}
		if err := s.wait(ctx, i, &s.areas[i].given.word, s.rounds+uint64(t)+1); err != nil {
			return err
		}
	}
	base := s.offset(s.index) + t*s.round
	for lo := 0; lo < len(target); lo += block {
		hi := min(lo+block, len(target))
		for i, o := range s.Operands {
			if o.Member == s.index {
				s.operands[i] = s.parts[o.Number][base+lo : base+hi]
			} else {
				s.operands[i] = s.part(o.Member, s.index, o.Number, t)[lo:hi]
			}
		}
		s.Block(target[lo:hi], s.operands)
		for i := range s.areas {
			if i != s.index {
				copy(s.part(i, s.index, 0, t)[lo:hi], target[lo:hi])
			}
		}
	}
	s.publish(&s.own.reduced.word, s.rounds+uint64(t)+1)
	return nil
}

func (s *slotFold) take(ctx context.Context, t int) error {
	s.in(CopyingOut)
	for o := range s.dst {
		part := s.inRound(s.dst[o], t)
		if o == s.index || len(part) == 0 {
			continue
		}
		if err := s.wait(ctx, o, &s.areas[o].reduced.word, s.rounds+uint64(t)+1); err != nil {
			return err
		}
		copy(part, s.part(s.index, o, 0, t))
	}
	if s.aborted() {
		return ErrAborted
	}
	return nil
}
