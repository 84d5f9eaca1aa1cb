package cuda

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/plan"
)

// ncclLibrary builds the NCCL of testdata beside a driver, and returns its path. Ranks may share a
// device. When the test ends, no file of a communicator or of device memory may be left in the
// folder, and the fakes must not have recorded a forbidden call.
func ncclLibrary(t *testing.T, driver string, flags ...string) string {
	t.Helper()
	folder := filepath.Dir(driver)
	path := cudatest.NCCL(t, driver, flags...)
	t.Setenv(plan.EnvNCCLShared, "1")
	t.Cleanup(func() {
		if text, err := os.ReadFile(filepath.Join(folder, "wrong")); err == nil {
			t.Errorf("what no program may do:\n%s", text)
		}
		for _, pattern := range []string{"live.*", "comm.*", "[0-9]*"} {
			if left, _ := filepath.Glob(filepath.Join(folder, pattern)); len(left) > 0 {
				t.Errorf("left over: %v", left)
			}
		}
	})
	return path
}

// fault sets what fails in the fake from now on; empty: nothing.
func fault(t *testing.T, library, what string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(library), "fault")
	err := os.WriteFile(path+".new", []byte(what), 0o600)
	if err = errors.Join(err, os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// ncclWorld is a world of ranks that are threads of this process and share one driver, written in
// C.
type ncclWorld struct {
	world
	path  string
	meet  func(members ...int) []*collective.Group // a new generation
	lines *logtest.Hook
	told  func() []string // reports of backends

	losing func() // not nil: lose calls it once all ranks use NCCL
}

func newNCCLWorld(t *testing.T, n int, config Config) *ncclWorld {
	if config.Library == "" {
		config.Library = cudatest.Library(t)
		config.NCCL = ncclLibrary(t, config.Library)
	}
	log, lines := logtest.NewNullLogger()
	var mu sync.Mutex
	var told []string
	w := &ncclWorld{path: config.NCCL, lines: lines, told: func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(told)
	}}
	w.meet = chosen(t, n, collective.Config{Log: log, Backend: func(generation uint64, name string) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, fmt.Sprint(generation, " ", name))
	}})
	for range n {
		d, err := Open(config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		w.devices = append(w.devices, d)
	}
	t.Cleanup(w.leave)
	return w
}

