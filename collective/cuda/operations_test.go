package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// world is a set of ranks, each a process with its own device.
type world struct {
	node    *node
	drivers []*driver
	devices []*Device
	groups  []*collective.Group
}

// newWorld returns n ranks on the given number of devices, assigned in turn.
func newWorld(t *testing.T, n, devices int, config Config) *world {
	w := &world{node: newNode(t), groups: collective.Local(n)}
	w.node.devices = max(w.node.devices, devices)
	for rank := range n {
		config.Device = rank % devices
		if config.Backend == BackendHosts {
			config.host = fmt.Sprint(rank * 2 / n)
		}
		f := w.node.process()
		w.drivers = append(w.drivers, f)
		w.devices = append(w.devices, open(t, f, config))
	}
	t.Cleanup(func() {
		for _, g := range w.groups {
			g.Abort(errors.New("the test is over"))
		}
	})
	return w
}

// each calls f for all ranks concurrently, and returns their errors.
func (w *world) each(f func(rank int, d *Device, g *collective.Group) error) []error {
	errs := make([]error, len(w.devices))
	var all sync.WaitGroup
	for rank, d := range w.devices {
		all.Go(func() { errs[rank] = f(rank, d, w.groups[rank]) })
	}
	all.Wait()
	return errs
}

// must is each, and fails the test if a rank returns an error.
func (w *world) must(t *testing.T, f func(rank int, d *Device, g *collective.Group) error) {
	t.Helper()
	if err := errors.Join(w.each(f)...); err != nil {
		t.Fatal(err)
	}
}

var configs = map[string]Config{"direct": {}, "hosts": {Backend: BackendHosts}, "staged": {Backend: BackendStaging}}

// eachWay runs a test for every backend in configs, for several numbers of ranks, on one or two
// devices. With -short it runs fewer of these.
func eachWay(t *testing.T, f func(t *testing.T, w *world, n int)) {
	sizes := []struct{ n, devices int }{{1, 1}, {3, 2}, {2, 1}, {4, 1}}
	if testing.Short() {
		sizes = sizes[:2]
	}
	for name, config := range configs {
		for _, c := range sizes {
			t.Run(fmt.Sprintf("%s/%d on %d", name, c.n, c.devices), func(t *testing.T) {
				f(t, newWorld(t, c.n, c.devices, config), c.n)
			})
		}
	}
}

// small returns a number so small that sums and products of a few ranks are exact.
func small(rank, i int) int { return (rank+i*5)%3 + 1 }

func testAllReduce[T collective.Element](t *testing.T, w *world, n, length int, of func(int) T) {
	typ := typeOf[T]()
	var vectors [][]byte
	for rank := range n {
		v := make([]T, length)
		for i := range v {
			v[i] = of(small(rank, i))
		}
		vectors = append(vectors, kernel.Bytes(v))
	}
	for _, op := range combinations {
		var want []byte
		if length > 0 {
			want = reduce(typ, op, vectors)
		}
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s, err := Alloc[T](d, length)
			if err != nil {
				return err
			}
			defer s.Free()
			if err := s.CopyFrom(t.Context(), kernel.Elements[T](vectors[rank])); err != nil {
				return err
			}
			if err := AllReduce(t.Context(), g, s, op); err != nil {
				return err
			}
			got := make([]T, length)
			if err := s.CopyTo(t.Context(), got); err != nil {
				return err
			}
			if d := differ(typ, kernel.Bytes(got), want); d != "" {
				return fmt.Errorf("%v of %d %v, rank %d: %s", op, length, typ, rank, d)
			}
			return nil
		})
	}
}

