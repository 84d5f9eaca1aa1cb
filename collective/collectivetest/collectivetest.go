// Package collectivetest is the conformance kit of groups: Run tests groups of ranks, however they
// are made.
package collectivetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/collective"
)

// bound is the time after which a call counts as hung.
const bound = 3 * time.Minute

// NewGroups makes n connected groups, by rank; the kit closes them.
type NewGroups func(t *testing.T, n int) []*collective.Group

// Run runs the kit. It takes some seconds, more under the race detector.
func Run(t *testing.T, newGroups NewGroups) {
	t.Run("Ops", func(t *testing.T) { testOps(t, newGroups) })
	if !brief.Load() {
		t.Run("Large", func(t *testing.T) { testLarge(t, newGroups) })
	}
	t.Run("Adasum", func(t *testing.T) { testAdasum(t, newGroups) })
	t.Run("Bits", func(t *testing.T) { testBits(t, newGroups) })
	t.Run("Mismatch", func(t *testing.T) { testMismatch(t, newGroups) })
	t.Run("Refused", func(t *testing.T) { testRefused(t, newGroups) })
	t.Run("RandomMismatch", func(t *testing.T) { testRandomMismatch(t, newGroups) })
	t.Run("Invalid", func(t *testing.T) { testInvalid(t, newGroups) })
	t.Run("Death", func(t *testing.T) { testDeath(t, newGroups) })
	t.Run("Idle", func(t *testing.T) { testIdleDeath(t, newGroups) })
	t.Run("Leave", func(t *testing.T) { testLeave(t, newGroups) })
	t.Run("Cancel", func(t *testing.T) { testCancel(t, newGroups) })
	t.Run("Closed", func(t *testing.T) { testClosed(t, newGroups) })
	t.Run("Busy", func(t *testing.T) { testBusy(t, newGroups) })
	t.Run("Leaks", func(t *testing.T) { testLeaks(t, newGroups) })
	t.Run("Async", func(t *testing.T) { testAsync(t, newGroups) })
	t.Run("Points", func(t *testing.T) { testPoints(t, newGroups) })
	t.Run("Subset", func(t *testing.T) { testSubset(t, newGroups) })
}

// RunBrief is like Run, with fewer sizes and rounds, as with -short, and without the largest
// tensors; with -short, groups have only one size. It is for ways of making groups that differ
// little from another way. No other part of the kit may run at the same time.
func RunBrief(t *testing.T, newGroups NewGroups) {
	brief.Store(true)
	defer brief.Store(false)
	Run(t, newGroups)
}

// RunAgain is like Run, for groups that differ only slightly from those of another test. Under the
// race detector it is RunBrief.
func RunAgain(t *testing.T, newGroups NewGroups) {
	if Raced {
		RunBrief(t, newGroups)
	} else {
		Run(t, newGroups)
	}
}

// RunOps checks the results of all operations, at few sizes.
func RunOps(t *testing.T, newGroups NewGroups) {
	brief.Store(true)
	defer brief.Store(false)
	testOps(t, newGroups)
}

// brief is set while RunBrief runs.
var brief atomic.Bool

func short() bool { return testing.Short() || brief.Load() }

// Each runs f for every group at the same time and returns the errors, by rank. The context of f
// ends after three minutes; if f then returns its error, the test fails.
func Each(t *testing.T, groups []*collective.Group, f func(ctx context.Context, g *collective.Group) error) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() { errs[i] = f(ctx, g) })
	}
	wg.Wait()
	for i, err := range errs {
		if errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("rank %d hung: %v", i, err)
		}
	}
	return errs
}

func must(t *testing.T, errs []error) {
	t.Helper()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
}

func closeAll(t *testing.T, groups []*collective.Group) {
	t.Helper()
	must(t, Each(t, groups, func(_ context.Context, g *collective.Group) error { return g.Close() }))
}

var ops = []collective.Op{collective.Sum, collective.Average, collective.Min, collective.Max, collective.Product}

func testOps(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{1, 2, 3, 4, 5, 8}, 1, 5, 8) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			groups := newGroups(t, n)
			defer closeAll(t, groups)
			for i, g := range groups {
				if g.Rank() != i || g.Size() != n {
					t.Fatalf("group %d is rank %d of %d", i, g.Rank(), g.Size())
				}
			}
			// Every type at small sizes, some at sizes of the ring and of several segments.
			small := []int{0, 1, 7, 64}
			if short() {
				checkType[float32](t, groups, 0, 1, 64, 5003, 140_001)
				checkType[float64](t, groups, 7, 1025)
				checkType[int8](t, groups, 1, 8193)
				checkType[uint16](t, groups, 9001)
				checkType[collective.Float16](t, groups, 64)
				checkBytes(t, groups, 1, 1000, 1<<20, 3<<20+5)
				CheckMeans(t, groups)
				checkTables(t, groups, 0, 101, 9001)
				return
			}
			checkType[float32](t, groups, append(small, 5003, 140_001)...)
			checkType[float64](t, groups, append(small, 1025)...)
			checkType[int8](t, groups, append(small, 8193)...)
			checkType[int16](t, groups, small...)
			checkType[int32](t, groups, small...)
			checkType[int64](t, groups, append(small, 3001)...)
			checkType[uint8](t, groups, append(small, 20_011)...)
			checkType[uint16](t, groups, append(small, 9001)...)
			checkType[uint32](t, groups, small...)
			checkType[uint64](t, groups, small...)
			checkType[collective.Float16](t, groups, append(small, 4999)...)
			checkType[collective.BFloat16](t, groups, append(small, 4999)...)
			checkBytes(t, groups, 1, 1000, 1<<20, 3<<20+5)
			CheckMeans(t, groups)
			checkTables(t, groups, 0, 1, 101, 9001, 140_001)
		})
	}
}

