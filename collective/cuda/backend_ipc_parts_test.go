package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// foreign returns a slice of memory that was not allocated by Alloc, which other ranks cannot open.
func foreign[T collective.Element](t *testing.T, d *Device, v []T) *Slice[T] {
	t.Helper()
	var address uint64
	if err := d.call("cuMemAlloc_v2", func(a *api) result { return a.memAlloc(&address, uint64(len(kernel.Bytes(v)))+1) }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.call("cuMemFree_v2", func(a *api) result { return a.memFree(address) }) })
	s, err := Wrap[T](d, address, len(v))
	if err == nil {
		err = s.CopyFrom(t.Context(), v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSpread: Broadcast and AllGather copy between devices. The vectors of no rank, some ranks or
// all ranks are copied through banks that are smaller than the vectors.
func TestSpread(t *testing.T) {
	defer func(n int) { bankSize = n }(bankSize)
	bankSize = 1000
	const n = 3
	for banked := range 1 << n {
		w := newWorld(t, n, 1+banked%2, Config{})
		place := func(rank int, v []uint64) *Slice[uint64] {
			if banked>>rank&1 == 1 {
				return foreign(t, w.devices[rank], v)
			}
			return vector(t, w.devices[rank], v)
		}
		for _, length := range []int{0, 1, 2, 125, 700} {
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				v := make([]uint64, length)
				for i := range v {
					v[i] = uint64(rank*1000 + i)
				}
				s := place(rank, v)
				for root := range n {
					to := place(rank, v)
					if err := Broadcast(t.Context(), g, to, root); err != nil {
						return err
					}
					for i, got := range values(t, to) {
						if got != uint64(root*1000+i) {
							return fmt.Errorf("from %d: %d at %d", root, got, i)
						}
					}
				}
				all, err := AllGather(t.Context(), g, s.Slice(0, length*rank/n))
				if err != nil {
					return err
				}
				for from, part := range all {
					got := values(t, part)
					if len(got) != length*from/n {
						return fmt.Errorf("%d elements of %d", len(got), from)
					}
					for i := range got {
						if got[i] != uint64(from*1000+i) {
							return fmt.Errorf("of %d: %d at %d", from, got[i], i)
						}
					}
					if err := part.Free(); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
}

// TestParts: ReduceScatter returns the bits of the strict order, with and without banks, and copies
// nothing through the host.
func TestParts(t *testing.T) {
	defer func(n int) { bankSize = n }(bankSize)
	bankSize = 500
	const n = 3
	for _, typ := range []kernel.Type{kernel.BFloat16, kernel.Float32} {
		for banked := range 1 << n {
			w := newWorld(t, n, 1, Config{})
			for i, op := range combinations {
				length := []int{0, 1, 2, 100, 701}[(i+banked)%5]
				r := rand.New(rand.NewPCG(7, uint64(op)))
				var vectors [][]byte
				for range n {
					vectors = append(vectors, fill(r, typ, length))
				}
				want := []byte{}
				if length > 0 {
					want = reduce(typ, op, vectors)
				}
				w.must(t, func(rank int, d *Device, g *collective.Group) error {
					if typ == kernel.BFloat16 {
						return partOf[collective.BFloat16](t, w, rank, banked>>rank&1 == 1, vectors[rank], want, op)
					}
					return partOf[float32](t, w, rank, banked>>rank&1 == 1, vectors[rank], want, op)
				})
			}
		}
	}
}

func partOf[T collective.Element](t *testing.T, w *world, rank int, banked bool, mine, want []byte, op collective.Op) error {
	d, f := w.devices[rank], w.drivers[rank]
	s := vector(t, d, kernel.Elements[T](mine))
	if banked {
		s = foreign(t, d, kernel.Elements[T](mine))
	}
	if _, err := d.backend(t.Context(), w.groups[rank]); err != nil {
		return err
	}
	before := f.downs()
	part, err := ReduceScatter(t.Context(), w.groups[rank], s, op)
	if err != nil {
		return err
	}
	defer part.Free()
	if f.downs() != before {
		return errors.New("it goes over the host")
	}
	lo, hi := kernel.Split(s.Len(), w.groups[rank].Size(), rank)
	if d := differ(typeOf[T](), kernel.Bytes(values(t, part)), want[lo*s.size():hi*s.size()]); d != "" {
		return fmt.Errorf("%v of %d, rank %d: %s", op, s.Len(), rank, d)
	}
	if !slices.Equal(kernel.Bytes(values(t, s)), mine) {
		return errors.New("the slice has changed")
	}
	return nil
}

// TestThroughHost: only reductions of types without kernels are computed on the host.
func TestThroughHost(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	throughHost[float32](t, w, false)
	throughHost[collective.Float16](t, w, false)
	throughHost[int32](t, w, false)
	throughHost[int64](t, w, false)
	throughHost[int8](t, w, true)
	throughHost[int16](t, w, true)
	throughHost[uint8](t, w, true)
	throughHost[uint16](t, w, true)
	throughHost[uint32](t, w, true)
	throughHost[uint64](t, w, true)
}

func throughHost[T collective.Element](t *testing.T, w *world, want bool) {
	t.Helper()
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		s := vector(t, d, make([]T, 64))
		if _, err := d.backend(t.Context(), g); err != nil {
			return err
		}
		for i, reduce := range []func() error{
			func() error { return AllReduce(t.Context(), g, s, collective.Max) },
			func() error {
				part, err := ReduceScatter(t.Context(), g, s, collective.Sum)
				if err != nil {
					return err
				}
				return part.Free()
			},
		} {
			before := w.drivers[rank].downs()
			if err := reduce(); err != nil {
				return err
			}
			if got := w.drivers[rank].downs() > before; got != want {
				return fmt.Errorf("operation %d of %T goes through the host: %v", i, *new(T), got)
			}
			if err := collective.Barrier(t.Context(), g); err != nil {
				return err
			}
		}
		return nil
	})
}

// downs returns how often device memory was copied to the host.
func (f *driver) downs() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls["cuMemcpyDtoHAsync_v2"]
}

// TestSpreadFails: whichever call fails on one rank, that rank returns the error, the others
// succeed or are aborted, and no memory is lost.
func TestSpreadFails(t *testing.T) {
	defer func(n int) { bankSize = n }(bankSize)
	bankSize = 1000
	operations := map[string]func(ctx context.Context, g *collective.Group, s *Slice[int32]) error{
		"Broadcast": func(ctx context.Context, g *collective.Group, s *Slice[int32]) error { return Broadcast(ctx, g, s, 1) },
		"AllGather": func(ctx context.Context, g *collective.Group, s *Slice[int32]) error {
			all, err := AllGather(ctx, g, s)
			for _, part := range all {
				err = errors.Join(err, part.Free())
			}
			return err
		},
		"ReduceScatter": func(ctx context.Context, g *collective.Group, s *Slice[int32]) error {
			part, err := ReduceScatter(ctx, g, s, collective.Sum)
			if err == nil {
				err = part.Free()
			}
			return err
		},
	}
	for name, operation := range operations {
		for _, call := range []string{"cuMemcpyDtoDAsync_v2", "cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuIpcOpenMemHandle_v2", "cuIpcGetMemHandle"} {
			for at := 0; at < 8; at++ {
				if !spreadFails(t, name, call, at, operation) {
					break
				}
			}
		}
	}
}

func spreadFails(t *testing.T, name, call string, at int, operation func(context.Context, *collective.Group, *Slice[int32]) error) bool {
	w := newWorld(t, 3, 1, Config{})
	slicesOf := make([]*Slice[int32], 3)
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		slicesOf[rank] = vector(t, d, make([]int32, 600))
		if rank == 1 {
			slicesOf[rank] = foreign(t, d, make([]int32, 600))
		}
		_, err := d.backend(t.Context(), g)
		return err
	})
	restore := w.drivers[1].failCalls(call, at, math.MaxInt, launchFailed)
	errs := w.each(func(rank int, d *Device, g *collective.Group) error { return operation(t.Context(), g, slicesOf[rank]) })
	failed := restore()
	for rank, err := range errs {
		switch {
		case !failed && err != nil, failed && rank == 1 && !errors.Is(err, ErrSticky),
			failed && rank != 1 && err != nil && !errors.Is(err, collective.ErrAborted):
			t.Errorf("%s, call %d of %s fails, rank %d: %v", name, at, call, rank, err)
		}
	}
	return failed
}

// TestPartsHang: a rank can cancel an operation although its kernel does not end.
func TestPartsHang(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	w.node.gate = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	errs := w.each(func(rank int, d *Device, g *collective.Group) error {
		s := vector(t, d, make([]float64, 100))
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := ReduceScatter(ctx, g, s, collective.Sum)
		return err
	})
	for _, err := range errs {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, collective.ErrAborted) {
			t.Error(errs)
		}
	}
	close(w.node.gate)
}
