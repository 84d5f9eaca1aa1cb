package shm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// gathering returns n members in one process. If the layout is nil it is the usual one.
func gathering(tb testing.TB, n int, l *layout) []*Member {
	tb.Helper()
	if l == nil {
		usual := newLayout(n)
		l = &usual
	}
	s, err := create(*l)
	if err != nil {
		tb.Fatal(err)
	}
	members := make([]*Member, n)
	for i := range members {
		mine := s
		if i > 0 {
			if mine, err = Open(s.Invitation(), n); err != nil {
				tb.Fatal(err)
			}
		}
		if members[i], err = mine.Join(i, func(j int) { tb.Errorf("member %d takes %d for dead", i, j) }); err != nil {
			tb.Fatal(err)
		}
	}
	return members
}

func leave(tb testing.TB, members []*Member) {
	tb.Helper()
	for _, m := range members {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	}
}

// each runs f for all members concurrently.
func each(members []*Member, f func(m *Member) error) []error {
	errs := make([]error, len(members))
	var wait sync.WaitGroup
	for i, m := range members {
		wait.Go(func() { errs[i] = f(m) })
	}
	wait.Wait()
	return errs
}

func eachMust(tb testing.TB, members []*Member, f func(m *Member) error) {
	tb.Helper()
	for i, err := range each(members, f) {
		if err != nil {
			tb.Fatalf("member %d: %v", i, err)
		}
	}
}

// small returns a layout with which a few thousand bytes are enough to use all paths.
func small(members int) *layout {
	return &layout{members: members, bank: 128, out: 192, in: 192 * members}
}

// sizes returns sizes around the thresholds of the small layout for this number of members.
func sizes(members int) []int {
	list := []int{0, 1, 2, 3, 39, 40, 41, 64, 127, 128, 129, 191, 192, 193}
	for _, rounds := range []int{1, 2, 3, 9} {
		n := 192 * members * rounds
		list = append(list, n-8, n-1, n, n+1, n+192+24)
	}
	return list
}

// random returns random elements of a type, without NaNs.
func random(r *rand.Rand, t kernel.Type, count int) []byte {
	b := aligned(count * t.Size())
	switch t {
	case kernel.Float32:
		for i := range count {
			*(*float32)(unsafe.Pointer(&b[4*i])) = r.Float32()*2 - 1
		}
	case kernel.Float64:
		for i := range count {
			*(*float64)(unsafe.Pointer(&b[8*i])) = r.Float64()*2 - 1
		}
	case kernel.Float16, kernel.BFloat16:
		for i := range count {
			*(*uint16)(unsafe.Pointer(&b[2*i])) = 0x3c00 + uint16(r.IntN(0x300)) | uint16(r.IntN(2))<<15
		}
	default:
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	return b
}

func aligned(n int) []byte {
	words := make([]uint64, n/8+1)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}

func clone(b []byte) []byte { return append(aligned(0), b...) }

type reduction struct {
	t kernel.Type
	Reduction
	name string
}

func reductions(members int) []reduction {
	var list []reduction
	for _, t := range []kernel.Type{kernel.Float32, kernel.Float64, kernel.Int8, kernel.Uint16, kernel.Int64, kernel.BFloat16} {
		for _, op := range []kernel.Op{kernel.Sum, kernel.Max} {
			list = append(list, reduction{t: t, name: fmt.Sprintf("%d/%d", t, op),
				Reduction: Reduction{Size: t.Size(), Combine: kernel.Combine(t, op)}})
		}
	}
	list = append(list, reduction{t: kernel.Float32, name: "average", Reduction: Reduction{Size: 4,
		Combine: kernel.Combine(kernel.Float32, kernel.Sum), Finish: func(b []byte) { kernel.Divide(kernel.Float32)(b, members) }}})
	list = append(list, reduction{t: kernel.Float16, name: "mean", Reduction: Reduction{Size: 2, Combine: kernel.Combine(kernel.Float16, kernel.Sum),
		Mean: func(dst []byte, operands [][]byte) { kernel.Mean(kernel.Float16, dst, operands, nil, len(operands)) }}})
	return list
}

// expected returns the result of a reduction in the order of the members.
func expected(inputs [][]byte, r *Reduction) []byte {
	sum := clone(inputs[0])
	if r.Mean != nil {
		r.Mean(sum, inputs)
		return sum
	}
	for _, b := range inputs[1:] {
		r.Combine(sum, sum, b)
	}
	if r.Finish != nil {
		r.Finish(sum)
	}
	return sum
}

// dawdle yields a random number of times, so that other members can overtake.
func dawdle(r *rand.Rand) {
	for range r.IntN(3) * r.IntN(20) {
		runtime.Gosched()
	}
}

var background = context.Background()

func TestMain(m *testing.M) {
	if role := os.Getenv("SHM_TEST_ROLE"); role != "" {
		os.Exit(play(role))
	}
	os.Exit(m.Run())
}

// within calls f. If f has not returned shortly before the time limit of the run, it ends the whole
// test program with all stacks, because a member that hangs cannot be stopped.
func within(tb testing.TB, f func()) {
	tb.Helper()
	timer := time.AfterFunc(time.Until(sandbox.Limit()), func() { panic(tb.Name() + " hangs") })
	defer timer.Stop()
	f()
}

func wantErr(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("error %v, not %v", err, want)
	}
}
