package collectivetest

import (
	"context"
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
)

// Row is a row of the table that defines reductions: if the ranks have the values of In, the result
// is Want. The result depends on nothing else: not on the position of the value in a tensor or of
// its rank in the world, nor on sizes, algorithms, transports or devices. docs/collectives.md has
// the table.
type Row[T collective.Element] struct {
	Name string
	Op   collective.Op
	// In returns the value of a rank among n ranks. The rank special has the value that the row is
	// about.
	In   func(rank, special, n int) T
	Want func(n int) T
}

// number has the values and conversions of a type that the table uses.
type number[T collective.Element] struct {
	from                   func(float64) T // exact
	nan                    func(T) bool
	tiny, large, lowest, h T // the smallest subnormal; a value whose double overflows; the lowest and the highest integer
	bits                   int
	floating, half         bool
}

// Table returns the rows of a type.
func Table[T collective.Element]() []Row[T] {
	n := numberOf[T]()
	if n.floating {
		return n.floats()
	}
	return n.integers()
}

func numberOf[T collective.Element]() number[T] {
	from := func(bits uint64) T { return *(*T)(unsafe.Pointer(&bits)) } // little-endian, as all that hvdrun runs on
	size := int(unsafe.Sizeof(*new(T)))
	switch any(*new(T)).(type) {
	case float32:
		return number[T]{floating: true, tiny: from(1), large: from(uint64(math.Float32bits(math.MaxFloat32))),
			from: func(v float64) T { return from(uint64(math.Float32bits(float32(v)))) }, nan: func(v T) bool { return v != v }}
	case float64:
		return number[T]{floating: true, tiny: from(1), large: from(math.Float64bits(math.MaxFloat64)),
			from: func(v float64) T { return from(math.Float64bits(v)) }, nan: func(v T) bool { return v != v }}
	case collective.Float16:
		return number[T]{floating: true, half: true, tiny: from(1), large: from(uint64(collective.ToFloat16(49152))),
			from: func(v float64) T { return from(uint64(collective.ToFloat16(float32(v)))) },
			nan:  func(v T) bool { f := (*(*collective.Float16)(unsafe.Pointer(&v))).Float32(); return f != f }}
	case collective.BFloat16:
		return number[T]{floating: true, half: true, tiny: from(1), large: from(uint64(collective.ToBFloat16(float32(math.Ldexp(1, 127))))),
			from: func(v float64) T { return from(uint64(collective.ToBFloat16(float32(v)))) },
			nan:  func(v T) bool { f := (*(*collective.BFloat16)(unsafe.Pointer(&v))).Float32(); return f != f }}
	}
	n := number[T]{bits: 8 * size, nan: func(T) bool { return false }, from: func(v float64) T { return T(int64(v)) }}
	var zero T
	if zero-1 > zero { // unsigned
		n.h = zero - 1
	} else {
		n.lowest = T(uint64(1) << (n.bits - 1))
		n.h = n.lowest - 1
	}
	return n
}

// one returns the function In for which the special rank has one value and the others another.
func one[T any](special, others T) func(rank, at, n int) T {
	return func(rank, at, _ int) T {
		if rank == at {
			return special
		}
		return others
	}
}

func always[T any](v T) func(int) T { return func(int) T { return v } }