// chosen returns a function that connects some of n endpoints in a new generation.
func chosen(t *testing.T, n int, config collective.Config) func(members ...int) []*collective.Group {
	t.Helper()
	endpoints := listen(t, n, config)
	generation := uint64(0)
	return func(members ...int) []*collective.Group {
		generation++
		var addrs [][]string
		for _, m := range members {
			addrs = append(addrs, endpoints[m].Addrs())
		}
		groups, errs := make([]*collective.Group, n), make([]error, n)
		var all sync.WaitGroup
		for rank, m := range members {
			all.Go(func() {
				groups[m], errs[m] = endpoints[m].Connect(t.Context(), collective.Peers{Key: dataKey, Generation: generation, Rank: rank, Addrs: addrs})
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		return groups
	}
}

// enter leaves the current generation, and connects a new one of the given ranks.
func (w *ncclWorld) enter(members ...int) {
	w.leave()
	w.groups = w.meet(members...)
}

func (w *ncclWorld) leave() {
	var all sync.WaitGroup
	for _, g := range w.groups {
		all.Go(func() { g.Close() })
	}
	all.Wait()
}

// members calls f for all ranks of the current world concurrently.
func (w *ncclWorld) members(f func(i int, d *Device, g *collective.Group) error) []error {
	return w.each(func(i int, d *Device, g *collective.Group) error {
		if g == nil {
			return nil
		}
		return f(i, d, g)
	})
}

// sum reduces a vector of ones and checks the result.
func sum(t *testing.T, d *Device, g *collective.Group, n int) error {
	s, err := Alloc[float32](d, n)
	if err != nil {
		return err
	}
	defer s.Free()
	if err := s.CopyFrom(t.Context(), slices.Repeat([]float32{1}, n)); err != nil {
		return err
	}
	if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
		return err
	}
	for i, got := range values(t, s) {
		if got != float32(g.Size()) {
			return fmt.Errorf("element %d is %v", i, got)
		}
	}
	return nil
}

// sums calls sum on all ranks.
func (w *ncclWorld) sums(t *testing.T) {
	t.Helper()
	if err := errors.Join(w.members(func(_ int, d *Device, g *collective.Group) error { return sum(t, d, g, 1000) })...); err != nil {
		t.Fatal(err)
	}
}

// settle waits until no communicator of a rank is being made or ended. The ranks do not use the
// communicators before their next operation.
func (w *ncclWorld) settle(t *testing.T) {
	t.Helper()
	for i, d := range w.devices {
		if w.groups[i] != nil {
			d.formed(t, w.groups[i])
		}
	}
}

// formed waits until a rank's communicator is ready or has failed, or until its end is complete.
// Its thread does nothing else before that.
func (d *Device) formed(t *testing.T, g *collective.Group) {
	for s := d.pending(g); s == commForming || s == commEnding; s = d.pending(g) {
		d.ncclBackendOf(g).comm.thread.do(t.Context(), func() error { return nil })
	}
}

// ready makes all ranks use NCCL.
func (w *ncclWorld) ready(t *testing.T) {
	t.Helper()
	w.sums(t)
	w.settle(t)
	w.sums(t)
	w.expect(t, BackendNCCL)
}

// expect checks which backend all ranks use.
func (w *ncclWorld) expect(t *testing.T, name string) {
	t.Helper()
	for i, d := range w.devices {
		if w.groups[i] == nil {
			continue
		}
		b, err := d.backend(t.Context(), w.groups[i])
		if err != nil || b.name() != name {
			t.Fatalf("rank %d: %v, not %s: %v", i, b.name(), name, err)
		}
	}
}

// TestNCCL tests every type and operation in worlds of several sizes.
func TestNCCL(t *testing.T) {
	for n := 2; n <= 4; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := newNCCLWorld(t, n, Config{})
			w.enter([]int{0, 1, 2, 3}[:n]...)
			w.ready(t)
			for _, length := range []int{1, 20_011} {
				testAllReduce(t, &w.world, n, length, func(i int) float32 { return float32(i) })
			}
			testAllReduce(t, &w.world, n, 77, func(i int) float64 { return float64(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) int8 { return int8(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) uint8 { return uint8(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) int16 { return int16(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) uint32 { return uint32(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) uint64 { return uint64(i) })
			testAllReduce(t, &w.world, n, 77, func(i int) int32 { return int32(-i) })
			testAllReduce(t, &w.world, n, 77, func(i int) int64 { return int64(-i) })
			testAllReduce(t, &w.world, n, 77, func(i int) collective.Float16 { return collective.ToFloat16(float32(i)) })
			testAllReduce(t, &w.world, n, 77, func(i int) collective.BFloat16 { return collective.ToBFloat16(float32(i)) })
			w.must(t, func(rank int, d *Device, g *collective.Group) error { return others(t, rank, n, d, g) })
			w.expect(t, BackendNCCL)
		})
	}
}

// TestNCCLAsync: asynchronous operations have their own communicator, beside that of the other
// operations. In a new world both are made from those of the previous one.
func TestNCCLAsync(t *testing.T) {
	w := newNCCLWorld(t, 3, Config{})
	made := filepath.Join(filepath.Dir(w.path), "made")
	for _, c := range []struct {
		members []int
		want    string
	}{{[]int{0, 1, 2}, "init"}, {[]int{0, 2}, "shrink"}} {
		os.Remove(made)
		w.enter(c.members...)
		round := func() {
			t.Helper()
			if err := errors.Join(w.members(func(_ int, d *Device, g *collective.Group) error {
				s := vector(t, d, slices.Repeat([]float32{1}, 500))
				defer s.Free()
				h := AllReduceAsync(t.Context(), g, "s", s, collective.Sum, Options{})
				err := sum(t, d, g, 1000)
				if err := errors.Join(err, h.Wait()); err != nil {
					return err
				}
				if got := values(t, s); got[0] != float32(g.Size()) || got[499] != got[0] {
					return fmt.Errorf("%v", got[:1])
				}
				return nil
			})...); err != nil {
				t.Fatal(err)
			}
		}
		all := func() bool { // all ranks use both communicators
			n := 0
			for _, i := range c.members {
				w.devices[i].mu.Lock()
				for g, b := range w.devices[i].backends {
					if g.Generation() == w.groups[i].Generation() && b.name() == BackendNCCL {
						n++
					}
				}
				w.devices[i].mu.Unlock()
			}
			return n == 2*len(c.members)
		}
		for round(); !all(); round() {
		}
		text, err := os.ReadFile(made)
		if n := strings.Count(string(text), c.want+" "); err != nil || n != 2*len(c.members) {
			t.Errorf("made by %q, not %s: %v", text, c.want, err)
		}
	}
}

// TestNCCLGathers: ranks that only gather use NCCL too, once all have it.
func TestNCCLGathers(t *testing.T) {
	w := newNCCLWorld(t, 2, Config{})
	w.enter(0, 1)
	for range 2 {
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s := vector(t, d, []int32{int32(rank)})
			defer s.Free()
			all, err := AllGather(t.Context(), g, s)
			for _, part := range all {
				part.Free()
			}
			return err
		})
		w.settle(t)
	}
	w.expect(t, BackendNCCL)
}

// others checks the operations other than AllReduce.
func others(t *testing.T, rank, n int, d *Device, g *collective.Group) error {
	for _, length := range []int{12, 13} {
		mine := make([]int64, length)
		for i := range mine {
			mine[i] = int64(100*rank + i)
		}
		s := vector(t, d, mine)
		defer s.Free()
		part, err := ReduceScatter(t.Context(), g, s, collective.Max)
		if err != nil {
			return err
		}
		defer part.Free()
		last := slices.Clone(mine)
		for i := range last {
			last[i] = int64(100*(n-1) + i)
		}
		each, more := length/n, length%n
		from := rank*each + min(rank, more)
		if got := values(t, part); !slices.Equal(got, last[from:from+len(got)]) {
			return fmt.Errorf("ReduceScatter: %v", got)
		}
		all, err := AllGather(t.Context(), g, s.Slice(0, 5+rank))
		if err != nil {
			return err
		}
		for r, part := range all {
			got := values(t, part)
			if len(got) != 5+r || got[4] != int64(100*r+4) {
				return fmt.Errorf("AllGather: %v of rank %d", got, r)
			}
			part.Free()
		}
		if err := Broadcast(t.Context(), g, s, n-1); err != nil {
			return err
		}
		if got := values(t, s); !slices.Equal(got, last) {
			return fmt.Errorf("Broadcast: %v", got)
		}
	}
	return nil
}

// TestDegraded: until all ranks have their communicators, all ranks use another backend. Then all
// change at the same operation.
func TestDegraded(t *testing.T) {
	const n = 3
	w := newNCCLWorld(t, n, Config{})
	fault(t, w.path, "init-hangs 1")
	w.enter(0, 1, 2)
	for range 3 {
		w.sums(t)
		w.expect(t, BackendStaging)
	}
	fault(t, w.path, "")
	// The communicators become ready at different times, but the ranks agree on the backend of each
	// operation.
	ways := make([][]string, n)
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		for i := 0; i < 10 || ways[rank][i-1] != BackendNCCL; i++ {
			if err := sum(t, d, g, 100+i); err != nil {
				return err
			}
			b, err := d.backend(t.Context(), g)
			if err != nil {
				return err
			}
			ways[rank] = append(ways[rank], b.name())
		}
		return nil
	})
	for rank := range n {
		if !slices.Equal(ways[rank], ways[0]) {
			t.Errorf("rank %d goes by %v, rank 0 by %v", rank, ways[rank], ways[0])
		}
	}
}

