// Package fold computes the value of a binary tree's root from the values of some of its nodes, in
// an order that the tree alone determines. It is pure: it moves no bytes between ranks.
package fold

import (
	"math/bits"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Node is a range of leaves of a binary tree: the leaves from Index·2^Level up to, but not
// including, (Index+1)·2^Level, as far as they exist.
type Node struct{ Level, Index int }

// First returns the number of the node's first leaf.
func (n Node) First() int { return n.Index << n.Level }

// End returns the number after the node's last leaf in a tree with the given number of leaves.
func (n Node) End(leaves int) int { return min((n.Index+1)<<n.Level, leaves) }

// Parent returns the node of which n is a half.
func (n Node) Parent() Node { return Node{n.Level + 1, n.Index / 2} }

// Sibling returns the other half of the node's parent.
func (n Node) Sibling() Node { return Node{n.Level, n.Index ^ 1} }

// Left returns the node's left half. The level of n must be at least 1.
func (n Node) Left() Node { return Node{n.Level - 1, 2 * n.Index} }

// Root returns the node that contains all leaves of a tree with the given number of leaves.
func Root(leaves int) Node { return Node{Level: bits.Len(uint(max(leaves, 1) - 1))} }

// weight returns the number by which the sum of a node's leaves is divided in its mean.
func (n Node) weight(leaves int) int { return kernel.Fold(n.End(leaves) - n.First()) }

// Merge describes how the mean of a node is computed from the means of its halves: they are
// multiplied by the weights, and their sum is divided by By.
type Merge struct {
	Weights [2]int
	By      int
}

// MergeOf returns the Merge of a node in a tree with the given number of leaves. The node's right
// half must not be empty.
func MergeOf(n Node, leaves int) Merge {
	left := n.Left()
	return Merge{[2]int{left.weight(leaves), left.Sibling().weight(leaves)}, n.weight(leaves)}
}

// Operand identifies a value that a rank has, by the rank and the number of the value there.
type Operand struct{ Rank, Number int }

// Program describes how a node's value is computed from the values of the ranks.
type Program struct {
	Operands []Operand // in ascending order of their leaves

	ops    []int   // each pushes an operand, by its index, or combines the two values on top of the stack (combineTop)
	merges []Merge // the Merge of each combineTop, for means
	depth  int     // largest number of values on the stack
}

const combineTop = -1

// Compile returns the program of node n of a tree with the given number of leaves. at has the nodes
// whose values are known. If every leaf is under one of them, missing is −1; otherwise it is the
// first leaf that is not, and the program is invalid.
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

// Pick returns the operands in the program's order. sent has, by rank, the operands of the rank one
// after another, each of n bytes.
func (p *Program) Pick(sent [][]byte, n int) [][]byte {
	all := make([][]byte, len(p.Operands))
	for i, o := range p.Operands {
		all[i] = sent[o.Rank][o.Number*n:][:n]
	}
	return all
}

// Largest returns the largest nodes under n all of whose leaves are under nodes in held, in a tree
// with the given number of leaves.
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

// Folder runs programs and reuses its memory. The zero value is ready for use once Combine or Mean
// is set.
type Folder struct {
	Combine func(dst, a, b []byte)
	Mean    kernel.Type  // type of the elements if the values are means; 0 if Combine combines them
	Finish  func([]byte) // called with each computed block; may be nil

	stack   [][]byte
	scratch [][]byte // by height
}

const foldBlock = 16 << 10 // bytes

// Block sets target, of at most 16 KiB, to the value of the program for the operands, which have
// the same length.
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

// All is like Block, for any length.
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

// Room is memory that is taken piece by piece and reused after Reset. The zero value is empty. It
// grows to the most that was taken between two calls of Reset.
type Room struct {
	memory []byte
	taken  int // number of bytes taken since Reset, including those beyond memory
}

// Reset ends the use of everything that was taken.
func (r *Room) Reset() {
	if r.taken > len(r.memory) {
		r.memory = make([]byte, r.taken)
	}
	r.taken = 0
}

// Take returns n bytes of undefined content, aligned for every element type.
func (r *Room) Take(n int) []byte {
	const align = 64
	from := r.taken
	r.taken += (n + align - 1) &^ (align - 1)
	if r.taken > len(r.memory) {
		return make([]byte, n)
	}
	return r.memory[from : from+n : from+n]
}
