package foreign

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Kind is the operation of a [Call].
type Kind int32

// The kinds. Send and Recv are operations between two ranks.
const (
	AllReduce Kind = iota + 1
	ReduceScatter
	AllGather
	Broadcast
	AllToAll
	Barrier
	ReduceTree
	Send
	Recv
	kinds
)

var kindNames = [kinds]string{AllReduce: "all_reduce", ReduceScatter: "reduce_scatter", AllGather: "all_gather",
	Broadcast: "broadcast", AllToAll: "all_to_all", Barrier: "barrier", ReduceTree: "reduce_tree",
	Send: "send", Recv: "recv"}

// Type is the type of the elements of a call.
type Type int32

// The types.
const (
	Float32 Type = iota + 1
	Float64
	Float16
	BFloat16
	Int8
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	types
)

// Call is one operation on memory of the caller. Nothing else may access the memory until the
// operation has ended.
type Call struct {
	Kind Kind
	// Data points to Count elements. For AllToAll without Counts it points to Count elements for
	// each rank, and for ReduceTree to Count elements for each node, one after another.
	Data unsafe.Pointer
	// Result points to the memory for the result, for the kinds that do not write it to Data: the
	// part of this rank for ReduceScatter (the parts differ by at most one element, the larger ones
	// first), Count elements of each rank for AllGather, the elements that each rank has sent, one
	// after another, for AllToAll, and Count elements for ReduceTree.
	Result unsafe.Pointer
	Count  int64
	Type   Type
	// Arg is the operation of a reduction, as in package collective, the root of a Broadcast, or
	// the other rank of a Send or Recv.
	Arg int32
	// Counts are, for AllToAll, the number of elements to send to each rank, followed by the number
	// to receive from each rank; nil: Count for each. For ReduceTree they are the first leaf of
	// each rank, followed by the number of leaves.
	Counts []int64
}

// perform performs a call on elements of one type.
type perform func(ctx context.Context, g *collective.Group, c *Call) error

// typed has, for each type, the size of its elements in bytes and the function that performs calls.
var typed = [types]struct {
	size    int64
	perform perform
}{
	Float32:  {4, of[float32]},
	Float64:  {8, of[float64]},
	Float16:  {2, of[collective.Float16]},
	BFloat16: {2, of[collective.BFloat16]},
	Int8:     {1, of[int8]},
	Int16:    {2, of[int16]},
	Int32:    {4, of[int32]},
	Int64:    {8, of[int64]},
	Uint8:    {1, of[uint8]},
	Uint16:   {2, of[uint16]},
	Uint32:   {4, of[uint32]},
	Uint64:   {8, of[uint64]},
}

// of is like perform, for elements of type T.
func of[T collective.Element](ctx context.Context, g *collective.Group, c *Call) error {
	n, size := int(c.Count), g.Size()
	switch c.Kind {
	case AllReduce:
		return collective.AllReduce(ctx, g, at[T](c.Data, n), collective.Op(c.Arg))
	case ReduceScatter:
		lo, hi := kernel.Split(n, size, g.Rank())
		return collective.ReduceScatterInto(ctx, g, at[T](c.Data, n), at[T](c.Result, hi-lo), collective.Op(c.Arg))
	case AllGather:
		return collective.AllGatherInto(ctx, g, at[T](c.Data, n), at[T](c.Result, n*size))
	case Broadcast:
		return collective.Broadcast(ctx, g, at[T](c.Data, n), int(c.Arg))
	case AllToAll:
		if c.Counts == nil {
			return collective.AllToAllInto(ctx, g, at[T](c.Data, n*size), at[T](c.Result, n*size))
		}
		return allToAll[T](ctx, g, c)
	case ReduceTree:
		return reduceTree[T](ctx, g, c)
	case Send:
		return collective.Send(ctx, g, at[T](c.Data, n), int(c.Arg))
	case Recv:
		return collective.Recv(ctx, g, at[T](c.Data, n), int(c.Arg))
	default:
		return collective.Barrier(ctx, g)
	}
}

// at returns n elements of the caller's memory at p.
func at[T any](p unsafe.Pointer, n int) []T { return unsafe.Slice((*T)(p), n) }

// allToAll performs AllToAll with parts of different lengths.
func allToAll[T collective.Element](ctx context.Context, g *collective.Group, c *Call) error {
	size := g.Size()
	sent, received := parts[T](c.Data, c.Counts[:size]), parts[T](c.Result, c.Counts[size:])
	got, err := collective.AllToAll(ctx, g, sent)
	if err != nil {
		return err
	}
	for r, part := range got {
		if len(part) != len(received[r]) {
			return fmt.Errorf("rank %d has sent %d elements, not %d", r, len(part), len(received[r]))
		}
		copy(received[r], part)
	}
	return nil
}