func checkType[T collective.Element](t *testing.T, groups []*collective.Group, lengths ...int) {
	t.Helper()
	for _, length := range lengths {
		for _, op := range ops {
			if length > 10_000 && op != collective.Sum && op != collective.Average {
				continue // only the kernels differ
			}
			checkReduce[T](t, groups, length, op)
			if op == collective.Sum || length == 64 {
				checkReduceScatter[T](t, groups, length, op)
				checkCounts[T](t, groups, length)
			}
		}
		checkBroadcast[T](t, groups, length)
		if testing.Short() && length > 100_000 {
			continue
		}
		checkGather[T](t, groups, length)
		checkAllToAll[T](t, groups, length)
	}
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error { return collective.Barrier(ctx, g) }))
}

// period is the period of the inputs, so that inputs and references of any length are cheap to
// make.
const period = 10

// value returns element i of a rank: small integers, so that every partial result is exact in every
// type.
func value(rank, i int, op collective.Op) int {
	if op == collective.Product {
		return 1 + (i+rank)%2
	}
	return (i*7+rank*3)%5 + 1
}

func input[T collective.Element](rank, length int, op collective.Op) []T {
	return repeated(length, func(i int) T { return fromInt[T](value(rank, i, op)) })
}

func repeated[T any](length int, f func(i int) T) []T { return cycle(length, period, f) }

// cycle returns the values of f for 0 to length−1 if they repeat after n. It copies all but the
// first n, which is much faster than calling f under the race detector.
func cycle[T any](length, n int, f func(i int) T) []T {
	data := make([]T, length)
	for i := range min(length, n) {
		data[i] = f(i)
	}
	for ; n < length; n *= 2 {
		copy(data[n:], data[:n])
	}
	return data
}

func fromInt[T collective.Element](v int) T {
	switch p := any(new(T)).(type) {
	case *collective.Float16:
		*p = collective.ToFloat16(float32(v))
		return T(*p)
	case *collective.BFloat16:
		*p = collective.ToBFloat16(float32(v))
		return T(*p)
	}
	return T(v)
}

// expect is the simple reference of a reduction over n ranks.
func expect[T collective.Element](n, length int, op collective.Op) []T {
	return repeated(length, func(i int) T {
		v := value(0, i, op)
		for rank := 1; rank < n; rank++ {
			x := value(rank, i, op)
			switch op {
			case collective.Min:
				v = min(v, x)
			case collective.Max:
				v = max(v, x)
			case collective.Product:
				v *= x
			default:
				v += x
			}
		}
		if op != collective.Average {
			return fromInt[T](v)
		}
		var zero T
		switch any(zero).(type) {
		case float32, float64:
			return T(v) / T(n)
		case collective.Float16:
			return T(collective.ToFloat16(float32(v) / float32(n)))
		case collective.BFloat16:
			return T(collective.ToBFloat16(float32(v) / float32(n)))
		}
		return T(v / n)
	})
}

// equal compares memory, since equal numbers of the kit have equal bits, and that is much faster
// under the race detector.
func equal[T collective.Element](a, b []T) bool {
	raw := func(s []T) []byte {
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*new(T))))
	}
	return bytes.Equal(raw(a), raw(b))
}

// differ returns the first index at which two slices of the same length differ, or −1.
func differ[T collective.Element](a, b []T) int {
	if equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

func checkReduce[T collective.Element](t *testing.T, groups []*collective.Group, length int, op collective.Op) {
	t.Helper()
	got := make([][]T, len(groups))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		got[g.Rank()] = input[T](g.Rank(), length, op)
		return collective.AllReduce(ctx, g, got[g.Rank()], op)
	}))
	want := expect[T](len(groups), length, op)
	for rank := range got {
		if i := differ(got[rank], want); i >= 0 {
			t.Fatalf("AllReduce of %d %T (%v), rank %d: element %d is %v, want %v",
				length, want[i], op, rank, i, got[rank][i], want[i])
		}
	}
}

func checkReduceScatter[T collective.Element](t *testing.T, groups []*collective.Group, length int, op collective.Op) {
	t.Helper()
	got := make([][]T, len(groups))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) (err error) {
		data := input[T](g.Rank(), length, op)
		got[g.Rank()], err = collective.ReduceScatter(ctx, g, data, op)
		if !equal(data, input[T](g.Rank(), length, op)) {
			return errors.New("the input has changed")
		}
		return err
	}))
	var whole []T
	for rank := range got {
		if most := (length + len(groups) - 1) / len(groups); len(got[rank]) > most || len(got[rank]) < most-1 {
			t.Fatalf("ReduceScatter of %d: rank %d has %d", length, rank, len(got[rank]))
		}
		whole = append(whole, got[rank]...)
	}
	if want := expect[T](len(groups), length, op); !equal(whole, want) {
		t.Fatalf("ReduceScatter of %d %T (%v) over %d is wrong", length, *new(T), op, len(groups))
	}
}