// TestNoCommunicator: if the communicator of one rank cannot be made, all ranks continue with
// another backend and log the reason. A new generation tries again.
func TestNoCommunicator(t *testing.T) {
	w := newNCCLWorld(t, 3, Config{})
	fault(t, w.path, "init-fails 1")
	w.enter(0, 1, 2)
	w.sums(t)
	w.devices[1].formed(t, w.groups[1])
	for range 3 {
		w.sums(t)
		w.expect(t, BackendStaging)
	}
	w.settle(t)
	for i, d := range w.devices {
		if got := d.pending(w.groups[i]); got != commFailed {
			t.Errorf("rank %d is in state %d", i, got)
		}
	}
	fault(t, w.path, "")
	w.enter(0, 1, 2)
	w.ready(t)
	var said []string
	for _, e := range w.lines.AllEntries() {
		if e.Level <= logrus.InfoLevel && e.Data["backend"] != nil {
			said = append(said, fmt.Sprint(e.Data["generation"], " ", e.Data["backend"], ": ", e.Data["why"]))
		}
	}
	if want := []string{"1 staging: nccl is being prepared",
		"1 staging: not nccl: rank 1: nccl: ncclCommGetAsyncError: ncclSystemError (unhandled system error): the fake has no route",
		"2 staging: nccl is being prepared", "2 nccl: all ranks are ready for it"}; !slices.Equal(said, want) {
		t.Errorf("said %q", said)
	}
	if told, want := w.told(), []string{"1 staging", "2 staging", "2 nccl"}; !slices.Equal(told, want) {
		t.Errorf("told %q", told)
	}
}