// parts splits memory of the caller into parts of the given lengths.
func parts[T any](p unsafe.Pointer, counts []int64) [][]T {
	all := at[T](p, int(total(counts)))
	cut := make([][]T, len(counts))
	for i, n := range counts {
		cut[i], all = all[:n:n], all[n:]
	}
	return cut
}

// reduceTree performs ReduceTree for ranks that have consecutive leaves each, as the fewest nodes
// that cover them.
func reduceTree[T collective.Element](ctx context.Context, g *collective.Group, c *Call) error {
	size := g.Size()
	leaves, held := int(c.Counts[size]), make([][]collective.Node, size)
	for r := range size {
		held[r] = collective.Cover(int(c.Counts[r]), int(c.Counts[r+1]), leaves)
	}
	p, err := collective.NewPartials(leaves, held)
	if err != nil {
		return err
	}
	counts := slices.Repeat([]int64{c.Count}, len(held[g.Rank()]))
	return collective.ReduceTree(ctx, g, p, parts[T](c.Data, counts), at[T](c.Result, int(c.Count)), collective.Op(c.Arg))
}

// mostLeaves is the largest number of leaves of a ReduceTree.
const mostLeaves = 1 << 24

// check returns an error for arguments with which no operation is possible, before any other rank
// sees the call.
func (c *Call) check(rank, size int) error {
	if c.Kind < 1 || c.Kind >= kinds {
		return fmt.Errorf("there is no operation %d", c.Kind)
	}
	if c.Kind == Barrier {
		c.Type = Uint8
		return nil
	}
	if c.Type < 1 || c.Type >= types {
		return fmt.Errorf("there is no type %d", c.Type)
	}
	most := math.MaxInt64 / typed[c.Type].size / int64(size)
	if c.Count < 0 || c.Count > most {
		return fmt.Errorf("%d elements are out of range", c.Count)
	}
	if err := c.checkArg(rank, size); err != nil {
		return err
	}
	sent, received, err := c.extent(rank, size)
	if err != nil {
		return err
	}
	if sent > 0 && c.Data == nil || received > 0 && c.Result == nil {
		return errors.New("the pointer to the elements, or to the result, is null")
	}
	return nil
}

// checkArg checks the reduction or the root.
func (c *Call) checkArg(rank, size int) error {
	switch op := collective.Op(c.Arg); c.Kind {
	case AllReduce, ReduceScatter, ReduceTree:
		if c.Arg < int32(collective.Sum) || c.Arg > int32(collective.Adasum) {
			return fmt.Errorf("there is no reduction %d", c.Arg)
		}
		if op == collective.Adasum && (c.Kind != AllReduce || c.Type > BFloat16) {
			return errors.New("the reduction Adasum is for an all_reduce of floating point numbers")
		}
	case Broadcast, Send, Recv:
		if c.Arg < 0 || int(c.Arg) >= size {
			return fmt.Errorf("rank %d is out of range: there are %d ranks", c.Arg, size)
		}
		if c.Kind != Broadcast && int(c.Arg) == rank {
			return fmt.Errorf("rank %d sends to itself, or receives from itself", rank)
		}
	}
	return nil
}

// extent returns the number of elements of Data and of Result. A value that only some kinds of
// calls use counts as one.
func (c *Call) extent(rank, size int) (sent, received int64, err error) {
	all := c.Count * int64(size)
	switch c.Kind {
	case ReduceScatter, AllGather:
		return c.Count, c.Count, nil // neither is empty unless both are
	case AllToAll:
		if c.Counts == nil {
			return all, all, nil
		}
		if len(c.Counts) != 2*size {
			return 0, 0, fmt.Errorf("%d counts are given: %d ranks need two each, of the elements to them and from them", len(c.Counts), size)
		}
		for _, n := range c.Counts {
			if n < 0 || n > math.MaxInt64/typed[c.Type].size/int64(size) {
				return 0, 0, fmt.Errorf("%d elements are out of range", n)
			}
		}
		return total(c.Counts[:size]), total(c.Counts[size:]), nil
	case ReduceTree:
		if len(c.Counts) != size+1 {
			return 0, 0, fmt.Errorf("%d counts are given: %d ranks need one each, their first leaves, and then the number of leaves", len(c.Counts), size)
		}
		if !slices.IsSorted(c.Counts) || c.Counts[0] != 0 || c.Counts[size] < 1 || c.Counts[size] > mostLeaves {
			return 0, 0, fmt.Errorf("the first leaves of the ranks are %d: they must begin with 0 and ascend to at most %d", c.Counts, mostLeaves)
		}
		return min(c.Count, c.Counts[rank+1]-c.Counts[rank]), c.Count, nil
	}
	return c.Count, 0, nil
}

func total(counts []int64) (n int64) {
	for _, c := range counts {
		n += c
	}
	return n
}