func checkBroadcast[T collective.Element](t *testing.T, groups []*collective.Group, length int) {
	t.Helper()
	root := length % len(groups)
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		data := input[T](g.Rank(), length, collective.Sum)
		if err := collective.Broadcast(ctx, g, data, root); err != nil {
			return err
		}
		if !equal(data, input[T](root, length, collective.Sum)) {
			return fmt.Errorf("wrong result: Broadcast of %d %T from %d", length, *new(T), root)
		}
		return nil
	}))
}

func checkGather[T collective.Element](t *testing.T, groups []*collective.Group, length int) {
	t.Helper()
	of := func(rank int) []T { return input[T](rank, length*(rank%3)/2+rank%2, collective.Sum) }
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		own := of(g.Rank())
		all, err := collective.AllGather(ctx, g, own)
		if err != nil {
			return err
		}
		clear(own) // what is returned is a copy
		for rank := range all {
			if !equal(all[rank], of(rank)) {
				return fmt.Errorf("wrong part: AllGather of %d %T, rank %d", length, *new(T), rank)
			}
		}
		if len(all) != g.Size() {
			return fmt.Errorf("%d parts from AllGather", len(all))
		}
		return nil
	}))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		all := make([]T, length*g.Size())
		own := input[T](g.Rank(), length, collective.Sum)
		if length%2 == 0 { // in its place already
			copy(all[length*g.Rank():], own)
			own = all[length*g.Rank():][:length]
		}
		if err := collective.AllGatherInto(ctx, g, own, all); err != nil {
			return err
		}
		for rank := range g.Size() {
			if !equal(all[length*rank:][:length], input[T](rank, length, collective.Sum)) {
				return fmt.Errorf("wrong part: AllGatherInto of %d %T, rank %d", length, *new(T), rank)
			}
		}
		return nil
	}))
}

func checkAllToAll[T collective.Element](t *testing.T, groups []*collective.Group, length int) {
	t.Helper()
	of := func(from, to int) []T { return input[T](from+to, length*((from+2*to)%3)/2, collective.Sum) }
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		parts := make([][]T, g.Size())
		for to := range parts {
			parts[to] = of(g.Rank(), to)
		}
		all, err := collective.AllToAll(ctx, g, parts)
		if err != nil {
			return err
		}
		for from := range all {
			if !equal(all[from], of(from, g.Rank())) {
				return fmt.Errorf("wrong part: AllToAll of %d %T, rank %d", length, *new(T), from)
			}
		}
		return nil
	}))
	even := func(from, to int) []T { return input[T](from+2*to, length, collective.Sum) }
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		var data []T
		for to := range g.Size() {
			data = append(data, even(g.Rank(), to)...)
		}
		result := make([]T, len(data))
		if err := collective.AllToAllInto(ctx, g, data, result); err != nil {
			return err
		}
		for from := range g.Size() {
			if !equal(result[length*from:][:length], even(from, g.Rank())) {
				return fmt.Errorf("wrong part: AllToAllInto of %d %T, rank %d", length, *new(T), from)
			}
		}
		return nil
	}))
}

// checkBytes checks BroadcastBytes of these lengths from two ranks, and of no bytes from the
// others. With -short, lengths above a segment are broadcast from one rank only: the tree is the
// same.
func checkBytes(t *testing.T, groups []*collective.Group, lengths ...int) {
	t.Helper()
	for root := range groups {
		for _, length := range append([]int{0}, lengths...) {
			if length > 1<<18 && root > 0 && short() {
				continue
			}
			want := make([]byte, length)
			rand.NewChaCha8([32]byte{byte(root), byte(length)}).Read(want)
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				var data []byte
				if g.Rank() == root {
					data = want
				}
				got, err := collective.BroadcastBytes(ctx, g, data, root)
				if err == nil && !bytes.Equal(got, want) {
					err = fmt.Errorf("wrong result: BroadcastBytes of %d from %d", length, root)
				}
				return err
			}))
			if root > 1 {
				break
			}
		}
	}
}

// testLarge: 64 MiB, and buffers larger than what is taken on a peer's word.
func testLarge(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	length, size := 16<<20+3, 40<<20+1
	if Raced || testing.Short() {
		length, size = 4<<20+3, 10<<20+1
	}
	got := make([][]float32, len(groups))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		data := repeated(length, func(i int) float32 { return float32(i + g.Rank()) })
		got[g.Rank()] = data
		if err := collective.AllReduce(ctx, g, data, collective.Average); err != nil {
			return err
		}
		all, err := collective.BroadcastBytes(ctx, g, make([]byte, size*(1-g.Rank())), 0)
		if err == nil && len(all) != size {
			err = fmt.Errorf("%d bytes", len(all))
		}
		return err
	}))
	if !equal(got[0], got[1]) {
		t.Fatal("results differ")
	}
	if want := repeated(length, func(i int) float32 { return float32(i) + 0.5 }); !equal(got[0], want) {
		t.Fatalf("element %d is wrong", differ(got[0], want))
	}
}