// TestAbandoned: a communicator was ready on some ranks, but all have given it up because it failed
// on another. The next world makes none from it.
func TestAbandoned(t *testing.T) {
	w := newNCCLWorld(t, 3, Config{})
	w.enter(0, 1, 2)
	w.sums(t)
	w.settle(t)
	failed := w.devices[1].ncclBackendOf(w.groups[1]).comm
	failed.reason = errLimit
	failed.state.Store(commFailed)
	w.sums(t)
	w.expect(t, BackendStaging)
	w.enter(0, 2)
	w.ready(t)
}

// TestAbortHangs: if the library does not return from ending a communicator, only Close is delayed.
func TestAbortHangs(t *testing.T) {
	defer func(was time.Duration) { closeLimit = was }(closeLimit)
	closeLimit = 10 * time.Millisecond
	config := Config{Library: cudatest.Library(t)}
	config.NCCL = ncclLibrary(t, config.Library, "-DVERSION=21403")
	w := newNCCLWorld(t, 3, config)
	apart(w)
	w.losing = func() { w.devices[0].endLimit = 10 * time.Millisecond } // what it bounds on rank 0 hangs from now on
	w.lose(t, "hangs 1\nabort-hangs 0", "abort-hangs 0")
	w.enter(2, 0) // device 2 names the communicator
	w.ready(t)
	fault(t, w.path, "")
}

// TestSlowCommunicator: a communicator that takes too long to make is given up.
func TestSlowCommunicator(t *testing.T) {
	defer func(was time.Duration) { formLimit = was }(formLimit)
	formLimit = 20 * time.Millisecond
	w := newNCCLWorld(t, 2, Config{})
	fault(t, w.path, "init-hangs 1")
	w.enter(0, 1)
	w.isGivenUp(t)
}

// isGivenUp waits until the communicator is given up for taking too long.
func (w *ncclWorld) isGivenUp(t *testing.T) {
	t.Helper()
	w.sums(t)
	w.settle(t)
	w.sums(t)
	w.expect(t, BackendStaging)
	if v := w.devices[0].ncclBackendOf(w.groups[0]); !errors.Is(v.comm.reason, errLimit) {
		t.Error(v.comm.reason)
	}
}

// TestSlowShrink: a communicator that takes too long to make from another one is given up.
func TestSlowShrink(t *testing.T) {
	was := formLimit
	defer func() { formLimit = was }()
	w := newNCCLWorld(t, 3, Config{})
	w.lose(t, "hangs 1", "init-hangs 1")
	formLimit = 20 * time.Millisecond
	w.enter(0, 2)
	w.isGivenUp(t)
	formLimit = was
	fault(t, w.path, "")
	w.enter(0, 2, 1)
	w.ready(t)
}

