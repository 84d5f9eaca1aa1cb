package collective

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Node is a range of leaves of a binary tree: those from Index·2^Level up to, but without,
// (Index+1)·2^Level, as far as there are so many. The value of a node is that of its left half
// combined with that of its right half; where the right half is empty, it is that of the left half.
type Node struct{ Level, Index int }

// First is the number of its first leaf.
func (n Node) First() int { return fold.Node(n).First() }

// End is the number after its last leaf in a tree of so many leaves.
func (n Node) End(leaves int) int { return fold.Node(n).End(leaves) }

// Parent is the node that n is a half of.
func (n Node) Parent() Node { return Node(fold.Node(n).Parent()) }

// Sibling is the other half of its parent.
func (n Node) Sibling() Node { return Node(fold.Node(n).Sibling()) }

// Left is its left half; its level is at least 1.
func (n Node) Left() Node { return Node(fold.Node(n).Left()) }

// Root is the node that all leaves of a tree of so many are under.
func Root(leaves int) Node { return Node(fold.Root(leaves)) }

// Cover returns the fewest nodes that have just the leaves from first up to, but without, end, in
// ascending order, in a tree of so many leaves.
func Cover(first, end, leaves int) (nodes []Node) {
	for first < end {
		n := Node{Index: first}
		for n.Index%2 == 0 && n.Level < Root(leaves).Level && n.Parent().End(leaves) <= end {
			n = n.Parent()
		}
		nodes = append(nodes, n)
		first = n.End(leaves)
	}
	return nodes
}

// CombineNodes sets dst to the value of node n of a tree with the given number of leaves, from the
// values of its halves, as [ReduceTree] computes it with op. It differs from [Combine] only for an
// Average of [Float16] or [BFloat16]. All slices have the same length, and dst may be left or
// right. It panics if Combine does, or if one of the halves has no leaf.
func CombineNodes[T Element](dst, left, right []T, n Node, leaves int, op Op) {
	t := typeOf[T]()
	if !(operation.Descriptor{Type: t, Op: operation.Op(op)}).Means() {
		Combine(dst, left, right, op)
		return
	}
	if n.Level == 0 || n.Left().Sibling().First() >= leaves {
		panic(fmt.Sprintf("collective: node %d of level %d of %d leaves has one half", n.Index, n.Level, leaves))
	}
	m := fold.MergeOf(fold.Node(n), leaves)
	kernel.Mean(t, kernel.Bytes(dst), [][]byte{kernel.Bytes(left), kernel.Bytes(right)}, m.Weights[:], m.By)
}

// Partials records which rank has which nodes of a binary tree, for [ReduceTree]. It does not
// change and may be used by several goroutines. The zero value is refused.
type Partials struct {
	leaves  int
	held    [][]Node // by rank
	counts  []int    // by rank, of its nodes
	order   *fold.Program
	members []shm.Operand // its operands as package shm numbers them
	digest  uint32        // tells it from others; ranks compare it
}

// NewPartials returns the partials of a tree with the given number of leaves, at most 2^24. Rank r
// has the nodes held[r]. Each leaf must be under exactly one node of one rank.
func NewPartials(leaves int, held [][]Node) (*Partials, error) {
	if leaves < 1 || leaves > mostLeaves {
		return nil, fmt.Errorf("collective: a tree of %d leaves, not of 1 to %d", leaves, mostLeaves)
	}
	p := &Partials{leaves: leaves, counts: make([]int, len(held)), held: make([][]Node, len(held))}
	if err := p.compile(held); err != nil {
		return nil, fmt.Errorf("collective: %w", err)
	}
	b := binary.AppendVarint(nil, int64(leaves))
	for r, nodes := range held {
		p.held[r], p.counts[r] = slices.Clone(nodes), len(nodes)
		b = binary.AppendVarint(b, int64(len(nodes)))
		for _, n := range nodes {
			b = binary.AppendVarint(binary.AppendVarint(b, int64(n.Level)), int64(n.Index))
		}
	}
	p.digest = crc32.ChecksumIEEE(b)
	return p, nil
}

const mostLeaves = 1 << 24

// compile finds the order in which what the ranks have is combined.
func (p *Partials) compile(held [][]Node) error {
	at := map[fold.Node]fold.Operand{}
	covered := 0
	for rank, nodes := range held {
		for i, n := range nodes {
			if n.Level < 0 || n.Level > Root(p.leaves).Level || n.Index < 0 || n.Index > mostLeaves>>n.Level || n.First() >= p.leaves {
				return fmt.Errorf("rank %d has node %d of level %d, which a tree of %d leaves does not have", rank, n.Index, n.Level, p.leaves)
			}
			if _, twice := at[fold.Node(n)]; twice {
				return fmt.Errorf("node %d of level %d is there twice", n.Index, n.Level)
			}
			at[fold.Node(n)] = fold.Operand{Rank: rank, Number: i}
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

// folder is what a group keeps for its ReduceTrees.
type folder struct {
	fold.Folder
	packed []byte    // what is given or received, see foldGathered and foldPairs
	given  []byte    // to ranks of this host, see exchangeHere
	room   fold.Room // of a piece, see foldHierarchical

	atRoot func([]byte) // of the root's value; nil: it is the result
	levels *twoLevels   // of the last partials; nil: none yet
}

// folder returns the group's folder, which keeps its memory.
func (g *Group) folder(p *Partials, d operation.Descriptor) *folder {
	f := &g.call.folding
	f.Combine, f.Mean, f.atRoot = d.Combiner(), 0, nil
	switch whole := kernel.Fold(p.leaves); {
	case d.Means():
		f.Mean = d.Type
		if whole > p.leaves {
			f.atRoot = func(b []byte) { kernel.Mean(d.Type, b, [][]byte{b}, []int{whole}, p.leaves) }
		}
	case d.Op == operation.Average:
		f.atRoot = func(b []byte) { d.Divide(b, p.leaves) }
	}
	f.Finish = f.atRoot
	return f
}
