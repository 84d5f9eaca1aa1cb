package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// AllGatherInto is [AllGather] with the same number of elements of each rank. The elements of rank
// r begin at element r·len(data) of all, whose length is the total of all ranks. Data may be this
// rank's part of all; otherwise it must not overlap with all.
func AllGatherInto[T Element](ctx context.Context, g *Group, data, all []T) error {
	return g.allGatherBytes(ctx, typeOf[T](), kernel.Bytes(data), kernel.Bytes(all), checkGather(g, data, all))
}

// allGatherBytes performs AllGatherInto with bytes that hold elements of type t; invalid, if not
// nil, is the reason why they are refused.
func (g *Group) allGatherBytes(ctx context.Context, t kernel.Type, data, all []byte, invalid error) error {
	d := operation.Descriptor{Action: operation.AllGatherInto, Type: t, Count: uint64(len(data) / t.Size())}
	parts := exchange.Into{Memory: all, Each: len(data)}
	if h := g.inMemory(); h != nil {
		return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			kernel.Copy(parts.Of(g.rank), data)
			return m.AllGather(ctx, call, parts.Of(g.rank), parts.Place(h.Ranks))
		})
	}
	return g.run(ctx, d, invalid, func(c *levels.Call) error {
		kernel.Copy(parts.Of(g.rank), data)
		return c.AllGatherIntoSockets(parts)
	})
}

func checkGather[T Element](g *Group, data, all []T) error {
	if err := checkInto(g, "result", len(all), len(data)); g == nil || err != nil {
		return err
	}
	if own := (exchange.Into{Memory: kernel.Bytes(all), Each: len(kernel.Bytes(data))}).Of(g.rank); !same(own, kernel.Bytes(data)) {
		return checkApart(kernel.Bytes(all), kernel.Bytes(data))
	}
	return nil
}

// ReduceScatterInto is [ReduceScatter] into part, which must have the length of this rank's part of
// the result and must not overlap with data.
func ReduceScatterInto[T Element](ctx context.Context, g *Group, data, part []T, op Op) error {
	t := typeOf[T]()
	invalid := cmp.Or(checkReduced[T](), operation.Op(op).CheckParts(t), checkScatter(g, data, part))
	return g.reduceScatterBytes(ctx, t, operation.Op(op), kernel.Bytes(data), kernel.Bytes(part), invalid)
}

// reduceScatterBytes performs ReduceScatterInto with bytes that hold elements of type t; invalid,
// if not nil, is the reason why they are refused.
func (g *Group) reduceScatterBytes(ctx context.Context, t kernel.Type, op operation.Op, data, part []byte, invalid error) error {
	d := operation.Descriptor{Action: operation.ReduceScatter, Type: t, Op: op, Count: uint64(len(data) / t.Size())}
	return g.reduceScatterParts(ctx, d, invalid, cuts{data: data}, part)
}

func checkScatter[T Element](g *Group, data, part []T) error {
	if g == nil {
		return nil
	}
	if lo, hi := kernel.Split(len(data), g.size, g.rank); len(part) != hi-lo {
		return fmt.Errorf("the result has %d elements, and the part %d", len(part), hi-lo)
	}
	return checkApart(kernel.Bytes(part), kernel.Bytes(data))
}

// ReduceScatterCounts is [ReduceScatterInto] with parts whose lengths the caller chooses: rank r
// gets counts[r] elements, after the elements of lower ranks. A count may be 0. There is one count
// for each rank, and their sum is the length of data. The counts must be the same on all ranks;
// otherwise every rank gets a [*MismatchError].
func ReduceScatterCounts[T Element](ctx context.Context, g *Group, data []T, counts []int, part []T, op Op) error {
	d := operation.Descriptor{Action: operation.ReduceScatter, Type: typeOf[T](), Op: operation.Op(op), Count: uint64(len(data)), Root: int32(digest(counts)) | 1}
	invalid := cmp.Or(checkReduced[T](), d.Op.CheckParts(d.Type))
	var ends []int
	if g != nil {
		var err error
		if ends, err = checkCounts(counts, g.size, len(data)); err == nil && len(part) != counts[g.rank] {
			err = fmt.Errorf("the result has %d elements, and the part %d", len(part), counts[g.rank])
		}
		if err == nil {
			err = checkApart(kernel.Bytes(part), kernel.Bytes(data))
		}
		invalid = cmp.Or(err, invalid)
	}
	return g.reduceScatterParts(ctx, d, invalid, cuts{kernel.Bytes(data), counts, ends}, kernel.Bytes(part))
}

