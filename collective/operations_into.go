package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// The operations here put their results into memory of the caller, and take none for data. Lengths
// are equal on all ranks, which otherwise get a [*MismatchError]. Memory that overlaps is refused:
// on every rank with an error that says so where all ranks do it, with a [*MismatchError] where
// some do.

// AllGatherInto is [AllGather] with the same number of elements of each rank. Those of rank r begin
// at element r·len(data) of all, whose length is the total of all ranks. Data may be this rank's
// part of all, and must not overlap with all otherwise.
func AllGatherInto[T Element](ctx context.Context, g *Group, data, all []T) error {
	return g.allGatherBytes(ctx, typeOf[T](), kernel.Bytes(data), kernel.Bytes(all), checkGather(g, data, all))
}

// allGatherBytes is AllGatherInto of bytes that hold elements of a type; invalid is why they are
// refused.
func (g *Group) allGatherBytes(ctx context.Context, t kernel.Type, data, all []byte, invalid error) error {
	d := operation.Descriptor{Action: operation.AllGatherInto, Type: t, Count: uint64(len(data) / t.Size())}
	parts := into{all, len(data)}
	if h := g.inMemory(); h != nil {
		return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			kernel.Copy(parts.of(g.rank), data)
			return m.AllGather(ctx, call, parts.of(g.rank), parts.place(h.ranks))
		})
	}
	return g.run(ctx, d, invalid, func(c *call) error {
		kernel.Copy(parts.of(g.rank), data)
		if g.levels != nil {
			return c.allGatherIntoHierarchical(parts)
		}
		return c.exchangeInto(c.allOthers(), func(int) []byte { return parts.of(g.rank) }, parts)
	})
}

func checkGather[T Element](g *Group, data, all []T) error {
	if err := checkInto(g, "result", len(all), len(data)); g == nil || err != nil {
		return err
	}
	if own := (into{kernel.Bytes(all), len(kernel.Bytes(data))}).of(g.rank); !same(own, kernel.Bytes(data)) {
		return checkApart(kernel.Bytes(all), kernel.Bytes(data))
	}
	return nil
}

// ReduceScatterInto is [ReduceScatter] into part, which has just the length of this rank's part of
// the result and does not overlap with data.
func ReduceScatterInto[T Element](ctx context.Context, g *Group, data, part []T, op Op) error {
	t := typeOf[T]()
	invalid := cmp.Or(checkReduced[T](), operation.Op(op).CheckParts(t), checkScatter(g, data, part))
	return g.reduceScatterBytes(ctx, t, operation.Op(op), kernel.Bytes(data), kernel.Bytes(part), invalid)
}

// reduceScatterBytes is ReduceScatterInto of bytes that hold elements of a type; invalid is why
// they are refused.
func (g *Group) reduceScatterBytes(ctx context.Context, t kernel.Type, op operation.Op, data, part []byte, invalid error) error {
	d := operation.Descriptor{Action: operation.ReduceScatter, Type: t, Op: op, Count: uint64(len(data) / t.Size())}
	return g.reduceScatterParts(ctx, d, invalid, cuts{data: data}, part)
}

func checkScatter[T Element](g *Group, data, part []T) error {
	if g == nil {
		return nil
	}
	if lo, hi := kernel.Split(len(data), g.size, g.rank); len(part) != hi-lo {
		return fmt.Errorf("a result of %d elements for a part of %d", len(part), hi-lo)
	}
	return checkApart(kernel.Bytes(part), kernel.Bytes(data))
}

// ReduceScatterCounts is [ReduceScatterInto] of parts whose lengths the caller chooses: rank r gets
// counts[r] elements, which begin after those of the ranks before it. The counts, which may be 0,
// are the same on all ranks, which otherwise get a [*MismatchError]. There is one for each rank,
// and their sum is the length of data.
func ReduceScatterCounts[T Element](ctx context.Context, g *Group, data []T, counts []int, part []T, op Op) error {
	d := operation.Descriptor{Action: operation.ReduceScatter, Type: typeOf[T](), Op: operation.Op(op), Count: uint64(len(data)), Root: int32(digest(counts)) | 1}
	invalid := cmp.Or(checkReduced[T](), d.Op.CheckParts(d.Type))
	var ends []int
	if g != nil {
		var err error
		if ends, err = checkCounts(counts, g.size, len(data)); err == nil && len(part) != counts[g.rank] {
			err = fmt.Errorf("a result of %d elements for a part of %d", len(part), counts[g.rank])
		}
		if err == nil {
			err = checkApart(kernel.Bytes(part), kernel.Bytes(data))
		}
		invalid = cmp.Or(err, invalid)
	}
	return g.reduceScatterParts(ctx, d, invalid, cuts{kernel.Bytes(data), counts, ends}, kernel.Bytes(part))
}

