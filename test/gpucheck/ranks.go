package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/plan"
)

// ranks returns a check of n ranks on one device with one backend: correct results, and times.
func ranks(n int, backend string) func(context.Context, *options) ([]figure, error) {
	return func(ctx context.Context, o *options) ([]figure, error) {
		var env []string
		if backend == cuda.BackendNCCL {
			env = sharing()
		}
		answers, err := crew(ctx, o, n, "exchange", backend, env...)
		if err != nil {
			return nil, err
		}
		return speedFigures(o, n, backend, answers), nil
	}
}

// sharing returns the environment in which NCCL permits several ranks on one device.
func sharing() []string {
	env := []string{plan.EnvNCCLShared + "=1"}
	if os.Getenv("NCCL_MAX_CTAS") == "" { // the kernels of all ranks must fit on the device together
		env = append(env, "NCCL_MAX_CTAS=8")
	}
	return env
}

// speed is the time that an AllReduce of Bytes bytes takes on a rank.
type speed struct {
	Bytes         int
	Median, Worst float64 // seconds
}

// speedFigures returns the figures of the slowest rank.
func speedFigures(o *options, n int, backend string, answers []answer) []figure {
	var all []figure
	for i, s := range answers[0].Speeds {
		for _, a := range answers {
			s.Median, s.Worst = max(s.Median, a.Speeds[i].Median), max(s.Worst, a.Speeds[i].Worst)
		}
		rate := float64(s.Bytes) / s.Median
		if s.Bytes <= 4<<10 {
			f := figure{Name: size(s.Bytes) + ", median", Value: s.Median * 1e6, Unit: "us"}
			if backend == cuda.BackendIPC {
				f = f.judged(o, "< 60 us", s.Median < 60e-6)
			}
			all = append(all, f, figure{Name: size(s.Bytes) + ", worst", Value: s.Worst * 1e6, Unit: "us"})
			continue
		}
		all = append(all, figure{Name: size(s.Bytes), Value: rate / 1e9, Unit: "GB/s"})
		if o.Copy == 0 || i < len(answers[0].Speeds)-1 {
			continue
		}
		share := rate / (o.Copy / float64(2*n))
		f := figure{Name: fmt.Sprintf("%s, share of the bound B/(2n), n = %d", size(s.Bytes), n), Value: share}
		if least, there := map[int]float64{2: 0.6, 4: 0.5}[n]; there && backend == cuda.BackendIPC {
			f = f.judged(o, fmt.Sprintf(">= %.1f", least), share >= least)
		}
		all = append(all, f)
	}
	return all
}

func size(bytes int) string {
	if bytes < 1<<20 {
		return fmt.Sprintf("%d KiB", bytes>>10)
	}
	return fmt.Sprintf("%d MiB", bytes>>20)
}

// exchange is the task: it checks results first, then measures times.
func (s *seat) exchange(ctx context.Context, a *answer) error {
	g, err := s.meet(ctx, 1)
	if err != nil {
		return err
	}
	defer g.Close()
	if err := s.settle(ctx, g); err != nil {
		return err
	}
	for _, e := range []struct {
		t kernel.Type
		f func(context.Context, *seat, *collective.Group, kernel.Type) error
	}{{kernel.Float32, results[float32]}, {kernel.Float64, results[float64]}, {kernel.Int32, results[int32]}, {kernel.Int64, results[int64]},
		{kernel.Float16, results[collective.Float16]}, {kernel.BFloat16, results[collective.BFloat16]}} {
		if err := e.f(ctx, s, g, e.t); err != nil {
			return err
		}
	}
	if err := s.grouped(ctx, g); err != nil {
		return err
	}
	a.Speeds, err = s.measure(ctx, g)
	return err
}

// grouped checks that slices reduced together, some of them fused, have the values that a stream
// has written.
func (s *seat) grouped(ctx context.Context, g *collective.Group) (err error) {
	stream, err := s.device.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	count := 40
	if s.Options.Quick {
		count = 12
	}
	var all []*cuda.Slice[float32]
	defer func() {
		for _, v := range all {
			err = errors.Join(err, v.Free())
		}
	}()
	for i := range count {
		v, err := cuda.Alloc[float32](s.device, 1+i*i*977)
		if err != nil {
			return err
		}
		all = append(all, v)
		if err := v.CopyFrom(ctx, slices.Repeat([]float32{float32(s.Rank + i)}, v.Len())); err != nil {
			return err
		}
		if err := cuda.Scale(stream, v, 2); err != nil {
			return err
		}
	}
	if err := cuda.GroupedAllReduce(ctx, g, "grouped", all, collective.Sum, cuda.Options{After: stream}); err != nil {
		return err
	}
	for i, v := range all {
		want := slices.Repeat([]float32{float32(s.Size*(s.Size-1) + 2*i*s.Size)}, v.Len())
		if err := holds(ctx, kernel.Float32, fmt.Sprintf("slice %d of GroupedAllReduce", i), v, bytesOf(want)); err != nil {
			return err
		}
	}
	return nil
}