// testBits: results of inexact arithmetic, NaNs of every kind and signed zeros are equal in every
// bit on every rank.
func testBits(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{2, 3, 5, 8}, 3, 8) {
		groups := newGroups(t, n)
		for _, length := range []int{1, 700, 9_001} {
			for _, op := range append(ops, collective.Adasum) {
				got32, got64, got16 := make([][]uint32, n), make([][]uint64, n), make([][]collective.BFloat16, n)
				must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
					r := rand.New(rand.NewPCG(uint64(g.Rank()), uint64(length)))
					f32, f64, f16 := make([]float32, length), make([]float64, length), make([]collective.BFloat16, length)
					for i := range f32 {
						f64[i] = wild(r, i)
						f32[i] = float32(f64[i])
						f16[i] = collective.BFloat16(r.Uint32())
						if i%4 == 0 {
							f32[i] = math.Float32frombits(r.Uint32())
						}
					}
					err := errors.Join(collective.AllReduce(ctx, g, f32, op), collective.AllReduce(ctx, g, f64, op),
						collective.AllReduce(ctx, g, f16, op))
					for i := range f32 {
						got32[g.Rank()] = append(got32[g.Rank()], math.Float32bits(f32[i]))
						got64[g.Rank()] = append(got64[g.Rank()], math.Float64bits(f64[i]))
					}
					got16[g.Rank()] = f16
					return err
				}))
				for rank := 1; rank < n; rank++ {
					if !equal(got32[0], got32[rank]) || !equal(got64[0], got64[rank]) ||
						!equal(got16[0], got16[rank]) {
						t.Fatalf("AllReduce of %d (%v) over %d: ranks 0 and %d have different bits", length, op, n, rank)
					}
				}
			}
		}
		checkNaN(t, groups)
		closeAll(t, groups)
	}
}

func wild(r *rand.Rand, i int) float64 {
	switch r.IntN(12) {
	case 0:
		return math.NaN()
	case 1:
		return math.Inf(1)
	case 2:
		return math.Copysign(0, -1)
	case 3:
		return 0
	case 4:
		return math.Float64frombits(r.Uint64())
	}
	return (r.Float64() - 0.5) * math.Pow(10, float64(i%20))
}

// checkNaN: one rank's NaN is that of all, and −0 is less than +0.
func checkNaN(t *testing.T, groups []*collective.Group) {
	t.Helper()
	for who := range groups {
		for _, op := range []collective.Op{collective.Min, collective.Max} {
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				data := []float64{1, 0}
				if g.Rank() == who {
					data = []float64{math.NaN(), math.Copysign(0, -1)}
				}
				err := collective.AllReduce(ctx, g, data, op)
				if err == nil && (!math.IsNaN(data[0]) || math.Signbit(data[1]) != (op == collective.Min)) {
					err = fmt.Errorf("%v of NaN and zeros, the odd ones of rank %d, is %v", op, who, data)
				}
				return err
			}))
		}
	}
}

// calls are calls no two of which match.
var calls = []struct {
	text string
	call func(ctx context.Context, g *collective.Group) error
}{
	{"AllReduce of 10 float32 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]float32, 10), collective.Sum)
	}},
	{"AllReduce of 11 float32 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]float32, 11), collective.Sum)
	}},
	{"AllReduce of 10 float32 (max)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]float32, 10), collective.Max)
	}},
	{"AllReduce of 10 int32 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]int32, 10), collective.Sum)
	}},
	{"AllReduce of 0 int8 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, []int8{}, collective.Sum)
	}},
	{"AllReduce of 500000 float32 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]float32, 500_000), collective.Sum)
	}},
	{"AllReduce of 600000 float32 (sum)", func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduce(ctx, g, make([]float32, 600_000), collective.Sum)
	}},
	{"ReduceScatter of 10 float32 (sum)", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.ReduceScatter(ctx, g, make([]float32, 10), collective.Sum)
		return err
	}},
	{"ReduceScatter of 10 float32 (sum), counts", func(ctx context.Context, g *collective.Group) error {
		counts, part := append([]int{10}, make([]int, max(1, g.Size())-1)...), make([]float32, 10*max(0, 1-g.Rank()))
		return collective.ReduceScatterCounts(ctx, g, make([]float32, 10), counts, part, collective.Sum)
	}},
	{"Broadcast of 10 float32 from rank 0", func(ctx context.Context, g *collective.Group) error {
		return collective.Broadcast(ctx, g, make([]float32, 10), 0)
	}},
	{"Broadcast of 10 float32 from rank 1", func(ctx context.Context, g *collective.Group) error {
		return collective.Broadcast(ctx, g, make([]float32, 10), 1)
	}},
	{"Broadcast of 1000000 float32 from rank 0", func(ctx context.Context, g *collective.Group) error {
		return collective.Broadcast(ctx, g, make([]float32, 1_000_000), 0)
	}},
	{"BroadcastBytes from rank 0", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.BroadcastBytes(ctx, g, make([]byte, 100), 0)
		return err
	}},
	{"AllGather of float32", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.AllGather(ctx, g, make([]float32, 400_000))
		return err
	}},
	{"AllGather of uint16", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.AllGather(ctx, g, make([]uint16, 3))
		return err
	}},
	{"AllToAll of", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.AllToAll(ctx, g, make([][]float32, g.Size()))
		return err
	}},
	{"AllToAll of 1 parts", func(ctx context.Context, g *collective.Group) error {
		_, err := collective.AllToAll(ctx, g, make([][]float32, 1))
		return err
	}},
	{"AllGatherInto of 5 float32", func(ctx context.Context, g *collective.Group) error {
		return collective.AllGatherInto(ctx, g, make([]float32, 5), make([]float32, 5*g.Size()))
	}},
	{"AllToAllInto of", func(ctx context.Context, g *collective.Group) error {
		return collective.AllToAllInto(ctx, g, make([]float32, 5*g.Size()), make([]float32, 5*g.Size()))
	}},
	{"Barrier", func(ctx context.Context, g *collective.Group) error { return collective.Barrier(ctx, g) }},
}

