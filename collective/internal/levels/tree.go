package levels

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
)

// Tree records which rank has which nodes of a binary tree. It is immutable.
type Tree struct {
	leaves  int
	held    [][]fold.Node // by rank
	counts  []int         // number of nodes, by rank
	order   *fold.Program
	members []shm.Operand // operands as numbered by package shm
	digest  uint32        // distinguishes it from other trees
}

// NewTree returns the Tree of a binary tree with the given number of leaves. Rank r has the nodes
// held[r]. NewTree keeps held.
func NewTree(leaves int, held [][]fold.Node) (*Tree, error) {
	if leaves < 1 || leaves > mostLeaves {
		return nil, fmt.Errorf("a tree of %d leaves is not possible: give 1 to %d", leaves, mostLeaves)
	}
	p := &Tree{leaves: leaves, counts: make([]int, len(held)), held: held}
	if err := p.compile(); err != nil {
		return nil, err
	}
	b := binary.AppendVarint(nil, int64(leaves))
	for r, nodes := range held {
		p.counts[r] = len(nodes)
		b = binary.AppendVarint(b, int64(len(nodes)))
		for _, n := range nodes {
			b = binary.AppendVarint(binary.AppendVarint(b, int64(n.Level)), int64(n.Index))
		}
	}
	p.digest = crc32.ChecksumIEEE(b)
	return p, nil
}

const mostLeaves = 1 << 24

// Ranks returns the number of ranks; 0 if p is nil.
func (p *Tree) Ranks() int {
	if p == nil {
		return 0
	}
	return len(p.counts)
}

// Nodes returns the number of nodes of a rank.
func (p *Tree) Nodes(rank int) int { return p.counts[rank] }

// Root returns a digest of the tree and the number of elements of its values.
func (p *Tree) Root(count uint64) int32 {
	return int32(crc32.Update(p.digest, crc32.IEEETable, binary.AppendUvarint(nil, count)))
}

// compile determines the order in which the values of the ranks are combined.
func (p *Tree) compile() error {
	at := map[fold.Node]fold.Operand{}
	covered := 0
	for rank, nodes := range p.held {
		for i, n := range nodes {
			if n.Level < 0 || n.Level > fold.Root(p.leaves).Level || n.Index < 0 || n.Index > mostLeaves>>n.Level || n.First() >= p.leaves {
				return fmt.Errorf("rank %d has node %d of level %d, which a tree of %d leaves does not have", rank, n.Index, n.Level, p.leaves)
			}
			if _, twice := at[n]; twice {
				return fmt.Errorf("node %d of level %d is given twice", n.Index, n.Level)
			}
			at[n] = fold.Operand{Rank: rank, Number: i}
			covered += n.End(p.leaves) - n.First()
		}
	}
	var missing int
	p.order, missing = fold.Compile(fold.Root(p.leaves), p.leaves, at)
	switch {
	case missing >= 0:
		return fmt.Errorf("leaf %d is under no node", missing)
	case covered != p.leaves || len(p.order.Operands) != len(at):
		return errors.New("a leaf is under two nodes")
	}
	for _, o := range p.order.Operands {
		p.members = append(p.members, shm.Operand{Member: o.Rank, Number: o.Number})
	}
	return nil
}
