package decide

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// BenchmarkScale makes the machine form a world of n workers, ten on each host, grow it by a host,
// lose one in a hundred at once, and lose a third of the hosts. Inputs of workers that arrive at
// the same time are passed to one step; with "singly", each is passed to its own step. It reports
// the time of each part, the time per input, and the machine's memory at the end.
func BenchmarkScale(b *testing.B) {
	for _, singly := range []bool{false, true} {
		for _, n := range []int{100, 300, 1000, 3000, 10000} {
			name := strconv.Itoa(n)
			if singly {
				name = "singly/" + name
			}
			b.Run(name, func(b *testing.B) {
				var all episodes
				for b.Loop() {
					all = measure(b, n, singly)
				}
				for _, p := range all {
					b.ReportMetric(float64(p.took.Microseconds())/1000, "ms/"+p.name)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*all[len(all)-1].inputs), "ns/input")
				b.ReportMetric(float64(all[len(all)-1].memory)/1e6, "MB")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// together is the largest number of inputs that the driver passes to one step.
const together = 1024

// episode is the cost of a part of the benchmark. Its inputs and bytes of memory are counted up to
// its end.
type episode struct {
	name   string
	took   time.Duration
	inputs int
	memory uint64
}

type episodes []episode

func measure(b *testing.B, n int, singly bool) (all episodes) {
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
	inputs := 0
	var fresh []string
	var hand []Input // inputs of the next step
	flush := func() {
		if len(hand) == 0 {
			return
		}
		inputs += len(hand)
		now = now.Add(time.Millisecond)
		for _, a := range m.Step(now, hand...) {
			if s, ok := a.(StartWorker); ok {
				fresh = append(fresh, s.ID)
			}
		}
		hand = hand[:0]
		m.Deadline()
	}
	step := func(in Input) {
		if hand = append(hand, in); singly || len(hand) == together {
			flush()
		}
	}
	var lost []int // ranks
	join := func(id string, after uint64) {
		step(WorkerJoined{id, Join{After: after, Commits: 5 * after, HoldsState: after > 0, Lost: lost}})
	}
	ready := func() {
		for len(fresh) > 0 { // each join permits another start
			started := fresh
			fresh = nil
			for _, id := range started {
				step(WorkerForked{id, 1})
			}
			for _, id := range started {
				join(id, 0)
			}
			flush()
		}
	}
	again := func(generation uint64) {
		for _, w := range slices.Clone(m.workers) {
			if w.Generation == generation && w.live() {
				join(w.id, generation)
			}
		}
		flush()
	}
	began := time.Now()
	var memory runtime.MemStats
	ends := func(name string, generation uint64, size int) {
		b.Helper()
		took := time.Since(began)
		if m.Current.Generation != generation || m.Current.Size() != size {
			b.Fatalf("%s: generation %d of %d workers; want %d of %d", name, m.Current.Generation, m.Current.Size(), generation, size)
		}
		b.StopTimer()
		runtime.GC()
		runtime.ReadMemStats(&memory)
		all = append(all, episode{name, took, inputs, memory.HeapAlloc})
		b.StartTimer()
		began = time.Now()
	}
	hosts := make([]plan.Host, n/10)
	for i := range hosts {
		hosts[i] = plan.Host{Name: fmt.Sprintf("host%04d", i), Slots: 10}
	}
	step(HostsFound{hosts})
	flush()
	ready()
	ends("form", 1, n)
	for _, w := range m.workers {
		step(WorkerReported{w.id, ReportCommitted, 1, 1})
	}
	flush()
	ends("commit", 1, n)
	hosts = append(hosts, plan.Host{Name: "new", Slots: 10})
	step(HostsFound{hosts})
	flush()
	ready()
	again(1)
	ends("grow", 2, n+10)
	left := n + 10
	for i, w := range slices.Clone(m.workers) {
		if i%100 == 0 {
			step(WorkerEnded{ID: w.id, Exit: job.Exit{Code: 137, Signal: 9}})
			lost = append(lost, w.Rank)
			left--
		}
	}
	flush()
	again(2)
	lost = nil
	ends("die", 3, left)
	step(HostsFound{hosts[len(hosts)/3:]})
	flush()
	for _, w := range m.workers {
		if i, err := strconv.Atoi(strings.TrimPrefix(w.slot.Host, "host")); err == nil && i < len(hosts)/3 && w.Generation == 3 {
			left--
		}
	}
	again(3)
	ends("leave", 4, left)
	runtime.KeepAlive(m)
	return all
}