// cuts is data that is split into one part for each rank.
type cuts struct {
	data         []byte
	counts, ends []int // number of elements of each part, and its end; nil if the parts are as equal as possible
}

func (p *cuts) of(g *Group, t kernel.Type, rank int) []byte {
	if p.ends == nil {
		return kernel.Part(p.data, t.Size(), g.size, rank)
	}
	return p.data[(p.ends[rank]-p.counts[rank])*t.Size() : p.ends[rank]*t.Size()]
}

// checkCounts returns the end of each part. It returns an error unless there is one count for each
// rank and their sum is total.
func checkCounts(counts []int, ranks, total int) (ends []int, err error) {
	if len(counts) != ranks {
		return nil, fmt.Errorf("%d counts are given for %d ranks", len(counts), ranks)
	}
	ends = make([]int, ranks)
	end := 0
	for rank, n := range counts {
		if n < 0 || n > total-end {
			return nil, fmt.Errorf("rank %d cannot have %d elements: lower ranks have %d of %d", rank, n, end, total)
		}
		end += n
		ends[rank] = end
	}
	if end != total {
		return nil, fmt.Errorf("the counts add up to %d elements, not %d", end, total)
	}
	return ends, nil
}

// reduceScatterParts combines the parts of all ranks and writes this rank's part to result.
func (g *Group) reduceScatterParts(ctx context.Context, d operation.Descriptor, invalid error, p cuts, result []byte) error {
	if h := g.inMemory(); h != nil {
		return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			parts := h.Cuts(g.size, func(rank int) []byte { return p.of(g, d.Type, rank) })
			return m.ReduceScatter(ctx, call, parts, result, h.Reduction(d.Type, d.Op))
		})
	}
	return g.run(ctx, d, invalid, func(c *levels.Call) error {
		return c.ReduceScatterSockets(func(rank int) []byte { return p.of(g, d.Type, rank) }, result)
	})
}

// AllToAllInto is [AllToAll] with parts of equal lengths: data and result have one part for each
// rank, in order, and must not overlap.
func AllToAllInto[T Element](ctx context.Context, g *Group, data, result []T) error {
	d := operation.Descriptor{Action: operation.AllToAllInto, Type: typeOf[T](), Count: uint64(len(data))}
	var from, to exchange.Into
	var invalid error
	if g != nil {
		each := len(data) / g.size
		if invalid = checkInto(g, "input", len(data), each); invalid == nil {
			invalid = checkInto(g, "result", len(result), each)
		}
		if invalid == nil {
			invalid = checkApart(kernel.Bytes(result), kernel.Bytes(data))
		}
		from, to = exchange.Into{Memory: kernel.Bytes(data), Each: len(kernel.Bytes(data)) / g.size}, exchange.Into{Memory: kernel.Bytes(result), Each: len(kernel.Bytes(data)) / g.size}
	}
	if h := g.inMemory(); h != nil {
		return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			kernel.Copy(to.Of(g.rank), from.Of(g.rank))
			return m.AllToAll(ctx, call, from.By(h.Ranks), to.Place(h.Ranks))
		})
	}
	return g.run(ctx, d, invalid, func(c *levels.Call) error {
		kernel.Copy(to.Of(g.rank), from.Of(g.rank))
		return c.AllToAllIntoSockets(from, to)
	})
}

// checkInto returns an error unless length is the total of each elements of all ranks.
func checkInto(g *Group, what string, length, each int) error {
	if g != nil && length != g.size*each {
		return fmt.Errorf("the %s has %d elements, and %d ranks with %d each need %d", what, length, g.size, each, g.size*each)
	}
	return nil
}

// checkApart returns an error if result overlaps with input, since input would be overwritten
// before it is read.
func checkApart(result, input []byte) error {
	a, b := uintptr(unsafe.Pointer(unsafe.SliceData(result))), uintptr(unsafe.Pointer(unsafe.SliceData(input)))
	if a < b+uintptr(len(input)) && b < a+uintptr(len(result)) {
		return errOverlap
	}
	return nil
}

// same reports whether a and b are the same memory.
func same(a, b []byte) bool {
	return len(a) == len(b) && unsafe.SliceData(a) == unsafe.SliceData(b)
}

var errOverlap = errors.New("the result overlaps with the input")
