package cuda

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	jobs "github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

func TestChoose(t *testing.T) {
	host := func(name string, n int) []record { return slices.Repeat([]record{{Host: name}}, n) }
	with := func(all []record, rank int, change func(*record)) []record {
		all = slices.Clone(all)
		change(&all[rank])
		return all
	}
	wish := func(name string) func(*record) { return func(r *record) { r.Wish = name } }
	refuses := func(r *record) { r.Trouble = "no way" }
	for _, c := range []struct {
		what      string
		all       []record
		name, why string // or
		err       string
	}{
		{"one host", host("a", 4), BackendIPC, "not nccl: rank 0 does not want it", ""},
		{"two hosts", slices.Concat(host("a", 2), host("b", 1)), BackendHosts, "not nccl: rank 0 does not want it; not ipc: rank 2 is on another host than rank 0", ""},
		{"a host each", slices.Concat(host("a", 1), host("b", 1)), BackendStaging,
			"not nccl: rank 0 does not want it; not ipc: rank 1 is on another host than rank 0; not ipc+hosts: every rank is on a different host", ""},
		{"a host each, on purpose", with(slices.Concat(host("a", 1), host("b", 1)), 1, wish(BackendHosts)), BackendHosts, "rank 1 wants it", ""},
		{"strict", with(slices.Concat(host("a", 2), host("b", 2)), 1, func(r *record) { r.Forced = "strict" }), BackendStaging,
			"not nccl: rank 0 does not want it; not ipc: rank 2 is on another host than rank 0; not ipc+hosts: the algorithm of rank 1 is strict", ""},
		{"a large host", host("a", 17), BackendStaging, "not nccl: rank 0 does not want it; not ipc: there are more than 16 ranks on the host of rank 16; " +
			"not ipc+hosts: there are more than 16 ranks on the host of rank 16", ""},
		{"closed memory", with(host("a", 3), 1, refuses), BackendStaging, "not nccl: rank 0 does not want it; not ipc: rank 1: no way; not ipc+hosts: rank 1: no way", ""},
		{"one wishes", with(host("a", 3), 1, wish(BackendStaging)), BackendStaging, "rank 1 wants it", ""},
		{"what is best anyway", with(host("a", 3), 0, wish(BackendIPC)), BackendIPC, "rank 0 wants it", ""},
		{"what cannot be", with(with(host("a", 3), 1, refuses), 2, wish(BackendIPC)), "", "", "cuda: rank 2 wants the backend ipc: rank 1: no way"},
		{"different wishes", with(with(host("a", 3), 1, wish(BackendIPC)), 2, wish(BackendStaging)), "", "",
			"cuda: rank 2 wants the backend staging: rank 1 wants ipc"},
		{"an unknown backend", with(host("a", 3), 1, wish("mpi")), "", "", "cuda: rank 1 wants the backend mpi: no backend has that name"},
	} {
		name, why, err := choose(c.all)
		said := ""
		if err != nil {
			said = err.Error()
		}
		if name != c.name || why != c.why || said != c.err {
			t.Errorf("%s: %q (%s), %v", c.what, name, why, err)
		}
	}
}

