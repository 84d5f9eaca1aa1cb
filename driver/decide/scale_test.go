package decide

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// BenchmarkScale has the machine form a world of n workers, grow it by a host, and lose a tenth of
// it. It reports the time per step.
func BenchmarkScale(b *testing.B) {
	for _, n := range []int{100, 300, 1000, 3000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			steps := 0
			for b.Loop() {
				steps += stepMany(b, n)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(steps), "ns/step")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// stepMany returns the number of steps.
func stepMany(b *testing.B, n int) (steps int) {
	cfg, err := withDefaults(Config{
		Size:  job.Size{NP: n, Min: 1, Elastic: true},
		Blame: job.Blame{CooldownMin: time.Hour, CooldownMax: time.Hour},
	})
	if err != nil {
		b.Fatal(err)
	}
	given := 0
	m := New(cfg, func(plan.SlotID) string { given++; return strconv.Itoa(given) })
	now := time.Unix(0, 0)
	var fresh []string
	step := func(in Input) {
		steps++
		now = now.Add(time.Millisecond)
		for _, a := range m.Step(now, in) {
			if s, ok := a.(StartWorker); ok {
				fresh = append(fresh, s.ID)
			}
		}
		m.Deadline()
	}
	join := func(id string, after uint64) {
		step(WorkerJoined{id, Join{After: after, Commits: 5 * after, HoldsState: after > 0}})
	}
	ready := func() {
		for len(fresh) > 0 { // a join makes room for another start
			started := fresh
			fresh = nil
			for _, id := range started {
				step(WorkerForked{id, 1})
			}
			for _, id := range started {
				join(id, 0)
			}
		}
	}
	again := func(generation uint64) {
		for _, w := range m.workers {
			if w.generation == generation {
				join(w.id, generation)
			}
		}
	}
	hosts := make([]plan.Host, n/8+1)
	for i := range hosts {
		hosts[i] = plan.Host{Name: fmt.Sprintf("host%04d", i), Slots: 8}
	}
	hosts[n/8].Slots = n % 8
	if n%8 == 0 {
		hosts = hosts[:n/8]
	}
	step(HostsFound{hosts})
	ready()
	for _, w := range m.workers {
		step(WorkerReported{w.id, ReportCommitted, 1, 1})
	}
	step(HostsFound{append(hosts, plan.Host{Name: "new", Slots: 8})})
	ready()
	again(1)
	for i, w := range append([]*Worker(nil), m.workers...) {
		if i%10 == 0 {
			step(WorkerEnded{w.id, job.Exit{Code: 137, Signal: 9}})
		}
	}
	again(2)
	if want := n + 8 - (n+8+9)/10; m.world.Generation != 3 || m.world.Size() != want {
		b.Fatalf("generation %d of %d workers; want 3 of %d", m.world.Generation, m.world.Size(), want)
	}
	return steps
}