func TestAllReduce(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, n int) {
		length := 1234
		if w.devices[0].config.Backend != "" {
			length = pieceSize/4 + 5
		}
		testAllReduce(t, w, n, length, func(i int) float32 { return float32(i) })
		if n != 3 {
			return
		}
		for _, length := range []int{0, 1, 333} {
			testAllReduce(t, w, n, length, func(i int) float32 { return float32(i) })
			testAllReduce(t, w, n, length, func(i int) float64 { return float64(i) })
			testAllReduce(t, w, n, length, func(i int) int8 { return int8(i) })
			testAllReduce(t, w, n, length, func(i int) uint64 { return uint64(i) })
			testAllReduce(t, w, n, length, func(i int) int32 { return int32(-i) })
			testAllReduce(t, w, n, length, func(i int) int64 { return int64(-i) })
			testAllReduce(t, w, n, length, func(i int) collective.Float16 { return collective.ToFloat16(float32(i)) })
			testAllReduce(t, w, n, length, func(i int) collective.BFloat16 { return collective.ToBFloat16(float32(i)) })
		}
	})
}

// TestAnyBits: with the direct backend all ranks have the bits of the strict order, including NaNs.
// Only the first rank of each device launches kernels.
func TestAnyBits(t *testing.T) {
	const n, length = 4, 1001
	for _, devices := range []int{1, 2, n} {
		w := newWorld(t, n, devices, Config{})
		for _, op := range combinations {
			r := rand.New(rand.NewPCG(5, uint64(op)))
			var vectors [][]byte
			for range n {
				vectors = append(vectors, fill(r, kernel.BFloat16, length))
			}
			want := reduce(kernel.BFloat16, op, vectors)
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				s := vector(t, d, kernel.Elements[collective.BFloat16](vectors[rank]))
				if err := AllReduce(t.Context(), g, s, op); err != nil {
					return err
				}
				if d := differ(kernel.BFloat16, kernel.Bytes(values(t, s)), want); d != "" {
					return fmt.Errorf("%v, rank %d of %d on %d devices: %s", op, rank, n, devices, d)
				}
				return nil
			})
		}
		for rank, f := range w.drivers {
			launches := 0
			if rank < devices {
				launches = len(combinations)
			}
			if f.calls["cuLaunchKernel"] != launches || f.calls["cuIpcOpenMemHandle_v2"] < n-1 {
				t.Errorf("rank %d of %d on %d devices has launched %d kernels", rank, n, devices, f.calls["cuLaunchKernel"])
			}
		}
	}
}

// TestLarge reduces vectors of several pieces.
func TestLarge(t *testing.T) {
	n, length := 2, 2*pieceSize+5
	w := newWorld(t, n, 1, Config{Backend: BackendStaging})
	want := make([]uint8, length)
	for i := range want {
		want[i] = uint8(i*7) * 3
	}
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		v := make([]uint8, length)
		for i := range v {
			v[i] = uint8(i*7) * uint8(rank+1)
		}
		s := vector(t, d, v)
		if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
			return err
		}
		if !bytes.Equal(values(t, s), want) {
			return fmt.Errorf("rank %d has a wrong sum", rank)
		}
		part, err := ReduceScatter(t.Context(), g, s, collective.Max)
		if err != nil {
			return err
		}
		defer part.Free()
		lo, hi := kernel.Split(length, n, rank)
		if !bytes.Equal(values(t, part), want[lo:hi]) {
			return fmt.Errorf("rank %d has a wrong part", rank)
		}
		return nil
	})
}

// TestWrapped: foreign memory is copied through a bank, and the slices of other ranks are opened.
func TestWrapped(t *testing.T) {
	const n, length = 3, 1000
	w := newWorld(t, n, 1, Config{})
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		s := vector(t, d, slices.Repeat([]float32{float32(rank)}, length))
		if rank > 0 {
			wrapped := foreign(t, d, make([]float32, length))
			if err := wrapped.CopySlice(t.Context(), s); err != nil {
				return err
			}
			s = wrapped
		}
		for i := range 2 {
			if err := AllReduce(t.Context(), g, s.Slice(1, length), collective.Sum); err != nil {
				return err
			}
			got, want := values(t, s), slices.Repeat([]float32{float32(3 + 6*i)}, length)
			want[0] = float32(rank)
			if !slices.Equal(got, want) {
				return fmt.Errorf("rank %d has %v %v", rank, got[:2], want[:2])
			}
		}
		return nil
	})
}