func (k number[T]) floats() []Row[T] {
	inf, negative, nan := k.from(math.Inf(1)), k.from(math.Inf(-1)), k.from(math.NaN())
	zero, minus, unit := k.from(0), k.from(math.Copysign(0, -1)), k.from(1)
	var rows []Row[T]
	for _, op := range ops {
		rows = append(rows, Row[T]{"a NaN makes a NaN", op, one(nan, unit), always(nan)},
			Row[T]{"a NaN beside an infinity makes a NaN", op, one(nan, inf), always(nan)})
	}
	several := func(alone, others T) func(int) T { // a result that differs for a single rank
		return func(n int) T {
			if n == 1 {
				return alone
			}
			return others
		}
	}
	rows = append(rows,
		Row[T]{"the largest infinity", collective.Max, one(inf, negative), always(inf)},
		Row[T]{"the smallest infinity", collective.Min, one(negative, inf), always(negative)},
		Row[T]{"+0 is larger than −0", collective.Max, one(zero, minus), always(zero)},
		Row[T]{"−0 is smaller than +0", collective.Min, one(minus, zero), always(minus)},
		Row[T]{"the sum of −0 is −0", collective.Sum, one(minus, minus), always(minus)},
		Row[T]{"the average of −0 is −0", collective.Average, one(minus, minus), always(minus)},
		Row[T]{"−0 times 1 is −0", collective.Product, one(minus, unit), always(minus)},
		Row[T]{"an infinity stays", collective.Sum, one(inf, unit), always(inf)},
		Row[T]{"an infinity stays", collective.Average, one(negative, unit), always(negative)},
		Row[T]{"∞ − ∞ is NaN", collective.Sum, one(inf, negative), several(inf, nan)},
		Row[T]{"0 · ∞ is NaN", collective.Product, one(zero, inf), several(zero, nan)},
		Row[T]{"a sum overflows to ∞", collective.Sum, one(k.large, k.large), several(k.large, inf)},
		Row[T]{"a product overflows to ∞", collective.Product, one(k.large, k.large), several(k.large, inf)},
		Row[T]{"subnormal numbers are not lost", collective.Sum, one(k.tiny, zero), always(k.tiny)},
		Row[T]{"subnormal numbers are not lost", collective.Product, one(k.tiny, unit), always(k.tiny)},
		Row[T]{"subnormal numbers are not lost", collective.Max, one(k.tiny, zero), always(k.tiny)},
		Row[T]{"subnormal numbers are not lost", collective.Min, one(k.tiny, unit), always(k.tiny)})
	if k.half {
		// It is summed in float32, which has the range of a BFloat16.
		mean := always(k.large)
		if _, is := any(k.large).(collective.BFloat16); is {
			mean = several(k.large, inf)
		}
		return append(rows, Row[T]{"the sum of an average overflows as a float32", collective.Average, one(k.large, k.large), mean})
	}
	return append(rows, Row[T]{"the sum of an average overflows", collective.Average, one(k.large, k.large), several(k.large, inf)},
		Row[T]{"subnormal numbers are not lost", collective.Average, one(k.tiny, k.tiny), always(k.tiny)})
}

func (k number[T]) integers() []Row[T] {
	power := func(v T) func(int) T {
		return func(n int) T {
			p := T(1)
			for range n {
				p *= v
			}
			return p
		}
	}
	sum := func(v T) func(int) T {
		return func(n int) T {
			var s T
			for range n {
				s += v
			}
			return s
		}
	}
	// quotient divides in 64 bits, since n may not fit the type.
	quotient := func(of func(int) T) func(int) T {
		return func(n int) T {
			if v := of(n); k.lowest != 0 {
				return T(int64(v) / int64(n))
			} else {
				return T(uint64(v) / uint64(n))
			}
		}
	}
	three := k.h // −3 of signed types
	if k.lowest != 0 {
		var zero T
		three = zero - 3
	}
	return []Row[T]{
		{"the highest", collective.Max, one(k.h, k.lowest), always(k.h)},
		{"the lowest", collective.Min, one(k.lowest, k.h), always(k.lowest)},
		{"a sum wraps around", collective.Sum, one(k.h, k.h), sum(k.h)},
		{"a sum wraps around", collective.Sum, one(k.h, 1), func(n int) T { return k.h + T(n-1) }},
		{"a product wraps around", collective.Product, one(k.h, k.h), power(k.h)},
		{"a product wraps around", collective.Product, one(k.lowest, 3), func(n int) T { return k.lowest * power(3)(n-1) }},
		{"an average truncates towards zero", collective.Average, one(three, 0), quotient(always(three))},
		{"an average truncates towards zero", collective.Average, one(k.lowest, 0), quotient(always(k.lowest))},
		{"the sum of an average wraps around", collective.Average, one(k.h, k.h), quotient(sum(k.h))},
	}
}

