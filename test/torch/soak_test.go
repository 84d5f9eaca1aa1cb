package torch

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	events "github.com/hvdrun/hvdrun/driver/job"
)

var (
	soak = flag.Duration("soak", time.Minute, "`time` for which TestSoak kills workers, with each way of connecting them")
	seed = flag.Uint64("seed", 1, "`number` that determines which workers TestSoak kills")
)

// kill is the end of a worker, of those of its world.
type kill struct {
	at         float64 // seconds since 1970
	pid        int
	survivors  []int
	generation uint64
}

// TestSoak kills one of four workers of DistributedDataParallel that make a step in 50 ms, again
// and again: a second after the last one, once its place is taken. It tells how long the survivors
// need to the next step, and what the deaths cost. Nobody but the dead is started again, and each
// sample is used once.
func TestSoak(t *testing.T) {
	by(t, []string{"gloo", "hvdrun"}, func(t *testing.T, connection string) {
		e := startElastic(t, connection, nil, []string{"--blacklist-cooldown-range", "0.1,0.1"}, "paced")
		const warm, measured = 40, 200 // steps
		first := e.size(4).Step
		e.committed(first + warm + measured)
		begin := seconds(time.Now())
		kills := e.killFor(*soak, rand.New(rand.NewPCG(*seed, 0)))
		e.whole(kills)
		end := seconds(time.Now())
		started := e.finish()

		if want := 4 + len(kills); started != want {
			t.Errorf("%d workers were started, want %d", started, want)
		}
		for _, x := range e.Events {
			if x.Name == events.WorkerExited && x.Code != 0 && !slices.ContainsFunc(kills, func(k kill) bool { return k.pid == x.PID }) {
				t.Errorf("worker %d has failed, and was not killed", x.PID)
			}
		}
		made := e.made()
		undisturbed := measured / (made[first+warm+measured] - made[first+warm])
		steps := 0
		for _, at := range made {
			if begin < at && at <= end {
				steps++
			}
		}
		load, _ := os.ReadFile("/proc/loadavg") // without it the figures say less
		next := e.recoveries(kills)
		t.Logf("%s: %d kills in %.0f s: the last survivor has its next step after %.0f ms (p50), %.0f (p99), %.0f (max), where a step takes 50; "+
			"%.1f steps/s, undisturbed %.1f: %.0f %%; load %s", connection, len(kills), end-begin,
			next[len(next)/2], next[len(next)*99/100], next[len(next)-1],
			float64(steps)/(end-begin), undisturbed, float64(steps)/(end-begin)/undisturbed*100, strings.TrimSpace(string(load)))
	})
}

// seconds is a time as the ledger has it.
func seconds(at time.Time) float64 { return float64(at.UnixMicro()) / 1e6 }

// committed blocks until a step is made.
func (e *ledgerJob) committed(step int) {
	e.t.Helper()
	e.until(fmt.Sprintf("step %d", step), 0, func(x entry) bool { return x.Event == "commit" && x.Step >= step })
}

// whole blocks until a step is done by four workers after the kills, and a second after the last
// one.
func (e *ledgerJob) whole(kills []kill) entry {
	e.t.Helper()
	last := kill{at: seconds(time.Now())}
	if len(kills) > 0 {
		last = kills[len(kills)-1]
	}
	return e.until("a step of four", len(e.look()), func(x entry) bool {
		return x.Event == "commit" && x.Size == 4 && x.Generation > last.generation && x.Time >= last.at+1
	})
}

// killFor kills workers for a time.
func (e *ledgerJob) killFor(long time.Duration, random *rand.Rand) (kills []kill) {
	e.t.Helper()
	for end := time.Now().Add(long); time.Now().Before(end); {
		whole := e.whole(kills)
		if err := e.Look(); err != nil {
			e.t.Fatal(err)
		}
		k := kill{at: seconds(time.Now()), generation: whole.Generation}
		for _, s := range e.World.Slots {
			k.survivors = append(k.survivors, s.PID)
		}
		victim := random.IntN(4)
		k.pid = k.survivors[victim]
		k.survivors = slices.Delete(k.survivors, victim, victim+1)
		if err := syscall.Kill(k.pid, syscall.SIGKILL); err != nil {
			e.t.Fatal(err)
		}
		kills = append(kills, k)
	}
	return kills
}

// made returns when each step was committed first.
func (e *ledgerJob) made() map[int]float64 {
	at := map[int]float64{}
	for _, x := range e.look() {
		if old, ok := at[x.Step]; x.Event == "commit" && (!ok || x.Time < old) {
			at[x.Step] = x.Time
		}
	}
	return at
}

// recoveries returns the milliseconds from each kill until the last survivor has committed in a
// newer world, in ascending order.
func (e *ledgerJob) recoveries(kills []kill) (all []float64) {
	e.t.Helper()
	for _, k := range kills {
		last := 0.0
		for _, pid := range k.survivors {
			i := slices.IndexFunc(e.entries, func(x entry) bool { return x.Event == "commit" && x.PID == pid && x.Generation > k.generation })
			if i < 0 {
				e.t.Errorf("process %d has made no step after the death of %d", pid, k.pid)
				continue
			}
			last = max(last, e.entries[i].Time)
		}
		all = append(all, (last-k.at)*1e3)
		e.t.Logf("world %d: %d killed, next step after %.0f ms", k.generation, k.pid, (last-k.at)*1e3)
	}
	slices.Sort(all)
	if len(all) == 0 {
		e.t.Fatal("nobody was killed")
	}
	return all
}