// TestBackendErrors: if one rank requires a backend that cannot be used, all ranks get the error,
// and the group remains usable.
func TestBackendErrors(t *testing.T) {
	w := newWorld(t, 3, 1, Config{})
	w.devices[1].config.Backend, w.devices[1].config.host = BackendIPC, "elsewhere"
	for range 2 {
		for rank, err := range w.each(func(rank int, d *Device, g *collective.Group) error {
			return AllReduce(t.Context(), g, vector(t, d, []int32{1, 2}), collective.Sum)
		}) {
			var wrong *BackendError
			if !errors.As(err, &wrong) || wrong.Rank != 1 || wrong.Backend != BackendIPC || !strings.Contains(wrong.Reason, "another host") {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	}
	w.must(t, func(rank int, d *Device, g *collective.Group) error { return collective.Barrier(t.Context(), g) })
}

// TestBackendVariable: the environment variable selects the backend; an unknown name is an error.
func TestBackendVariable(t *testing.T) {
	t.Setenv(plan.EnvCUDABackend, "mpi")
	a := newNode(t).process().api()
	if _, err := a.open(Config{}); err == nil || !strings.Contains(err.Error(), `"mpi"`) || !strings.Contains(err.Error(), BackendStaging) {
		t.Error(err)
	}
	t.Setenv(plan.EnvCUDABackend, BackendStaging)
	w := newWorld(t, 2, 1, Config{})
	for _, d := range w.devices {
		if d.config.Backend != BackendStaging {
			t.Errorf("%q", d.config.Backend)
		}
	}
}

// TestBackendIsTold: rank 0 reports and logs the choice once in a generation, whatever groups of
// its ranks exist.
func TestBackendIsTold(t *testing.T) {
	var mu sync.Mutex
	var told []string
	log, lines := logtest.NewNullLogger()
	meet := meetingsWith(t, 2, false, collective.Config{Log: log, Backend: func(generation uint64, name string) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, fmt.Sprint(generation, " ", name))
	}})
	w := newWorld(t, 2, 1, Config{})
	w.devices[1].config.host = "elsewhere"
	for range 2 {
		w.groups = meet()
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s := vector(t, d, []int32{1, 2})
			err := AllReduceAsync(t.Context(), g, "s", s, collective.Sum, Options{}).Wait()
			return errors.Join(err, AllReduce(t.Context(), g, s, collective.Sum))
		})
		for _, g := range w.groups {
			g.Close()
		}
	}
	if want := []string{"1 staging", "2 staging"}; !slices.Equal(told, want) {
		t.Errorf("told %q", told)
	}
	var said []string
	for _, e := range lines.AllEntries() {
		if e.Level == logrus.InfoLevel {
			said = append(said, fmt.Sprint(e.Data["generation"], e.Data["size"], e.Data["backend"], ": ", e.Data["why"]))
		}
	}
	if len(said) != 2 || !strings.HasPrefix(said[0], "1 2staging: not nccl: rank 0: not available: ") ||
		!strings.HasSuffix(said[0], "; not ipc: rank 1 is on another host than rank 0; not ipc+hosts: every rank is on a different host") {
		t.Errorf("said %q", said)
	}
}

// TestBackendEvent: the driver's events contain the backend that the workers of a job have chosen,
// also after one of them has died.
func TestBackendEvent(t *testing.T) {
	n := newNode(t)
	var mu sync.Mutex
	var events []string
	heard := []chan struct{}{make(chan struct{}), make(chan struct{})}
	job := elastictest.Start(elastictest.Config{
		Hosts: []plan.Host{{Name: "a", Slots: 2}},
		At: func(m elastictest.Moment) bool {
			if m.Generation != 1 || m.Rank != 0 || m.Phase != elastictest.Committed {
				return false
			}
			<-heard[0]
			return true
		},
		Driver: jobs.Config{Events: func(e job.Event) {
			if e.Name == job.Backend {
				text, err := json.Marshal(e)
				if err != nil {
					t.Error(err)
				}
				_, text, _ = bytes.Cut(text, []byte(`"event":`))
				mu.Lock()
				defer mu.Unlock()
				events = append(events, string(text))
				if len(events) <= len(heard) {
					close(heard[len(events)-1])
				}
			}
		}},
		Worker: func(ctx context.Context) error {
			w, err := elastic.Init(ctx)
			if err != nil {
				return err
			}
			defer w.Close()
			d, err := n.process().api().open(Config{})
			if err != nil {
				return err
			}
			defer d.Close()
			s, err := Alloc[float32](d, 100)
			if err != nil {
				return err
			}
			defer s.Free()
			state := elastic.NewState(w, Tensor("sum", s))
			return elastic.Run(ctx, state, func(ctx context.Context) error {
				for again := 0; again < 3; {
					if w.Generation() > 1 && w.Size() == 2 {
						again++
					}
					if err := AllReduce(ctx, w.Group(), s, collective.Sum); err != nil {
						return err
					}
					if err := state.Commit(); err != nil {
						return err
					}
				}
				select {
				case <-heard[1]:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		},
	})
	if err := job.Wait(); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(events) < 2 || slices.ContainsFunc(events, func(e string) bool {
		var generation int
		_, err := fmt.Sscanf(e, `"backend","generation":%d,"backend":"ipc","size":2}`, &generation)
		return err != nil
	}) || events[0] != `"backend","generation":1,"backend":"ipc","size":2}` || len(slices.Compact(events)) != len(events) {
		t.Errorf("%q", events)
	}
}