// cuts is data with a part for each rank.
type cuts struct {
	data         []byte
	counts, ends []int // elements of the parts, and where they end; nil: they are as even as can be
}

func (p *cuts) of(g *Group, t kernel.Type, rank int) []byte {
	if p.ends == nil {
		return kernel.Part(p.data, t.Size(), g.size, rank)
	}
	return p.data[(p.ends[rank]-p.counts[rank])*t.Size() : p.ends[rank]*t.Size()]
}

// checkCounts returns where the parts of so many elements end.
func checkCounts(counts []int, ranks, total int) (ends []int, err error) {
	if len(counts) != ranks {
		return nil, fmt.Errorf("%d counts for %d ranks", len(counts), ranks)
	}
	ends = make([]int, ranks)
	end := 0
	for rank, n := range counts {
		if n < 0 || n > total-end {
			return nil, fmt.Errorf("%d elements of rank %d after %d of %d", n, rank, end, total)
		}
		end += n
		ends[rank] = end
	}
	if end != total {
		return nil, fmt.Errorf("counts of %d elements in all for %d", end, total)
	}
	return ends, nil
}

// reduceScatterParts combines the parts of all ranks, and puts this rank's into result.
func (g *Group) reduceScatterParts(ctx context.Context, d operation.Descriptor, invalid error, p cuts, result []byte) error {
	if h := g.inMemory(); h != nil {
		return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			h.cut = h.cut[:0]
			for rank := range g.size {
				h.cut = append(h.cut, p.of(g, d.Type, rank))
			}
			return m.ReduceScatter(ctx, call, h.cut, result, h.reduction(d.Type, d.Op))
		})
	}
	return g.run(ctx, d, invalid, func(c *call) error {
		return c.reduceScatterSockets(func(rank int) []byte { return p.of(g, d.Type, rank) }, result)
	})
}

// AllToAllInto is [AllToAll] of parts of equal lengths: data and result have one for every rank,
// one behind the other, and do not overlap.
func AllToAllInto[T Element](ctx context.Context, g *Group, data, result []T) error {
	d := operation.Descriptor{Action: operation.AllToAllInto, Type: typeOf[T](), Count: uint64(len(data))}
	var from, to into
	var invalid error
	if g != nil {
		each := len(data) / g.size
		if invalid = checkInto(g, "input", len(data), each); invalid == nil {
			invalid = checkInto(g, "result", len(result), each)
		}
		if invalid == nil {
			invalid = checkApart(kernel.Bytes(result), kernel.Bytes(data))
		}
		from, to = into{kernel.Bytes(data), len(kernel.Bytes(data)) / g.size}, into{kernel.Bytes(result), len(kernel.Bytes(data)) / g.size}
	}
	if h := g.inMemory(); h != nil {
		return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			kernel.Copy(to.of(g.rank), from.of(g.rank))
			return m.AllToAll(ctx, call, from.by(h.ranks), to.place(h.ranks))
		})
	}
	return g.run(ctx, d, invalid, func(c *call) error {
		kernel.Copy(to.of(g.rank), from.of(g.rank))
		if g.levels != nil {
			return c.allToAllIntoHierarchical(from, to)
		}
		return c.exchangeInto(c.allOthers(), from.of, to)
	})
}

func checkInto(g *Group, what string, length, each int) error {
	if g != nil && length != g.size*each {
		return fmt.Errorf("%s of %d elements for %d ranks with %d each", what, length, g.size, each)
	}
	return nil
}

