// Package fold computes the value of a binary tree's root from the values of some of its nodes, in
// an order that the tree alone determines. It is pure: it moves no bytes between ranks.
package fold

import (
	"math/bits"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Node is a range of leaves of a binary tree: those from Index·2^Level up to, but without,
// (Index+1)·2^Level, as far as there are so many.
type Node struct{ Level, Index int }

// First is the number of its first leaf.
func (n Node) First() int { return n.Index << n.Level }

// End is the number after its last leaf in a tree of so many leaves.
func (n Node) End(leaves int) int { return min((n.Index+1)<<n.Level, leaves) }

// Parent is the node that n is a half of.
func (n Node) Parent() Node { return Node{n.Level + 1, n.Index / 2} }

// Sibling is the other half of its parent.
func (n Node) Sibling() Node { return Node{n.Level, n.Index ^ 1} }

// Left is its left half; its level is at least 1.
func (n Node) Left() Node { return Node{n.Level - 1, 2 * n.Index} }

// Root is the node that all leaves of a tree of so many are under.
func Root(leaves int) Node { return Node{Level: bits.Len(uint(max(leaves, 1) - 1))} }

// weight is what the sum of a node's leaves is divided by in its mean.
func (n Node) weight(leaves int) int { return kernel.Fold(n.End(leaves) - n.First()) }

// Merge is how the means of a node's halves make its own: with these weights, and divided by By.
type Merge struct {
	Weights [2]int
	By      int
}

// MergeOf returns that of a node of a tree of so many leaves; its right half has some.
func MergeOf(n Node, leaves int) Merge {
	left := n.Left()
	return Merge{[2]int{left.weight(leaves), left.Sibling().weight(leaves)}, n.weight(leaves)}
}

// Operand is a value that a rank has: the one of this number.
type Operand struct{ Rank, Number int }

// Program is how a node's value is computed from those of the ranks.
type Program struct {
	Operands []Operand // in ascending order of their leaves

	ops    []int   // an operand's number, or combineTop: combine the two values on top of the stack
	merges []Merge // how each of these is combined, where means are
	depth  int     // most values on the stack
}

const combineTop = -1

// Compile returns the program of node n of a tree of so many leaves, of which at has the nodes
// whose values are known. missing is the first leaf that is under none of them; −1: all are under
// one, and the program is valid.
func Compile(n Node, leaves int, at map[Node]Operand) (p *Program, missing int) {
	c := &compiler{Program: new(Program), leaves: leaves, at: at, missing: -1}
	c.visit(n)
	return c.Program, c.missing
}

type compiler struct {
	*Program
	leaves  int
	at      map[Node]Operand
	height  int
	missing int
}

func (c *compiler) visit(n Node) {
	if o, held := c.at[n]; held {
		c.ops = append(c.ops, len(c.Operands))
		c.Operands = append(c.Operands, o)
		c.height++
		c.depth = max(c.depth, c.height)
		return
	}
	if n.Level == 0 {
		if c.missing < 0 {
			c.missing = n.Index
		}
		return
	}
	left := n.Left()
	c.visit(left)
	if right := left.Sibling(); right.First() < c.leaves {
		c.visit(right)
		c.ops, c.merges = append(c.ops, combineTop), append(c.merges, MergeOf(n, c.leaves))
		c.height--
	}
}

// Pick puts the operands in order that the ranks have sent, each rank's one behind the other, each
// of n bytes.
func (p *Program) Pick(sent [][]byte, n int) [][]byte {
	all := make([][]byte, len(p.Operands))
	for i, o := range p.Operands {
		all[i] = sent[o.Rank][o.Number*n:][:n]
	}
	return all
}

// Largest returns the largest nodes under n, of a tree of so many leaves, of which held has all
// leaves.
func Largest(n Node, leaves int, held map[Node]Operand) []Node {
	if _, ok := held[n]; ok {
		return []Node{n}
	}
	if n.Level == 0 {
		return nil
	}
	left := n.Left()
	nodes := Largest(left, leaves, held)
	right := left.Sibling()
	if right.First() >= leaves {
		return nodes
	}
	more := Largest(right, leaves, held)
	if len(nodes) == 1 && nodes[0] == left && len(more) == 1 && more[0] == right {
		return []Node{n}
	}
	return append(nodes, more...)
}

// Folder runs programs, and keeps its memory between them. The zero value is ready once Combine or
// Mean is set.
type Folder struct {
	Combine func(dst, a, b []byte)
	Mean    kernel.Type  // of the elements, where means are combined; 0: Combine does
	Finish  func([]byte) // of what is computed; nil: nothing

	stack   [][]byte
	scratch [][]byte // by height
}

const foldBlock = 16 << 10

// Block sets target, of at most 16 KiB, to the value of the operands, which are as long.
func (f *Folder) Block(p *Program, target []byte, operands [][]byte) {
	for len(f.scratch) < p.depth {
		f.scratch = append(f.scratch, make([]byte, foldBlock))
	}
	f.stack = f.stack[:0]
	merged := 0
	for i, op := range p.ops {
		if op != combineTop {
			f.stack = append(f.stack, operands[op])
			continue
		}
		top := len(f.stack) - 1
		into := target
		if i < len(p.ops)-1 {
			into = f.scratch[top-1][:len(target)]
		}
		if f.Mean == 0 {
			f.Combine(into, f.stack[top-1], f.stack[top])
		} else {
			m := &p.merges[merged]
			kernel.Mean(f.Mean, into, f.stack[top-1:], m.Weights[:], m.By)
			merged++
		}
		f.stack[top-1] = into
		f.stack = f.stack[:top]
	}
	if len(p.ops) == 1 {
		copy(target, f.stack[0])
	}
	if f.Finish != nil {
		f.Finish(target)
	}
}

// All is Block for any length.
func (f *Folder) All(p *Program, target []byte, operands [][]byte) {
	parts := make([][]byte, len(operands))
	for lo := 0; lo < len(target); lo += foldBlock {
		hi := min(lo+foldBlock, len(target))
		for i, o := range operands {
			parts[i] = o[lo:hi]
		}
		f.Block(p, target[lo:hi], parts)
	}
}

// Room is memory that is taken bit by bit, all of which is used again after Reset. The zero value
// is empty; it grows to the most that was taken between two of them.
type Room struct {
	memory []byte
	taken  int // since Reset, beyond memory too
}

// Reset ends the use of all that was taken.
func (r *Room) Reset() {
	if r.taken > len(r.memory) {
		r.memory = make([]byte, r.taken)
	}
	r.taken = 0
}

// Take returns n bytes, aligned for every element type and of any content.
func (r *Room) Take(n int) []byte {
	const align = 64
	from := r.taken
	r.taken += (n + align - 1) &^ (align - 1)
	if r.taken > len(r.memory) {
		return make([]byte, n)
	}
	return r.memory[from : from+n : from+n]
}
