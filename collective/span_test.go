package collective_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// spans collects spans.
type spans struct {
	mu  sync.Mutex
	all []collective.Span
}

func (s *spans) Span(one collective.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, one)
}

// The timeline gets a span for every operation of a group and its subsets, whether it succeeds or
// not.
func TestTimeline(t *testing.T) {
	var told spans
	groups := newWorkers(t, collective.Config{Timeline: &told}, 2).connect(t, 2)
	begun := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			data := make([]float64, 3)
			if err := collective.AllReduce(t.Context(), g, data, collective.Sum); err != nil {
				t.Error(err)
			}
			part, err := g.Subset(t.Context(), []int{0, 1})
			if err != nil {
				t.Error(err)
				return
			}
			if err := collective.Barrier(t.Context(), part); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	cancel()
	if err := collective.Broadcast(ctx, groups[0], make([]float64, 3), 0); err == nil {
		t.Error("a broadcast without time")
	}
	for _, g := range groups {
		g.Close()
	}
	var names []string
	lane := map[string]uint64{}
	for _, s := range told.all {
		names = append(names, s.Name)
		lane[s.Name] = s.Lane
		if s.Generation != 1 || s.Phase != "" || s.Duration <= 0 || s.Start.Before(begun) || time.Since(s.Start) < s.Duration {
			t.Errorf("%+v", s)
		}
		if want := map[string]int{"AllReduce": 24, "Broadcast": 24}[s.Name]; s.Bytes != want {
			t.Errorf("%s of %d bytes", s.Name, s.Bytes)
		}
	}
	slices.Sort(names)
	if want := []string{"AllReduce", "AllReduce", "Barrier", "Barrier", "Broadcast", "Subset", "Subset"}; !slices.Equal(names, want) {
		t.Error(names)
	}
	if lane["AllReduce"] != 0 || lane["Subset"] != 0 || lane["Barrier"] == 0 {
		t.Error(lane)
	}
}

// The timeline gets a span for each phase of an asynchronous operation, one after the other, under
// the name of its tensor.
func TestTimelineOfTensors(t *testing.T) {
	var told spans
	groups := newWorkers(t, collective.Config{Timeline: &told}, 2).connect(t, 2)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := collective.GroupedAllReduce(t.Context(), g, "x", [][]float32{{1}, {2, 3}}, collective.Sum); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
	phases := map[string]int{}
	var last collective.Span
	for _, s := range told.all {
		if s.Tensor == "" {
			continue
		}
		phases[s.Tensor+" "+s.Phase]++
		if s.Duration < 0 || s.Bytes == 0 {
			t.Errorf("%+v", s)
		}
		last = s
	}
	for _, tensor := range []string{"x.0", "x.1"} {
		for _, phase := range []string{"queue", "copy-in", "reduce", "copy-out"} {
			if phases[tensor+" "+phase] != len(groups) {
				t.Errorf("%s of %s: %d times", phase, tensor, phases[tensor+" "+phase])
			}
		}
	}
	if last.Phase != "copy-out" || len(phases) != 8 {
		t.Error(phases, last)
	}
}

// If ranks share memory, the phases of an operation are within its span, one after the other.
func TestTimelineOfPhases(t *testing.T) {
	var told spans
	w := newWorkers(t, collective.Config{Timeline: &told}, 2)
	w.hosts = "aa"
	groups := w.connect(t, 2)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			for _, length := range []int{1, 1000, 1 << 20} {
				if err := collective.AllReduce(t.Context(), g, make([]float32, length), collective.Sum); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
	phases := map[string]int{}
	var large []collective.Span
	for _, s := range told.all {
		if s.Name != "AllReduce" {
			continue
		}
		if s.Bytes == 4<<20 {
			large = append(large, s)
		}
		if s.Duration <= 0 {
			t.Errorf("%+v", s)
		}
		phases[s.Phase]++
	}
	if phases[""] != 6 || phases["reduce"] != 6 || phases["copy-in"] != 6 || phases["copy-out"] != 2 {
		t.Error(phases)
	}
	for _, s := range large {
		if !slices.ContainsFunc(large, func(all collective.Span) bool {
			return all.Phase == "" && !s.Start.Before(all.Start) && s.Start.Add(s.Duration).Sub(all.Start) <= all.Duration
		}) {
			t.Errorf("%+v lies in no operation", s)
		}
	}
}

// TestAlgorithmIsNamed: the timeline and the tally contain the algorithm that was used.
func TestAlgorithmIsNamed(t *testing.T) {
	var told spans
	w := newWorkers(t, collective.Config{Timeline: &told}, 4)
	groups := w.connect(t, 4)
	want := []string{"doubling", "rabenseifner", "ring", "direct"}
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			for _, n := range []int{1, 100 << 10 / 4, 2 << 20 / 4} {
				if err := collective.AllReduce(t.Context(), g, make([]float32, n), collective.Sum); err != nil {
					t.Error(err)
				}
			}
			if err := collective.AllReduce(t.Context(), g, make([]collective.BFloat16, 3), collective.Average); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
	named := map[string]int{}
	for _, s := range told.all {
		named[s.Algorithm]++
	}
	counted := map[string]uint64{}
	for _, e := range w.endpoints {
		for _, o := range e.Operations() {
			counted[o.Algorithm] += o.Count
		}
	}
	for _, algorithm := range want {
		if named[algorithm] != 4 || counted[algorithm] != 4 {
			t.Errorf("%s: %d spans, %d counted, of 4", algorithm, named[algorithm], counted[algorithm])
		}
	}
}

// TestSmallOperations: all small AllReduces in shared memory are counted, although few are timed.
func TestSmallOperations(t *testing.T) {
	const count = 50
	w := newWorkers(t, collective.Config{}, 2)
	w.hosts = "aa"
	groups := w.connect(t, 2)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			for range count {
				if err := collective.AllReduce(t.Context(), g, make([]float32, 1), collective.Sum); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
	for _, e := range w.endpoints {
		if all := e.Operations(); len(all) == 0 || all[0].Backend != collective.BackendMemory || all[0].Count != count || all[0].Bytes != 4*count || all[0].Duration < count*time.Nanosecond {
			t.Errorf("%+v", all)
		}
	}
}

// TestOperationsInBackground: operations in the background are counted once. The messages by which
// the ranks agree on them are not counted.
func TestOperationsInBackground(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 2)
	groups := w.connect(t, 2)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			for range 5 {
				if err := collective.AllReduceAsync(t.Context(), g, "a", make([]float32, 100), collective.Sum).Wait(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
	for _, e := range w.endpoints {
		if all := e.Operations(); len(all) != 1 || all[0].Kind != "AllReduceAsync" || all[0].Count != 5 || all[0].Bytes != 2000 || all[0].Algorithm == "" {
			t.Errorf("%+v", all)
		}
	}
}
