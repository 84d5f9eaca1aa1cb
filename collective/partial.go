package collective

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/bits"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Node is a range of leaves of a binary tree: those from Index·2^Level up to, but without,
// (Index+1)·2^Level, as far as there are so many. The value of a node is that of its left half
// combined with that of its right half; where the right half is empty, it is that of the left half.
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
	if !(descriptor{dtype: t, reduce: op}).means() {
		Combine(dst, left, right, op)
		return
	}
	if n.Level == 0 || n.Left().Sibling().First() >= leaves {
		panic(fmt.Sprintf("collective: node %d of level %d of %d leaves has one half", n.Index, n.Level, leaves))
	}
	m := mergeOf(n, leaves)
	kernel.Mean(t, bytesOf(dst), [][]byte{bytesOf(left), bytesOf(right)}, m.weights[:], m.by)
}

// merge is how the means of a node's halves make its own.
type merge struct {
	weights [2]int
	by      int
}

func mergeOf(n Node, leaves int) merge {
	left := n.Left()
	return merge{[2]int{left.fold(leaves), left.Sibling().fold(leaves)}, n.fold(leaves)}
}

// fold is what the sum of a node's leaves is divided by in its mean.
func (n Node) fold(leaves int) int { return kernel.Fold(n.End(leaves) - n.First()) }

