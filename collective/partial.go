package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
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
type Partials struct{ tree *levels.Tree }

// NewPartials returns the partials of a tree with the given number of leaves, at most 2^24. Rank r
// has the nodes held[r]. Each leaf must be under exactly one node of one rank.
func NewPartials(leaves int, held [][]Node) (*Partials, error) {
	nodes := make([][]fold.Node, len(held))
	for r := range held {
		for _, n := range held[r] {
			nodes[r] = append(nodes[r], fold.Node(n))
		}
	}
	tree, err := levels.NewTree(leaves, nodes)
	if err != nil {
		return nil, fmt.Errorf("collective: %w", err)
	}
	return &Partials{tree}, nil
}
