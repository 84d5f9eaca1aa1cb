package shm

import (
	"context"
	"encoding/binary"
	"fmt"
)

// foldLeast is the least result, in bytes, that is computed where the operands lie: with less, to
// give all operands to all takes no longer.
const foldLeast = 1 << 10

// Operand is one of the parts that a member of [Member.Fold] has.
type Operand struct{ Member, Number int }

// Folding says how the members' parts make a result.
type Folding struct {
	Size     int       // of an element, in bytes
	Operands []Operand // in the order in which Block gets them
	Most     int       // parts of one member at most
	// Block sets target, of at most 16 KiB, to the result of the operands there, which are as long
	// and do not overlap with it.
	Block func(target []byte, operands [][]byte)
}

// Fold computes a result from parts of all members, each as long as the result, and gives it to
// all: each member computes a share of it straight from where the others' parts lie. It does so
// only where parts and results of all members lie in arenas that all can read, and are large;
// otherwise it has only waited for all members, and reports false on all of them. Parts stay as
// they are.
func (m *Member) Fold(ctx context.Context, d Desc, parts [][]byte, result []byte, f *Folding) (done bool, err error) {
	if len(result) < foldLeast || 8*(f.Most+1) > m.layout.bank {
		return false, m.meetFor(ctx, d)
	}
	c, err := m.begin(ctx)
	if err != nil {
		return false, err
	}
	turn := m.op % 2
	m.announceParts(m.own.banks[turn], parts, result)
	m.announceData(c, result)
	if err := m.arrive(ctx, c, d); err != nil {
		return false, err
	}
	direct, err := m.direct(ctx, d, result)
	if !direct || err != nil {
		return false, err
	}
	operands, err := m.operandsOf(int(turn), len(result), parts, f)
	if operands == nil || err != nil {
		clear(m.regions.tensors)
		return false, err
	}
	return true, m.foldDirect(ctx, result, operands, f)
}

// announceParts puts into a bank where parts lie; 0 before them: not all of them are in this
// process's arena.
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

// operandsOf finds the operands in the members' memory; nil: some lie elsewhere. All members find
// the same.
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
			return nil, fmt.Errorf("shm: member %d tells of data beyond its memory", o.Member)
		}
		all[i] = p.memory[at : at+uint64(n)]
	}
	return all, nil
}

// foldDirect is allReduceDirect for operands that are not the members' results.
func (m *Member) foldDirect(ctx context.Context, result []byte, operands [][]byte, f *Folding) error {
	m.split(m.dst, result, f.Size, m.members)
	last := m.roundsOf(len(m.dst[0]))
	blocks := make([][]byte, len(operands))
	err := m.foldRound(0, operands, blocks, f)
	for t := 0; t < last && err == nil; t++ {
		if t+1 < last {
			err = m.foldRound(t+1, operands, blocks, f)
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