// TestLost: a rank is lost during an operation on all devices, or before it. Whichever functions
// the library has, the other ranks are released at once and use NCCL in the next world, and the
// lost rank joins them in the world after that.
func TestLost(t *testing.T) {
	for version, made := range map[int][3][]string{ // how the next two worlds' communicators are made: after an operation that hangs, after an error on a survivor, and after no operation
		21403: {{"init", "init"}, {"init", "init"}, {"init", "init"}},
		22703: {{"init", "init"}, {"init", "init"}, {"shrink", "init"}},
		22807: {{"shrink", "init"}, {"init", "init"}, {"shrink", "init"}},
		23007: {{"shrink", "grow"}, {"init", "grow"}, {"shrink", "grow"}},
	} {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			config := Config{Library: cudatest.Library(t)}
			config.NCCL = ncclLibrary(t, config.Library, fmt.Sprint("-DVERSION=", version))
			for i, what := range []string{"hangs 1", "breaks 0", ""} {
				t.Run(what, func(t *testing.T) {
					w := newNCCLWorld(t, 3, config)
					if version < int(sharesSince) {
						apart(w)
					}
					w.lose(t, what, "")
					for next, members := range [][]int{{0, 2}, {0, 2, 1}} {
						os.Remove(filepath.Join(filepath.Dir(w.path), "made"))
						w.enter(members...)
						w.ready(t)
						text, err := os.ReadFile(filepath.Join(filepath.Dir(w.path), "made"))
						if want := made[i][next]; err != nil || strings.Count(string(text), want+" ") != map[string]int{"grow": 2}[want]+
							map[bool]int{true: len(members)}[want != "grow"] {
							t.Errorf("the world of %v is made by %q, not %s: %v", members, text, want, err)
						}
					}
					for i, d := range w.devices {
						if len(d.reusable) > 0 {
							t.Errorf("rank %d has %d communicators left", i, len(d.reusable))
						}
					}
				})
			}
		})
	}
}