// testMismatch: for every pair of calls that do not match, where one rank makes the other call,
// every rank gets an error that names both.
func testMismatch(t *testing.T, newGroups NewGroups) {
	for i, a := range calls {
		for j, b := range calls {
			if i >= j || (i+j)%3 != 0 && short() {
				continue
			}
			n := 2 + (i*7+j)%3
			odd := (i + j) % n
			groups := newGroups(t, n)
			errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				if g.Rank() == odd {
					return b.call(ctx, g)
				}
				return a.call(ctx, g)
			})
			for rank, err := range errs {
				checkMismatch(t, err, rank)
				if m := err.Error(); !strings.Contains(m, fmt.Sprintf("rank %d calls %s", odd, b.text)) ||
					!strings.Contains(m, "calls "+a.text) {
					t.Fatalf("%s against %s: rank %d got %v", a.text, b.text, rank, err)
				}
			}
			if err := collective.Barrier(context.Background(), groups[0]); !sameMismatch(err) {
				t.Fatalf("an operation after a mismatch: %v", err)
			}
			closeAll(t, groups)
		}
	}
}

func sameMismatch(err error) bool {
	var m *collective.MismatchError
	return errors.As(err, &m)
}

func checkMismatch(t *testing.T, err error, rank int) {
	t.Helper()
	var m *collective.MismatchError
	if !errors.As(err, &m) || errors.Is(err, collective.ErrAborted) || m.Ranks[0] >= m.Ranks[1] {
		t.Fatalf("rank %d: %v", rank, err)
	}
}

// testRandomMismatch: whatever the ranks call, no rank hangs, and none succeeds unless all called
// the same.
func testRandomMismatch(t *testing.T, newGroups NewGroups) {
	for seed := range uint64(repeat(30)) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := 2 + r.IntN(4)
		kinds := []int{r.IntN(len(calls) - 2), r.IntN(len(calls) - 2), r.IntN(len(calls) - 2)}
		which := make([]int, n)
		for i := range which {
			which[i] = kinds[r.IntN(len(kinds))]
		}
		groups := newGroups(t, n)
		errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			if err := collective.Barrier(ctx, g); err != nil {
				return err
			}
			return calls[which[g.Rank()]].call(ctx, g)
		})
		same := !slices.ContainsFunc(which, func(w int) bool { return w != which[0] })
		for rank, err := range errs {
			if same {
				must(t, errs)
			} else {
				checkMismatch(t, err, rank)
			}
		}
		closeAll(t, groups)
	}
}

// testRefused: a call that one rank refuses matches no valid call of the other ranks, however
// similar they are.
func testRefused(t *testing.T, newGroups NewGroups) {
	compressed := func(c collective.Compression) call {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceCompressed(ctx, g, make([]float32, 70_000), collective.Sum, c)
		}
	}
	reduced := func(op collective.Op) call {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduce(ctx, g, make([]float32, 70_000), op)
		}
	}
	root := func(r int) call {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.Broadcast(ctx, g, make([]float32, 10), r)
		}
	}
	parts := func(more int) call {
		return func(ctx context.Context, g *collective.Group) error {
			_, err := collective.AllToAll(ctx, g, make([][]float32, g.Size()+more))
			return err
		}
	}
	lists := func(all ...[]int) call {
		return func(ctx context.Context, g *collective.Group) error {
			_, err := g.Partition(ctx, all)
			return err
		}
	}
	background := func(op collective.Op, o collective.AsyncOptions) call {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceAsyncWith(ctx, g, "x", make([]float32, 100), op, o).Wait()
		}
	}
	for i, test := range []struct{ valid, refused call }{
		{background(collective.Sum, collective.AsyncOptions{}), background(77, collective.AsyncOptions{})},
		{background(collective.Sum, collective.AsyncOptions{}), background(collective.Sum, collective.AsyncOptions{Compression: 99})},
		{background(collective.Sum, collective.AsyncOptions{}), background(collective.Sum, collective.AsyncOptions{Prescale: math.NaN()})},
		{compressed(collective.CompressNone), compressed(99)},
		{compressed(collective.CompressFloat16), compressed(99)},
		{reduced(collective.Sum), compressed(3)},
		{compressed(collective.CompressBFloat16), reduced(0)},
		{reduced(collective.Adasum), reduced(77)},
		{root(0), root(3)},
		{root(1), root(-1)},
		{parts(0), parts(-1)},
		{lists([]int{0, 1}), lists([]int{0, 1}, nil)},
		{lists([]int{0, 1}), lists([]int{0, 0})},
		{func(ctx context.Context, g *collective.Group) error { return collective.Barrier(ctx, g) }, compressed(99)},
	} {
		groups := newGroups(t, 3)
		for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			if g.Rank() == i%3 {
				return test.refused(ctx, g)
			}
			return test.valid(ctx, g)
		}) {
			var m *collective.MismatchError
			if !errors.As(err, &m) {
				t.Errorf("pair %d, rank %d, of which rank %d refuses its call: %v", i, rank, i%3, err)
			}
		}
		closeAll(t, groups)
	}
}