func TestOthers(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, n int) {
		for _, length := range []int{0, 1, 5, 700} {
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				v := make([]int16, length)
				for i := range v {
					v[i] = int16(rank*1000 + i)
				}
				s := vector(t, d, v)
				part, err := ReduceScatter(t.Context(), g, s, collective.Max)
				if err != nil {
					return err
				}
				defer part.Free()
				lo, hi := kernel.Split(length, n, rank)
				for i, got := range values(t, part) {
					if part.Len() != hi-lo || got != int16((n-1)*1000+lo+i) {
						return fmt.Errorf("part %d is %v", rank, values(t, part))
					}
				}
				all, err := AllGather(t.Context(), g, s.Slice(0, length*rank/n))
				if err != nil {
					return err
				}
				for from, part := range all {
					if part.Len() != length*from/n || part.Len() > 0 && values(t, part)[0] != int16(from*1000) {
						return fmt.Errorf("rank %d gathers %d from %d", rank, part.Len(), from)
					}
					if err := part.Free(); err != nil {
						return err
					}
				}
				if err := Broadcast(t.Context(), g, s, n-1); err != nil {
					return err
				}
				for i, got := range values(t, s) {
					if got != int16((n-1)*1000+i) {
						return fmt.Errorf("rank %d has %d at %d", rank, got, i)
					}
				}
				return nil
			})
		}
	})
}

// TestRefused: wrong arguments of all ranks, and calls that do not match those of other ranks, are
// errors on all ranks. The group remains usable.
func TestRefused(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	for what, f := range map[string]func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error{
		"lengths": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return AllReduce(ctx, g, s.Slice(0, rank+1), collective.Sum)
		},
		"Adasum": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return AllReduce(ctx, g, s, collective.Adasum)
		},
		"parts of Adasum": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			_, err := ReduceScatter(ctx, g, s, collective.Adasum)
			return err
		},
		"a root": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return Broadcast(ctx, g, s, 2)
		},
		"Adasum on one rank": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return AllReduce(ctx, g, s, []collective.Op{collective.Sum, collective.Adasum}[rank])
		},
		"two operations": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return AllReduce(ctx, g, s, []collective.Op{collective.Sum, collective.Max}[rank])
		},
		"parts on one rank": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			if rank == 0 {
				return AllReduce(ctx, g, s, collective.Sum)
			}
			_, err := ReduceScatter(ctx, g, s, collective.Sum)
			return err
		},
		"a root on one rank": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return Broadcast(ctx, g, s, 2*rank)
		},
		"types of AllGather": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			if rank == 0 {
				_, err := AllGather(ctx, g, s)
				return err
			}
			_, err := AllGather(ctx, g, &Slice[int16]{device: s.device, address: s.address, n: s.n})
			return err
		},
		"no group": func(ctx context.Context, rank int, g *collective.Group, s *Slice[float32]) error {
			return AllReduceAsync(ctx, nil, "s", s, collective.Sum, Options{}).Wait()
		},
	} {
		for rank, err := range w.each(func(rank int, d *Device, g *collective.Group) error {
			return f(t.Context(), rank, g, vector(t, d, make([]float32, 4)))
		}) {
			if err == nil || errors.Is(err, collective.ErrAborted) {
				t.Errorf("%s, rank %d: %v", what, rank, err)
			}
		}
	}
	w.must(t, func(rank int, d *Device, g *collective.Group) error { return collective.Barrier(t.Context(), g) })
}

