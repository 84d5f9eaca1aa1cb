package cuda

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
)

// some returns slices of growing lengths on a device. Every other one begins at an odd element, and
// each is filled with one number.
func some[T collective.Element](t *testing.T, d *Device, n int, number func(i int) T) []*Slice[T] {
	all := make([]*Slice[T], n)
	for i := range all {
		all[i] = vector(t, d, slices.Repeat([]T{number(i)}, 7*i+2)).Slice(i%2, 7*i+2)
	}
	return all
}

// TestFusion: small slices submitted in different orders are reduced together, beside a large slice
// and slices of other types.
func TestFusion(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, n int) {
		const count = 16
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			stream, err := d.NewStream()
			if err != nil {
				return err
			}
			defer stream.Close()
			floats := some(t, d, count, func(i int) float32 { return float32(i + rank) })
			bytes := some(t, d, count, func(i int) int8 { return int8(i - rank) })
			large := vector(t, d, slices.Repeat([]uint8{uint8(rank)}, 1<<20))
			for round := range 3 {
				var handles []*Handle
				handles = append(handles, AllReduceAsync(t.Context(), g, "large", large, collective.Max, Options{}))
				for _, i := range rand.Perm(count) {
					if err := Scale(stream, floats[i], 2); err != nil {
						return err
					}
					handles = append(handles, AllReduceAsync(t.Context(), g, fmt.Sprint("float ", i), floats[i], collective.Average, Options{After: stream}),
						AllReduceAsync(t.Context(), g, fmt.Sprint("byte ", i), bytes[i], collective.Max, Options{}))
				}
				for _, h := range handles {
					if err := h.Wait(); err != nil || !h.Done() {
						return err
					}
				}
				for i := range count {
					// The average of i to i+n-1, doubled in each round.
					want := (float32(i) + float32(n-1)/2) * float32(int(2)<<round)
					for _, got := range values(t, floats[i]) {
						if got < want-0.01 || got > want+0.01 {
							return fmt.Errorf("round %d: float %d is %v, not %v", round, i, got, want)
						}
					}
					if got := values(t, bytes[i]); len(got) > 0 && (got[0] != int8(i) || got[len(got)-1] != int8(i)) {
						return fmt.Errorf("byte %d is %v", i, got[0])
					}
				}
				if got := values(t, large); got[0] != uint8(n-1) || got[len(got)-1] != uint8(n-1) {
					return fmt.Errorf("the large one is %v", got[0])
				}
			}
			return nil
		})
		for rank, f := range w.drivers {
			if launches := f.calls["cuLaunchKernel"] - 3*count; launches > 3*count/2 {
				t.Errorf("rank %d has launched %d kernels for %d slices", rank, launches, 3*count)
			}
		}
	})
}

// TestGrouped: slices that are submitted at once are one operation.
func TestGrouped(t *testing.T) {
	w := newWorld(t, 3, 3, Config{})
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		all := some(t, d, 20, func(i int) int64 { return int64(i * rank) })
		for range 3 {
			if err := GroupedAllReduce(t.Context(), g, "gradients", all, collective.Sum, Options{}); err != nil {
				return err
			}
		}
		for i, s := range all {
			if got := values(t, s); s.Len() > 0 && got[s.Len()-1] != int64(27*i) {
				return fmt.Errorf("%d is %v", i, got)
			}
		}
		return GroupedAllReduce[int8](t.Context(), g, "none", nil, collective.Sum, Options{})
	})
	for rank, f := range w.drivers {
		if f.calls["cuLaunchKernel"] != 3 {
			t.Errorf("rank %d has launched %d kernels", rank, f.calls["cuLaunchKernel"])
		}
	}
}

// TestFuseEmpty: slices that are all empty need no bucket.
func TestFuseEmpty(t *testing.T) {
	w := newWorld(t, 2, 2, Config{})
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		empty := func() *Slice[int64] { return vector(t, d, []int64{int64(rank)}).Slice(0, 0) }
		return GroupedAllReduce(t.Context(), g, "gradients", []*Slice[int64]{empty(), empty(), empty()}, collective.Sum, Options{})
	})
}