// Partials records which rank has which nodes of a binary tree, for [ReduceTree]. It does not
// change and may be used by several goroutines. The zero value is refused.
type Partials struct {
	leaves int
	held   [][]Node // by rank
	counts []int    // by rank, of its nodes
	order  program
	digest uint32 // tells it from others; ranks compare it
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

// program is how the root's value is computed from the ranks' values.
type program struct {
	operands []operand     // in ascending order of their leaves
	ops      []int         // an operand's number, or combineTop: combine the two values on top of the stack
	merges   []merge       // how each of these is combined, where means are
	depth    int           // most values on the stack
	most     int           // the largest number of operands of a rank
	members  []shm.Operand // the operands as package shm numbers them
}

// operand is a value that a rank has.
type operand struct{ rank, number int }

const combineTop = -1

// compile finds the order in which what the ranks have is combined.
func (p *Partials) compile(held [][]Node) error {
	at := map[Node]operand{}
	covered := 0
	for rank, nodes := range held {
		for i, n := range nodes {
			if n.Level < 0 || n.Level > Root(p.leaves).Level || n.Index < 0 || n.Index > mostLeaves>>n.Level || n.First() >= p.leaves {
				return fmt.Errorf("rank %d has node %d of level %d, which a tree of %d leaves does not have", rank, n.Index, n.Level, p.leaves)
			}
			if _, twice := at[n]; twice {
				return fmt.Errorf("node %d of level %d is there twice", n.Index, n.Level)
			}
			at[n] = operand{rank, i}
			covered += n.End(p.leaves) - n.First()
		}
	}
	c := &compiler{program: &p.order, leaves: p.leaves, at: at}
	c.visit(Root(p.leaves))
	switch {
	case c.missing != nil:
		return fmt.Errorf("leaf %d is under no node", *c.missing)
	case covered != p.leaves || len(c.operands) != len(at):
		return errors.New("a leaf is under two nodes")
	}
	for _, o := range p.order.operands {
		p.order.most = max(p.order.most, o.number+1)
		p.order.members = append(p.order.members, shm.Operand{Member: o.rank, Number: o.number})
	}
	return nil
}

type compiler struct {
	*program
	leaves  int
	at      map[Node]operand
	height  int
	missing *int
}

func (c *compiler) visit(n Node) {
	if o, held := c.at[n]; held {
		c.ops = append(c.ops, len(c.operands))
		c.operands = append(c.operands, o)
		c.height++
		c.depth = max(c.depth, c.height)
		return
	}
	if n.Level == 0 {
		if c.missing == nil {
			c.missing = new(n.Index)
		}
		return
	}
	left := n.Left()
	c.visit(left)
	if right := left.Sibling(); right.First() < c.leaves {
		c.visit(right)
		c.ops, c.merges = append(c.ops, combineTop), append(c.merges, mergeOf(n, c.leaves))
		c.height--
	}
}

// folder computes the root's value, block by block.
type folder struct {
	*program
	combine combiner
	mean    kernel.Type // of the elements, where means are combined; 0: others are
	stack   [][]byte
	scratch [][]byte // by height
	packed  []byte   // what is given or received, see foldGathered and foldPairs
	given   []byte   // to ranks of this host, see exchangeHere
	room    room     // of a piece, see foldHierarchical

	finish func([]byte) // of what is computed; nil: nothing
	atRoot func([]byte) // of the root's value; nil: it is the result
	levels *twoLevels   // of the last partials; nil: none yet
}

const foldBlock = 16 << 10

// room is memory that is taken bit by bit, all of which is used again after reset. The zero value
// is empty; it grows to the most that was taken between two resets.
type room struct {
	memory []byte
	taken  int // since reset, beyond memory too
}

// reset ends the use of all that was taken.
func (r *room) reset() {
	if r.taken > len(r.memory) {
		r.memory = make([]byte, r.taken)
	}
	r.taken = 0
}

// take returns n bytes, aligned for every element type and of any content.
func (r *room) take(n int) []byte {
	const align = 64
	from := r.taken
	r.taken += (n + align - 1) &^ (align - 1)
	if r.taken > len(r.memory) {
		return make([]byte, n)
	}
	return r.memory[from : from+n : from+n]
}

// folder returns the group's folder, which keeps its memory.
func (g *Group) folder(p *Partials, d descriptor) *folder {
	f := &g.folding
	f.program, f.combine, f.mean, f.atRoot = &p.order, d.combiner(), 0, nil
	switch whole := kernel.Fold(p.leaves); {
	case d.means():
		f.mean = d.dtype
		if whole > p.leaves {
			f.atRoot = func(b []byte) { kernel.Mean(d.dtype, b, [][]byte{b}, []int{whole}, p.leaves) }
		}
	case d.reduce == Average:
		f.atRoot = func(b []byte) { d.divide(b, p.leaves) }
	}
	f.finish = f.atRoot
	for len(f.scratch) < p.order.depth+1 { // a level's program is no deeper
		f.scratch = append(f.scratch, make([]byte, foldBlock))
	}
	return f
}

// block sets target, of at most foldBlock bytes, to the value of the operands, which are as long.
func (f *folder) block(target []byte, operands [][]byte) {
	f.stack = f.stack[:0]
	merged := 0
	for i, op := range f.ops {
		if op != combineTop {
			f.stack = append(f.stack, operands[op])
			continue
		}
		top := len(f.stack) - 1
		into := target
		if i < len(f.ops)-1 {
			into = f.scratch[top-1][:len(target)]
		}
		if f.mean == 0 {
			f.combine(into, f.stack[top-1], f.stack[top])
		} else {
			m := &f.merges[merged]
			kernel.Mean(f.mean, into, f.stack[top-1:], m.weights[:], m.by)
			merged++
		}
		f.stack[top-1] = into
		f.stack = f.stack[:top]
	}
	if len(f.ops) == 1 {
		copy(target, f.stack[0])
	}
	if f.finish != nil {
		f.finish(target)
	}
}

// all is block for any length.
func (f *folder) all(target []byte, operands [][]byte) {
	parts := make([][]byte, len(operands))
	for lo := 0; lo < len(target); lo += foldBlock {
		hi := min(lo+foldBlock, len(target))
		for i, o := range operands {
			parts[i] = o[lo:hi]
		}
		f.block(target[lo:hi], parts)
	}
}

// pick puts the operands in order that the ranks have sent, each rank's one behind the other, each
// of n bytes.
func (p *program) pick(sent [][]byte, n int) [][]byte {
	all := make([][]byte, len(p.operands))
	for i, o := range p.operands {
		all[i] = sent[o.rank][o.number*n:][:n]
	}
	return all
}
