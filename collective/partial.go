package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Node is a range of leaves of a binary tree: the leaves from Index·2^Level up to, but not
// including, (Index+1)·2^Level, as far as they exist. The value of a node is the value of its left
// half combined with the value of its right half; if the right half is empty, it is the value of
// the left half.
type Node struct{ Level, Index int }

// First returns the number of the node's first leaf.
func (n Node) First() int { return fold.Node(n).First() }

// End returns the number after the node's last leaf in a tree with the given number of leaves.
func (n Node) End(leaves int) int { return fold.Node(n).End(leaves) }

// Parent returns the node of which n is a half.
func (n Node) Parent() Node { return Node(fold.Node(n).Parent()) }

// Sibling returns the other half of the node's parent.
func (n Node) Sibling() Node { return Node(fold.Node(n).Sibling()) }

// Left returns the node's left half. The level of n must be at least 1.
func (n Node) Left() Node { return Node(fold.Node(n).Left()) }

// Root returns the node that contains all leaves of a tree with the given number of leaves.
func Root(leaves int) Node { return Node(fold.Root(leaves)) }

// Cover returns the fewest nodes that together contain exactly the leaves from first up to, but not
// including, end, in ascending order, in a tree with the given number of leaves.
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
		panic(fmt.Sprintf("collective: node %d of level %d has only one half in a tree of %d leaves", n.Index, n.Level, leaves))
	}
	m := fold.MergeOf(fold.Node(n), leaves)
	kernel.Mean(t, kernel.Bytes(dst), [][]byte{kernel.Bytes(left), kernel.Bytes(right)}, m.Weights[:], m.By)
}

// Partials records which rank has which nodes of a binary tree, for [ReduceTree]. It is immutable
// and may be used by several goroutines. The zero value is refused.
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