// TestNoRoomToFuse: if one rank has no memory for a bucket, all ranks reduce the slices one by one.
func TestNoRoomToFuse(t *testing.T) {
	w := newWorld(t, 3, 3, Config{})
	slicesOf := make([][]*Slice[float64], 3)
	for rank, d := range w.devices {
		slicesOf[rank] = some(t, d, 10, func(i int) float64 { return float64(i) })
	}
	f := w.drivers[2]
	f.mu.Lock()
	f.fault = func(call string) result {
		if call == "cuMemAlloc_v2" && f.calls[call] == 11 {
			return outOfMemory
		}
		return success
	}
	f.mu.Unlock()
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		if err := GroupedAllReduce(t.Context(), g, "gradients", slicesOf[rank], collective.Sum, Options{}); err != nil {
			return err
		}
		if got := values(t, slicesOf[rank][9]); got[0] != 27 {
			return fmt.Errorf("%v", got[0])
		}
		return nil
	})
	for rank, f := range w.drivers {
		if f.calls["cuLaunchKernel"] < 9 {
			t.Errorf("rank %d has launched %d kernels", rank, f.calls["cuLaunchKernel"])
		}
	}
}

// TestFusionFails: if a call fails on one rank while slices are fused, only that rank returns the
// error, and the others are aborted.
func TestFusionFails(t *testing.T) {
	step := 1
	if testing.Short() {
		step = 3
	}
	for name, config := range configs {
		for _, call := range []string{"cuMemAlloc_v2", "cuMemcpyDtoDAsync_v2", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuLaunchKernel",
			"cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"} {
			for at := 0; at < 12; at += step {
				w := newWorld(t, 3, 1, config)
				slicesOf, streams := make([][]*Slice[float32], 3), make([]*Stream, 3)
				for rank, d := range w.devices {
					slicesOf[rank] = some(t, d, 4, func(i int) float32 { return 1 })
					s, err := d.NewStream()
					if err != nil {
						t.Fatal(err)
					}
					streams[rank] = s
				}
				restore := w.drivers[1].failCalls(call, at, math.MaxInt, launchFailed)
				errs := w.each(func(rank int, d *Device, g *collective.Group) error {
					return GroupedAllReduce(t.Context(), g, "gradients", slicesOf[rank], collective.Sum, Options{After: streams[rank]})
				})
				failed := restore()
				for rank, err := range errs {
					switch {
					case !failed && err != nil, failed && rank == 1 && (!errors.Is(err, ErrSticky) || errors.Is(err, collective.ErrAborted)),
						failed && rank != 1 && err != nil && !errors.Is(err, collective.ErrAborted):
						t.Errorf("%s, call %d of %s fails, rank %d: %v", name, at, call, rank, err)
					}
					streams[rank].Close()
				}
				if !failed {
					break
				}
			}
		}
	}
}

// TestFusionHung: a rank can cancel operations although the stream of their slices does not
// continue.
func TestFusionHung(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	w.node.gate = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	streams := make([]*Stream, 2)
	errs := w.each(func(rank int, d *Device, g *collective.Group) error {
		all := some(t, d, 4, func(int) float32 { return 1 })
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		streams[rank] = s
		if err := Scale(s, all[3], 2); err != nil {
			return err
		}
		if rank == 1 {
			return GroupedAllReduce(t.Context(), g, "gradients", all, collective.Sum, Options{After: s})
		}
		time.AfterFunc(10*time.Millisecond, cancel)
		return GroupedAllReduce(ctx, g, "gradients", all, collective.Sum, Options{After: s})
	})
	if !errors.Is(errs[0], context.Canceled) || !errors.Is(errs[1], collective.ErrAborted) {
		t.Error(errs)
	}
	close(w.node.gate)
	for _, s := range streams {
		s.Close()
	}
}

// TestStalled: a warning names a slice that some ranks do not submit.
func TestStalled(t *testing.T) {
	log, hook := logrus.New(), &stalls{told: make(chan string, 100)}
	log.SetOutput(io.Discard)
	log.AddHook(hook)
	w := newWorld(t, 2, 1, Config{})
	w.groups = meetingsWith(t, 2, false, collective.Config{Log: log, StallWarning: 10 * time.Millisecond})()
	defer func() {
		for _, g := range w.groups {
			g.Close()
		}
	}()
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		if rank == 1 {
			if text := <-hook.told; !strings.Contains(text, `"late" has waited for ranks [1]`) {
				return errors.New(text)
			}
		}
		return AllReduceAsync(t.Context(), g, "late", vector(t, d, []int32{1}), collective.Sum, Options{}).Wait()
	})
}

type stalls struct{ told chan string }

func (*stalls) Levels() []logrus.Level { return []logrus.Level{logrus.WarnLevel} }

func (s *stalls) Fire(e *logrus.Entry) error {
	select {
	case s.told <- e.Message:
	default:
	}
	return nil
}