type call = func(ctx context.Context, g *collective.Group) error

// testInvalid: wrong arguments on every rank are an error on every rank and leave the group usable.
func testInvalid(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	invalid := []call{
		func(ctx context.Context, g *collective.Group) error {
			return collective.Broadcast(ctx, g, []int8{1}, 3)
		},
		func(ctx context.Context, g *collective.Group) error {
			_, err := collective.BroadcastBytes(ctx, g, nil, -1)
			return err
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduce(ctx, g, []int8{1}, 0)
		},
		func(ctx context.Context, g *collective.Group) error {
			_, err := collective.ReduceScatter(ctx, g, []int8{1}, 99)
			return err
		},
		func(ctx context.Context, g *collective.Group) error {
			_, err := collective.AllToAll(ctx, g, [][]int8{})
			return err
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllGatherInto(ctx, g, []int8{1}, make([]int8, g.Size()+1))
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllToAllInto(ctx, g, make([]int8, 2*g.Size()), make([]int8, g.Size()))
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceScatterInto(ctx, g, make([]int8, 2*g.Size()), make([]int8, 1), collective.Sum)
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduce(ctx, g, []uint16{1}, collective.Adasum)
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceCompressed(ctx, g, []float32{1}, collective.Sum, 99)
		},
		func(ctx context.Context, g *collective.Group) error {
			_, err := collective.ReduceScatter(ctx, g, []float32{1}, collective.Adasum)
			return err
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceAsync(ctx, g, "integers", []int64{1}, collective.Adasum).Wait()
		},
	}
	invalid = slices.Concat(invalid, overlapping(), ofOthersHalves(), uncounted())
	for i, f := range invalid {
		for rank, err := range Each(t, groups, f) {
			if err == nil || errors.Is(err, collective.ErrAborted) || !strings.HasPrefix(err.Error(), "collective: ") {
				t.Fatalf("call %d, rank %d: %v", i, rank, err)
			}
		}
	}
	checkReduce[int64](t, groups, 10, collective.Sum)
}

// overlapping are calls whose results overlap with their inputs.
func overlapping() []call {
	return []call{
		func(ctx context.Context, g *collective.Group) error {
			x := make([]int8, 6*g.Size())
			return collective.AllGatherInto(ctx, g, x[6*g.Rank()+1:][:5], x[:5*g.Size()])
		},
		func(ctx context.Context, g *collective.Group) error {
			x := make([]int8, 5*g.Size())
			other := (g.Rank() + 1) % g.Size()
			return collective.AllGatherInto(ctx, g, x[5*other:][:5], x)
		},
		func(ctx context.Context, g *collective.Group) error {
			x := make([]int8, 2*g.Size())
			return collective.ReduceScatterInto(ctx, g, x, x[:2], collective.Sum)
		},
		func(ctx context.Context, g *collective.Group) error {
			x := make([]int8, 2*g.Size())
			return collective.AllToAllInto(ctx, g, x, x)
		},
		func(ctx context.Context, g *collective.Group) error {
			x := make([]int8, 3*g.Size()-1)
			return collective.AllToAllInto(ctx, g, x[:g.Size()], x[g.Size()-1:][:g.Size()])
		},
		func(ctx context.Context, g *collective.Group) error {
			held := make([][]collective.Node, g.Size())
			for rank := range held {
				held[rank] = []collective.Node{{Index: rank}}
			}
			p, err := collective.NewPartials(g.Size(), held)
			if err != nil {
				return err
			}
			x := make([]int8, 8)
			return collective.ReduceTree(ctx, g, p, [][]int8{x[:5]}, x[3:], collective.Sum)
		},
	}
}

// Types of other packages for 16-bit floating point numbers, recognizable by a name or a method.
type (
	otherFloat16 uint16
	brain        uint16
)

func (b brain) Float32() float32 { return collective.BFloat16(b).Float32() }

// ofOthersHalves returns reductions of such numbers.
func ofOthersHalves() []call {
	return []call{
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduce(ctx, g, make([]otherFloat16, 3), collective.Sum)
		},
		func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceAsync(ctx, g, "brains", make([]brain, 3), collective.Average).Wait()
		},
		func(ctx context.Context, g *collective.Group) error {
			_, err := collective.ReduceScatter(ctx, g, make([]brain, 6), collective.Max)
			return err
		},
	}
}