// checkApart refuses a result that overlaps with its input, which would be written to before it is
// read.
func checkApart(result, input []byte) error {
	a, b := uintptr(unsafe.Pointer(unsafe.SliceData(result))), uintptr(unsafe.Pointer(unsafe.SliceData(input)))
	if a < b+uintptr(len(input)) && b < a+uintptr(len(result)) {
		return errOverlap
	}
	return nil
}

// same reports whether both are the same memory.
func same(a, b []byte) bool {
	return len(a) == len(b) && unsafe.SliceData(a) == unsafe.SliceData(b)
}

var errOverlap = errors.New("the result overlaps with the input")

// into is memory with a part for every rank, all of the same number of bytes.
type into struct {
	memory []byte
	each   int
}

func (p into) of(rank int) []byte { return p.memory[rank*p.each:][:p.each:p.each] }

// by are the parts of some ranks.
func (p into) by(ranks []int) [][]byte {
	parts := make([][]byte, len(ranks))
	for i, r := range ranks {
		parts[i] = p.of(r)
	}
	return parts
}

// place tells members of shared memory, who have parts for these ranks, where those lie.
func (p into) place(ranks []int) func(lengths []int) ([][]byte, error) {
	return func([]int) ([][]byte, error) { return p.by(ranks), nil } // the members' calls say the lengths
}

// allOthers are all ranks but this one, each rank's list beginning with another one.
func (c *call) allOthers() []int {
	with := make([]int, 0, c.g.size-1)
	for d := 1; d < c.g.size; d++ {
		with = append(with, (c.g.rank+d)%c.g.size)
	}
	return with
}

// exchangeInto sends part(j) to each of some ranks and receives theirs.
func (c *call) exchangeInto(with []int, part func(to int) []byte, result into) error {
	for s := range c.frames(result.each) {
		for _, to := range with {
			c.send(to, 0, c.cut(part(to), s))
		}
	}
	first := c.inUsed
	c.postInto(with, result)
	return c.waitFor(first, c.inUsed)
}

// postInto asks for the parts of some ranks.
func (c *call) postInto(from []int, result into) {
	for _, r := range from {
		for s := range c.frames(result.each) {
			c.post(r, 0, c.cut(result.of(r), s))
		}
	}
}

// allGatherIntoHierarchical is allGatherHierarchical; this rank's part is in its place.
func (c *call) allGatherIntoHierarchical(all into) error {
	h := c.g.levels
	own := all.of(c.g.rank)
	for s := range c.frames(all.each) {
		for _, host := range h.others() {
			c.send(h.counterpart(host, h.place), 0, c.cut(own, s))
		}
	}
	first, frames := c.inUsed, c.frames(all.each)
	for _, host := range h.others() {
		c.postInto(h.shares(host, h.place), all)
	}
	if err := c.gatherInto(all, h.here, 0); err != nil {
		return err
	}
	for _, host := range h.others() {
		for turn := range h.turns(host) {
			if h.share(host, h.place, turn) >= 0 {
				if err := c.waitFor(first, first+frames); err != nil {
					return err
				}
				first += frames
			}
			if err := c.gatherInto(all, host, turn); err != nil {
				return err
			}
		}
	}
	return nil
}

// gatherInto gives to all ranks of this host what each has from one rank of a host.
func (c *call) gatherInto(all into, host, turn int) error {
	h := c.g.levels
	parts := make([][]byte, len(h.ranks()))
	for i := range parts {
		if from := h.share(host, i, turn); from >= 0 {
			parts[i] = all.of(from)
		}
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(c.ctx, call, parts[h.place], func([]int) ([][]byte, error) { return parts, nil })
	})
}

// allToAllIntoHierarchical is allToAllHierarchical; this rank's own part is in its place.
func (c *call) allToAllIntoHierarchical(data, result into) error {
	h := c.g.levels
	others := c.elsewhere()
	for s := range c.frames(result.each) {
		for _, to := range others {
			c.send(to, 0, c.cut(data.of(to), s))
		}
	}
	first := c.inUsed
	c.postInto(others, result)
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(c.ctx, call, data.by(h.ranks()), result.place(h.ranks()))
	})
	if err != nil {
		return err
	}
	return c.waitFor(first, c.inUsed)
}