// CheckTable checks the rows of one op. reduce reduces the tensors of all ranks, of the given
// length, and returns each rank's result. Rows and special ranks alternate along the tensor.
func CheckTable[T collective.Element](t *testing.T, ranks, length int, op collective.Op, reduce func(in [][]T) [][]T) {
	t.Helper()
	var rows []Row[T]
	for _, r := range Table[T]() {
		if r.Op == op {
			rows = append(rows, r)
		}
	}
	at := func(i int) (row Row[T], special int) { return rows[i%len(rows)], i / len(rows) % ranks }
	in := make([][]T, ranks)
	for rank := range in {
		in[rank] = cycle(length, len(rows)*ranks, func(i int) T {
			row, special := at(i)
			return row.In(rank, special, ranks)
		})
	}
	want := cycle(length, len(rows)*ranks, func(i int) T {
		row, _ := at(i)
		return row.Want(ranks)
	})
	nan := numberOf[T]().nan
	out := reduce(in)
	for rank := range out {
		if len(out[rank]) != length {
			t.Fatalf("%v of %d %T over %d: rank %d has %d", op, length, *new(T), ranks, rank, len(out[rank]))
		}
		if rank > 0 && equal(out[rank], out[0]) {
			continue // as right as those
		}
		for i, got := range out[rank] {
			if (nan(want[i]) && nan(got) || equal(want[i:i+1], out[rank][i:i+1])) && equal(out[0][i:i+1], out[rank][i:i+1]) {
				continue
			}
			row, special := at(i)
			t.Fatalf("%v of %d %T over %d, %s: element %d, for which rank %d is special, is %v (bits %x) at rank %d and %v at rank 0, want %v",
				op, length, *new(T), ranks, row.Name, i, special, got, got, rank, out[0][i], want[i])
		}
	}
}

// checkTables checks the table for all reductions of a group, in the foreground and in the
// background, as a whole and in parts.
func checkTables(t *testing.T, groups []*collective.Group, lengths ...int) {
	t.Helper()
	checkSemantics[float32](t, groups, lengths)
	checkSemantics[collective.Float16](t, groups, lengths)
	checkSemantics[collective.BFloat16](t, groups, lengths)
	checkSemantics[int8](t, groups, lengths)
	checkSemantics[uint64](t, groups, lengths)
	if short() {
		return
	}
	checkSemantics[float64](t, groups, lengths)
	checkSemantics[int16](t, groups, lengths)
	checkSemantics[int32](t, groups, lengths)
	checkSemantics[int64](t, groups, lengths)
	checkSemantics[uint8](t, groups, lengths)
	checkSemantics[uint16](t, groups, lengths)
	checkSemantics[uint32](t, groups, lengths)
}

func checkSemantics[T collective.Element](t *testing.T, groups []*collective.Group, lengths []int) {
	t.Helper()
	n := len(groups)
	clone := func(in [][]T) [][]T {
		out := make([][]T, n)
		for rank := range in {
			out[rank] = append(make([]T, 0, len(in[rank])), in[rank]...)
		}
		return out
	}
	for _, length := range lengths {
		for _, op := range ops {
			CheckTable(t, n, length, op, func(in [][]T) [][]T {
				out := clone(in)
				must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
					return collective.AllReduce(ctx, g, out[g.Rank()], op)
				}))
				return out
			})
			CheckTable(t, n, length, op, func(in [][]T) [][]T {
				parts := make([][]T, n)
				must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) (err error) {
					parts[g.Rank()], err = collective.ReduceScatter(ctx, g, in[g.Rank()], op)
					return err
				}))
				var whole []T
				for _, p := range parts {
					whole = append(whole, p...)
				}
				return [][]T{whole}
			})
		}
		// The operations of all ops are in progress at the same time and may be fused.
		outs := make(map[collective.Op][][]T)
		for range 3 { // the later ones may be guessed
			for _, op := range ops {
				CheckTable(t, n, length, op, func(in [][]T) [][]T { outs[op] = clone(in); return nil })
			}
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				var handles []*collective.Handle
				for _, op := range ops {
					handles = append(handles, collective.AllReduceAsync(ctx, g, fmt.Sprintf("%T %d %v", *new(T), length, op), outs[op][g.Rank()], op))
				}
				for _, h := range handles {
					if err := h.Wait(); err != nil {
						return err
					}
				}
				return nil
			}))
			for _, op := range ops {
				CheckTable(t, n, length, op, func([][]T) [][]T { return outs[op] })
			}
		}
	}
}