// all runs each operation once.
func all(ctx context.Context, g *collective.Group, length int) error {
	data := make([]float32, length)
	if err := collective.AllReduce(ctx, g, data, collective.Sum); err != nil {
		return err
	}
	if err := collective.AllReduce(ctx, g, data[:min(len(data), 100)], collective.Max); err != nil {
		return err
	}
	if err := collective.Broadcast(ctx, g, data, g.Size()-1); err != nil {
		return err
	}
	if _, err := collective.AllGather(ctx, g, data); err != nil {
		return err
	}
	if _, err := collective.ReduceScatter(ctx, g, data, collective.Average); err != nil {
		return err
	}
	parts := make([][]float32, g.Size())
	for i := range parts {
		parts[i] = data[:length/2]
	}
	if _, err := collective.AllToAll(ctx, g, parts); err != nil {
		return err
	}
	_, err := collective.BroadcastBytes(ctx, g, make([]byte, length), 0)
	return err
}

// testDeath: a rank dies at a random moment; every other rank gets an error that names it, and
// nothing hangs.
func testDeath(t *testing.T, newGroups NewGroups) {
	CheckDeath(t, repeat(40), newGroups, func(g *collective.Group) { g.Abort(errors.New("killed")) })
}

// CheckDeath makes kill end one rank of a group at random moments of a loop of all operations, for
// each seed, and checks that every other rank gets an error that names it.
func CheckDeath(t *testing.T, seeds int, newGroups NewGroups, kill func(g *collective.Group)) {
	t.Helper()
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 2))
		n := 2 + r.IntN(4)
		m := murder{t: t, seed: seed, groups: newGroups(t, n), victim: r.IntN(n), after: r.IntN(3000), kill: kill}
		length := []int{10, 3000, longest()}[r.IntN(3)]
		m.check(func(ctx context.Context, g *collective.Group) error { return all(ctx, g, length) },
			func(g *collective.Group) error { return collective.Barrier(context.Background(), g) })
	}
}

// longest returns the number of elements of the largest tensors that are reduced until a rank dies.
func longest() int {
	if testing.Short() {
		return 80_000
	}
	return 200_000
}

// murder is the death of one rank at some moment while all ranks work.
type murder struct {
	t             *testing.T
	seed          uint64
	groups        []*collective.Group
	victim, after int // number of turns of the scheduler after which the victim dies, from when the first rank works
	kill          func(g *collective.Group)
}

// check makes all ranks repeat the same work until it fails. It checks that the work, and every
// later call, fails on every rank with an error that names the victim.
func (m *murder) check(work func(ctx context.Context, g *collective.Group) error, later func(g *collective.Group) error) {
	t := m.t
	t.Helper()
	began := make(chan struct{}, len(m.groups))
	var killed sync.WaitGroup
	killed.Go(func() {
		<-began
		for range m.after {
			runtime.Gosched()
		}
		m.kill(m.groups[m.victim])
	})
	errs := Each(t, m.groups, func(ctx context.Context, g *collective.Group) error {
		began <- struct{}{}
		for {
			if err := work(ctx, g); err != nil {
				return err
			}
		}
	})
	killed.Wait()
	for rank, err := range errs {
		if rank != m.victim {
			where := fmt.Sprintf("seed %d, rank %d of %d", m.seed, rank, len(m.groups))
			checkAborted(t, err, m.victim, where)
			checkAborted(t, later(m.groups[rank]), m.victim, where+", the operation after it")
		} else if !errors.Is(err, collective.ErrAborted) {
			t.Fatalf("seed %d, the victim: %v", m.seed, err)
		}
	}
	closeAll(t, m.groups)
}

func checkAborted(t *testing.T, err error, dead int, where string) {
	t.Helper()
	var a *collective.AbortedError
	if !errors.Is(err, collective.ErrAborted) || !errors.As(err, &a) || !slices.Equal(a.Dead, []int{dead}) {
		t.Fatalf("%s: got %v, want an abort because of rank %d", where, err, dead)
	}
}

// testIdleDeath: a rank that is in no operation when another one dies gets the error from its next
// operation; a rank that waits for a third one gets it at once.
func testIdleDeath(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 4)
	dead := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		groups[3].Abort(nil)
		close(dead)
	})
	errs := Each(t, groups[:3], func(ctx context.Context, g *collective.Group) error {
		if g.Rank() == 2 {
			<-dead
		}
		return all(ctx, g, 100_000)
	})
	wg.Wait()
	for rank, err := range errs {
		checkAborted(t, err, 3, fmt.Sprintf("rank %d", rank))
	}
	closeAll(t, groups)
}