// lose makes a world of three use NCCL, and then loses a rank. what is the fault at that time,
// afterwards the fault from then on.
func (w *ncclWorld) lose(t *testing.T, what, afterwards string) {
	t.Helper()
	w.enter(0, 1, 2)
	w.ready(t)
	if w.losing != nil {
		w.losing()
	}
	fault(t, w.path, what)
	w.running(t)
	defer func(was time.Duration) { grace = was }(grace)
	grace = 10 * time.Millisecond
	lost := errors.New("lost")
	errs := w.members(func(i int, d *Device, g *collective.Group) error {
		s, err := Alloc[float32](d, 30_000)
		if err != nil {
			return err
		}
		defer s.Free()
		ctx := t.Context()
		switch {
		case what == "" && i == 1:
			g.Abort(lost)
			return lost
		case strings.HasPrefix(what, "hangs") && i == 2: // the others are blocked in the operation too
			var stop context.CancelCauseFunc
			ctx, stop = context.WithCancelCause(ctx)
			var watch sync.WaitGroup
			defer watch.Wait()
			watch.Go(func() {
				for !w.running(t) {
					runtime.Gosched()
				}
				stop(lost)
			})
		}
		return AllReduce(ctx, g, s, collective.Sum)
	})
	for i, err := range errs {
		var met *nccl.Error
		if broke := what == "breaks 0" && i == 0; broke != errors.As(err, &met) || !broke && err != lost && !errors.Is(err, collective.ErrAborted) {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	w.settle(t) // no communicator is made from one that is still ending
	fault(t, w.path, afterwards)
}

// running reports whether an operation has begun on all three ranks since the last call that
// returned true.
func (w *ncclWorld) running(t *testing.T) bool {
	all, err := filepath.Glob(filepath.Join(filepath.Dir(w.path), "running.*"))
	if err != nil {
		t.Error(err)
	}
	if len(all) < 3 {
		return false
	}
	for _, name := range all {
		os.Remove(name)
	}
	return true
}

// apart makes each rank's device a different one, for versions in which ranks cannot share a
// device.
func apart(w *ncclWorld) {
	for i, d := range w.devices {
		d.info.UUID[0] = byte(i)
	}
}

// TestArrange: how a communicator is made from those of the previous world.
func TestArrange(t *testing.T) {
	w := newNCCLWorld(t, 1, Config{})
	lib, err := nccl.Load(w.path)
	if err != nil {
		t.Fatal(err)
	}
	of := func(parents ...*parent) []record {
		var all []record
		for _, p := range parents {
			all = append(all, record{NCCL: &ncclRecord{Parent: p}})
		}
		return all
	}
	p := func(rank, size int) *parent { return &parent{Tag: 7, Rank: rank, Size: size} }
	broken := func(p *parent) *parent { p.Broken = true; return p }
	for _, c := range []struct {
		what string
		all  []record
		want formation
	}{
		{"the first", of(nil, nil), formation{}},
		{"one is gone", of(p(0, 3), p(2, 3)), formation{kind: formShrunk, without: []int{1}}},
		{"the first and the last are gone", of(p(1, 4), broken(p(2, 4))), formation{kind: formShrunk, without: []int{0, 3}, abort: true}},
		{"one has come", of(p(0, 2), p(1, 2), nil), formation{kind: formGrown}},
		{"one has come after something was broken off", of(p(0, 2), broken(p(1, 2)), nil), formation{}},
		{"one has come, one is gone", of(p(0, 2), nil), formation{}},
		{"the same again", of(p(0, 2), p(1, 2)), formation{}},
		{"another order", of(p(1, 3), p(0, 3)), formation{}},
		{"a newcomer in front", of(nil, p(0, 2), p(1, 2)), formation{}},
		{"a newcomer between", of(p(0, 2), nil, p(1, 2)), formation{}},
		{"another's", of(p(0, 2), &parent{Tag: 8, Rank: 1, Size: 2}), formation{}},
		{"nonsense", of(p(0, 2), p(5, 2)), formation{}},
	} {
		f := chooseFormation(c.all, lib)
		if f.kind != c.want.kind || f.kind != formNew && (f.abort != c.want.abort || !slices.Equal(f.without, c.want.without)) {
			t.Errorf("%s: %+v", c.what, f)
		}
	}
}

// TestNoNCCL: if ranks cannot use NCCL, they continue without it, and the reason is reported.
func TestNoNCCL(t *testing.T) {
	old := ncclLibrary(t, cudatest.Library(t), "-DVERSION=22703")
	for _, c := range []struct {
		what   string
		change func(w *ncclWorld)
		want   string
	}{
		{"missing", func(w *ncclWorld) { w.devices[1].config.NCCL = "/nowhere/libnccl.so.2" }, "rank 1: not available: /nowhere/libnccl.so.2"},
		{"another version", func(w *ncclWorld) { w.devices[1].config.NCCL = old }, "rank 1 has version 2.27.3, rank 0 2.30.7"},
		{"not wanted", func(w *ncclWorld) { w.devices[1].config.Backend = BackendStaging }, "rank 1 does not want it"},
		{"one device", func(w *ncclWorld) {
			for _, d := range w.devices {
				d.config.ncclShared = false
			}
		},
			"ranks 0 and 1 are on one device, and rank 0 lacks NCCL_MULTI_RANK_GPU_ENABLE=1"},
		{"one device, an old version", func(w *ncclWorld) {
			for _, d := range w.devices {
				d.config.NCCL = old
			}
		}, "ranks 0 and 1 are on one device, which needs version 2.30.0"},
	} {
		t.Run(c.what, func(t *testing.T) {
			w := newNCCLWorld(t, 2, Config{})
			c.change(w)
			w.enter(0, 1)
			w.sums(t)
			w.expect(t, BackendStaging)
			w.devices[0].config.Backend = BackendNCCL
			w.enter(0, 1)
			for i, err := range w.members(func(_ int, d *Device, g *collective.Group) error { return sum(t, d, g, 10) }) {
				var wrong *BackendError
				if !errors.As(err, &wrong) || c.what != "not wanted" && (wrong.Rank != 0 || !strings.Contains(wrong.Reason, c.want)) {
					t.Errorf("rank %d: %v", i, err)
				}
			}
		})
	}
}

// TestNCCLGenerations: a thousand worlds that grow, shrink and are aborted leave no communicators,
// device memory or threads behind.
func TestNCCLGenerations(t *testing.T) {
	rounds := 1000
	switch {
	case testing.Short():
		rounds = 50
	case collectivetest.Raced:
		rounds = 250
	}
	w := newNCCLWorld(t, 3, Config{})
	folder := filepath.Dir(w.path)
	worlds := [][]int{{0, 1, 2}, {0, 2}, {0, 2, 1}, {1, 2}, {2, 1}, {0, 1, 2}}
	most, by := 0, 0
	for i := range rounds {
		w.enter(worlds[i%len(worlds)]...)
		w.sums(t)
		if i%3 != 2 { // otherwise the world ends while its communicator is being made
			w.settle(t)
			w.sums(t)
			w.expect(t, BackendNCCL)
			by++
		}
		if i%5 == 4 {
			for _, g := range w.groups {
				g.Abort(errors.New("lost"))
			}
		}
		w.leave()
		live, _ := filepath.Glob(filepath.Join(folder, "live.*"))
		memory, _ := filepath.Glob(filepath.Join(folder, "[0-9]*"))
		most = max(most, len(live)+len(memory))
	}
	t.Logf("%d of %d generations went by NCCL; at most %d communicators and allocations at a time", by, rounds, most)
	if most > 3*6 {
		t.Errorf("%d communicators and allocations are held", most)
	}
}

// TestNCCLProcesses: processes that use NCCL are killed one after the other during an operation.
// The others are released, and use NCCL in a world without the killed process. Then a new process
// joins.
func TestNCCLProcesses(t *testing.T) {
	driver := cudatest.Library(t)
	path := ncclLibrary(t, driver)
	t.Setenv(plan.EnvNCCLLibrary, path)
	c := newCrew(t, driver, BackendNCCL, 4)
	generation := uint64(1)
	for ; len(c.alive) > 2; generation++ {
		c.meet(t, generation, 0)
		c.kill(t, int(generation)%len(c.alive))
	}
	c.meet(t, generation, 3)
	c.done(t)
	c.start(t, "a")
	c.meet(t, generation+1, 0)
	c.kill(t, 2)
	c.meet(t, generation+2, 0)
	c.kill(t, 0)
	c.meet(t, generation+3, 3)
	c.done(t)
	c.end(t)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(path), "made"))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for line := range strings.Lines(string(text)) {
		how, _, _ := strings.Cut(line, " ")
		got[how]++
	}
	if want := map[string]int{"init": 4, "shrink": 3 + 2 + 2, "grow": 2, "join": 1}; !maps.Equal(got, want) {
		t.Errorf("communicators: %v, not %v", got, want)
	}
	for _, p := range c.cmds { // remove what the killed processes have left
		for _, pattern := range []string{"live.%d.*", "%d.*"} {
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), fmt.Sprintf(pattern, p.Process.Pid)))
			if p.ProcessState != nil && p.ProcessState.Exited() {
				continue
			}
			for _, name := range left {
				os.Remove(name)
			}
		}
	}
}

// TestNCCLWords: the package uses NCCL only for reductions with the documented results. It does not
// use it for averages of integers, nor for minimum and maximum of floating-point numbers, in which
// NCCL drops NaNs.
func TestNCCLWords(t *testing.T) {
	w := &ncclBackend{}
	w.active.Store(true)
	for typ := range kernel.Types {
		if _, known := ncclTypes[typ]; !known {
			continue
		}
		whole := typ >= kernel.Int8 && typ <= kernel.Uint64
		for op, want := range map[collective.Op]bool{collective.Sum: true, collective.Product: true, collective.Average: !whole,
			collective.Min: whole, collective.Max: whole, collective.Adasum: false} {
			if _, _, able := w.ncclWords(typ, op); able != want {
				t.Errorf("%v of %v by NCCL: %v", op, typ, able)
			}
		}
	}
}