// TestFailureOnOneRank: whatever call fails on one rank, and whenever, the others succeed or are
// aborted, and nothing is lost.
func TestFailureOnOneRank(t *testing.T) {
	for name, config := range configs {
		calls := map[string]int{}
		for _, call := range []string{"", "cuMemAlloc_v2", "cuStreamCreate", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2",
			"cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuModuleLoadDataEx", "cuIpcGetMemHandle"} {
			for at := 0; at < max(1, calls[call]); at += max(1, calls[call]-1) {
				w := newWorld(t, 3, 1, config)
				slicesOf := make([]*Slice[float32], 3)
				for rank, d := range w.devices {
					slicesOf[rank] = vector(t, d, make([]float32, 1000))
				}
				broken := w.drivers[1]
				broken.mu.Lock()
				before := maps.Clone(broken.calls)
				broken.mu.Unlock()
				restore := broken.failCalls(call, at, math.MaxInt, launchFailed)
				errs := w.each(func(rank int, d *Device, g *collective.Group) error {
					return AllReduce(t.Context(), g, slicesOf[rank], collective.Sum)
				})
				broken.mu.Lock()
				if call == "" {
					for c, n := range broken.calls {
						calls[c] = n - before[c]
					}
				}
				broken.mu.Unlock()
				failed := restore()
				for rank, err := range errs {
					switch {
					case !failed && err != nil, failed && rank == 1 && !errors.Is(err, ErrSticky),
						failed && rank != 1 && err != nil && !errors.Is(err, collective.ErrAborted):
						t.Errorf("%s, call %d of %s fails, rank %d: %v", name, at, call, rank, err)
					}
				}
			}
		}
	}
}

// TestHung: a rank can cancel an operation although the device does not continue. Memory that the
// device still uses is not touched.
func TestHung(t *testing.T) {
	for name, config := range configs {
		w := newWorld(t, 2, 1, config)
		w.node.gate = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		streams := make([]*Stream, 2)
		errs := w.each(func(rank int, d *Device, g *collective.Group) error {
			s := vector(t, d, make([]float32, 1000))
			var o Options
			if rank == 0 {
				stream, err := d.NewStream()
				if err != nil {
					return err
				}
				if err := Scale(stream, s, 2); err != nil {
					return err
				}
				streams[0], o.After = stream, stream
			}
			if rank == 1 {
				return AllReduceAsync(t.Context(), g, "s", s, collective.Sum, o).Wait()
			}
			h := AllReduceAsync(ctx, g, "s", s, collective.Sum, o)
			cancel()
			return h.Wait()
		})
		if !errors.Is(errs[0], context.Canceled) || !errors.Is(errs[1], collective.ErrAborted) {
			t.Errorf("%s: %v", name, errs)
		}
		close(w.node.gate)
		streams[0].Close()
	}
}

// TestAsync: asynchronous operations run beside others, in order, after the work in a stream.
func TestAsync(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, n int) {
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			stream, err := d.NewStream()
			if err != nil {
				return err
			}
			defer stream.Close()
			var handles []*Handle
			var all []*Slice[float32]
			for i := range 10 {
				s := vector(t, d, slices.Repeat([]float32{float32(i)}, 100*i))
				if err := Scale(stream, s, 2); err != nil {
					return err
				}
				all = append(all, s)
				handles = append(handles, AllReduceAsync(t.Context(), g, fmt.Sprint("s", i), s, collective.Sum, Options{After: stream}))
				if i%3 == 0 {
					if err := collective.Barrier(t.Context(), g); err != nil {
						return err
					}
				}
			}
			for i, h := range handles {
				if err := h.Wait(); err != nil || !h.Done() {
					return fmt.Errorf("operation %d: %w", i, err)
				}
				if !slices.Equal(values(t, all[i]), slices.Repeat([]float32{float32(2 * i * n)}, 100*i)) {
					return fmt.Errorf("operation %d gives %v", i, values(t, all[i])[:1])
				}
			}
			return nil
		})
	})
}

// TestCloseWaits: a device is closed after its asynchronous operations.
func TestCloseWaits(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	all := make([]*Slice[float32], 2)
	for rank, d := range w.devices {
		all[rank] = vector(t, d, make([]float32, 5000))
	}
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		h := AllReduceAsync(t.Context(), g, "first", all[rank], collective.Sum, Options{})
		second := AllReduceAsync(t.Context(), g, "second", all[rank], collective.Sum, Options{})
		for _, h := range []*Handle{h, second} {
			if err := h.Wait(); err != nil {
				return err
			}
		}
		return all[rank].Free()
	})
	w.must(t, func(rank int, d *Device, g *collective.Group) error { return d.Close() })
}