// testLeave: a rank that closes after an operation lets slower ranks finish it; operations that
// begin when all have finished it fail with the leaver's name.
func testLeave(t *testing.T, newGroups NewGroups) {
	for seed := range repeat(10) {
		n := 2 + seed%4
		leaver := seed % n
		groups := newGroups(t, n)
		var finishing sync.WaitGroup
		finishing.Add(n)
		errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			err := all(ctx, g, []int{50, 150_000}[seed%2])
			finishing.Done()
			if err != nil {
				return fmt.Errorf("the operation that the leaver finished: %v", err)
			}
			if g.Rank() == leaver {
				return g.Close()
			}
			finishing.Wait()
			return all(ctx, g, 100_000)
		})
		for rank, err := range errs {
			if rank != leaver {
				checkAborted(t, err, leaver, fmt.Sprintf("rank %d of %d", rank, n))
			} else if err != nil {
				t.Fatal(err)
			}
		}
		closeAll(t, groups)
	}
}

// testCancel: the end of a context, before an operation or in it, ends the group on every rank.
func testCancel(t *testing.T, newGroups NewGroups) {
	for _, early := range []bool{true, false} {
		groups := newGroups(t, 3)
		ctx, cancel := context.WithCancel(context.Background())
		if early {
			cancel()
		}
		returned := make(chan struct{})
		errs := Each(t, groups, func(bounded context.Context, g *collective.Group) error {
			switch g.Rank() {
			case 0:
				defer close(returned)
				return collective.AllReduce(ctx, g, make([]float32, 1_000_000), collective.Sum)
			case 1:
				return collective.AllReduce(bounded, g, make([]float32, 1_000_000), collective.Sum)
			}
			cancel()
			<-returned // rank 2 calls late: no rank can have finished before
			return collective.AllReduce(bounded, g, make([]float32, 1_000_000), collective.Sum)
		})
		cancel()
		if !errors.Is(errs[0], context.Canceled) || errors.Is(errs[0], collective.ErrAborted) {
			t.Fatalf("rank 0: %v", errs[0])
		}
		for rank, err := range errs[1:] {
			checkAborted(t, err, 0, fmt.Sprintf("rank %d", rank+1))
		}
		checkAborted(t, collective.Barrier(context.Background(), groups[0]), 0, "rank 0 afterwards")
		closeAll(t, groups)
	}
}

// testClosed: closed and absent groups return errors.
func testClosed(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	closeAll(t, groups)
	closeAll(t, groups)
	for i, c := range calls {
		for _, g := range append(groups, nil) {
			if g == nil && strings.HasPrefix(c.text, "AllToAll") {
				continue // the kit's call itself needs a size
			}
			if err := c.call(context.Background(), g); err == nil || errors.Is(err, collective.ErrAborted) {
				t.Fatalf("call %d of a closed or absent group: %v", i, err)
			}
		}
	}
	var none *collective.Group
	none.Abort(nil)
	if none.Close() != nil || none.Size() != 0 || none.Rank() != -1 || none.Generation() != 0 {
		t.Fatal("an absent group")
	}
	one := newGroups(t, 1)
	one[0].Abort(nil)
	if err := collective.Barrier(context.Background(), one[0]); !errors.Is(err, collective.ErrAborted) {
		t.Fatalf("an aborted group of one: %v", err)
	}
}

// testBusy: a second operation at the same time is refused and does not affect the first.
func testBusy(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	errs := make(chan error, 2)
	for range 2 {
		go func() { errs <- collective.Barrier(context.Background(), groups[0]) }()
	}
	if err := <-errs; !errors.Is(err, collective.ErrBusy) {
		t.Fatalf("two at once: %v", err)
	}
	if err := collective.Barrier(context.Background(), groups[1]); err != nil {
		t.Fatal(err)
	}
	if err := <-errs; err != nil {
		t.Fatalf("the first one: %v", err)
	}
}

// testLeaks: generations that end well or by death leave no goroutine.
func testLeaks(t *testing.T, newGroups NewGroups) {
	checkLeaks(t, 200, func(t *testing.T, i int) {
		groups := newGroups(t, 2)
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduce(ctx, g, []int32{1, 2}, collective.Sum)
		}))
		if i%2 == 0 {
			groups[i/2%2].Abort(nil)
		}
		closeAll(t, groups)
	})
}

// checkLeaks checks that n generations, each made and ended by one call of generation, leave no
// goroutine.
func checkLeaks(t *testing.T, n int, generation func(t *testing.T, i int)) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Run("generations", func(t *testing.T) {
		for i := range repeat(n) {
			generation(t, i)
		}
	})
	if err := goleak.Find(before); err != nil {
		t.Fatal(err)
	}
}

// repeat shortens loops for -short and under the race detector, where each iteration takes ten
// times as long.
func repeat(n int) int {
	switch {
	case testing.Short() && brief.Load():
		return Rounds((n + 1) / 2)
	case testing.Short():
		return Rounds(n)
	case short():
		return (n + 3) / 4
	case Raced:
		return (n + 1) / 2
	}
	return n
}

// Rounds returns n, or an eighth of it with -short.
func Rounds(n int) int {
	if testing.Short() {
		return (n + 7) / 8
	}
	return n
}

// sizes returns the sizes of the groups that a test makes: all or, with -short, only some. In
// RunBrief with -short it is the last of some.
func sizes(all []int, some ...int) []int {
	switch {
	case !testing.Short():
		return all
	case brief.Load():
		return some[len(some)-1:]
	}
	return some
}