// settle waits until the requested backend is in use: creating NCCL's communicators takes time.
func (s *seat) settle(ctx context.Context, g *collective.Group) error {
	v, err := cuda.Alloc[float32](s.device, 1000)
	if err != nil {
		return err
	}
	defer v.Free()
	for end := time.Now().Add(30 * time.Second); ; {
		err := cuda.AllReduce(ctx, g, v, collective.Sum)
		var no *cuda.BackendError
		if errors.As(err, &no) && s.Backend == cuda.BackendNCCL {
			return skipped{no.Reason}
		}
		if err != nil {
			return err
		}
		state := []int32{0, 0} // in use; too late
		if s.backend() == s.Backend {
			state[0] = 1
		}
		if time.Now().After(end) {
			state[1] = 1
		}
		if err := collective.Broadcast(ctx, g, state, 0); err != nil { // only rank 0 receives reports of backends
			return err
		}
		if state[0] == 1 {
			return nil
		}
		if state[1] == 1 {
			return fmt.Errorf("rank 0 has not come to the backend %q within half a minute", s.Backend)
		}
	}
}

// results compares the results of collectives for a type with the reference.
func results[T collective.Element](ctx context.Context, s *seat, g *collective.Group, t kernel.Type) error {
	some := fill
	if s.Backend == cuda.BackendNCCL { // NCCL's order of sums differs
		some = exact
	}
	lengths := []int{1, 7, 1000, 100_003, 1<<20 + 1}
	if s.Options.Quick {
		lengths = []int{1, 7, 1001}
	}
	room, err := cuda.Alloc[T](s.device, lengths[len(lengths)-1]+3)
	if err != nil {
		return err
	}
	defer room.Free()
	for round, n := range lengths {
		r := rand.New(rand.NewPCG(uint64(t), uint64(n)))
		var vectors [][]byte
		for range s.Size {
			vectors = append(vectors, some(r, t, n))
		}
		at := (round + s.Rank) % 4 // a different alignment on each rank
		v := room.Slice(at, at+n)
		for _, c := range reductions {
			if err := v.CopyFrom(ctx, elements[T](vectors[s.Rank])); err != nil {
				return err
			}
			if err := cuda.AllReduce(ctx, g, v, c.op); err != nil {
				return err
			}
			if err := holds(ctx, t, fmt.Sprintf("%v of %d ranks", c.op, s.Size), v, reduce(t, c.op, vectors)); err != nil {
				return err
			}
		}
		if err := others[T](ctx, s, g, t, v, vectors); err != nil {
			return err
		}
	}
	return nil
}

// others checks the collectives other than AllReduce.
func others[T collective.Element](ctx context.Context, s *seat, g *collective.Group, t kernel.Type, v *cuda.Slice[T], vectors [][]byte) error {
	if err := v.CopyFrom(ctx, elements[T](vectors[s.Rank])); err != nil {
		return err
	}
	part, err := cuda.ReduceScatter(ctx, g, v, collective.Sum)
	if err != nil {
		return err
	}
	lo, hi := kernel.Split(v.Len(), s.Size, s.Rank)
	sum := reduce(t, collective.Sum, vectors)
	if err := errors.Join(holds(ctx, t, "ReduceScatter", part, sum[lo*t.Size():hi*t.Size()]), part.Free()); err != nil {
		return err
	}
	all, err := cuda.AllGather(ctx, g, v.Slice(0, max(0, v.Len()-s.Rank)))
	if err != nil {
		return err
	}
	for rank, of := range all {
		want := vectors[rank][:max(0, v.Len()-rank)*t.Size()]
		if err := errors.Join(holds(ctx, t, fmt.Sprintf("rank %d of AllGather", rank), of, want), of.Free()); err != nil {
			return err
		}
	}
	if err := cuda.Broadcast(ctx, g, v, s.Size-1); err != nil {
		return err
	}
	return holds(ctx, t, "Broadcast", v, vectors[s.Size-1])
}

// holds reports whether a vector has these bits.
func holds[T collective.Element](ctx context.Context, t kernel.Type, what string, v *cuda.Slice[T], want []byte) error {
	got := make([]T, v.Len())
	if err := v.CopyTo(ctx, got); err != nil {
		return err
	}
	return same(t, what, bytesOf(got), want)
}

// measure times AllReduces of float32s.
func (s *seat) measure(ctx context.Context, g *collective.Group) ([]speed, error) {
	sizes, budget := []int{4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20}, 1.0
	if s.Options.Quick {
		sizes, budget = []int{4 << 10, 256 << 10}, 0.01
	}
	v, err := cuda.Alloc[float32](s.device, sizes[len(sizes)-1]/4)
	if err != nil {
		return nil, err
	}
	defer v.Free()
	var all []speed
	for _, bytes := range sizes {
		part := v.Slice(0, bytes/4)
		once := func() (float64, error) {
			began := time.Now()
			err := cuda.AllReduce(ctx, g, part, collective.Average)
			return time.Since(began).Seconds(), err
		}
		var warm [3]float64
		for i := range warm {
			if warm[i], err = once(); err != nil {
				return nil, err
			}
		}
		count := []int64{int64(min(max(budget/warm[len(warm)-1], 5), 2000))}
		if err := collective.Broadcast(ctx, g, count, 0); err != nil {
			return nil, err
		}
		times := make([]float64, count[0])
		for i := range times {
			if times[i], err = once(); err != nil {
				return nil, err
			}
		}
		slices.Sort(times)
		all = append(all, speed{bytes, times[len(times)/2], times[len(times)-1]})
	}
	return all, nil
}
