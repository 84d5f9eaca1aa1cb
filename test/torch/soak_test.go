package torch

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	events "github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
)

var (
	soak = flag.Duration("soak", time.Minute, "`time` for which TestSoak kills workers, with each way of connecting them")
	each = flag.Duration("each", 5*time.Second, "`time` between two deaths of TestSoakTrainer")
	seed = flag.Uint64("seed", 1, "`number` that determines which workers TestSoak kills")
)

// kill is a kill of a worker. survivors are the other workers of its world.
type kill struct {
	at         float64 // seconds since 1970
	pid        int
	survivors  []int
	generation uint64
}

// pace is the time of a step of a program with the option paced.
const pace = 50 * time.Millisecond

// TestSoak repeatedly kills one of four workers, which make a step in 50 ms. It kills the next one
// when the last one has been replaced, but not within a second of its death. The workers use
// DistributedDataParallel, or reduce one flat buffer. The test reports by how much a death delays
// the survivors' next step, and how many steps the deaths cost. Only the dead are started again,
// and each sample is used once.
func TestSoak(t *testing.T) {
	for _, way := range [][]string{{"paced"}, {"paced", "plain"}} {
		t.Run(strings.Join(way, " "), func(t *testing.T) {
			by(t, []string{"gloo", "hvdrun", "gpu", "nccl"}, func(t *testing.T, connection string) { soakWay(t, way, connection) })
		})
	}
}

// TestSoakTrainer kills one of four workers of transformers.Trainer after each period of -each,
// whether or not the last one has been replaced.
func TestSoakTrainer(t *testing.T) {
	needHF(t)
	const warm, measured, samples, batch = 40, 200, 480, 32
	steps := warm + measured + int(*soak/pace)
	e := startHF(t, "hf.py", filepath.Join(t.TempDir(), "ledger"), steps, []follow.Stage{{Hosts: "localhost:4"}}, "paced")
	first := e.size(4).Step
	e.committed(first + warm + measured)
	begin, random := seconds(time.Now()), rand.New(rand.NewPCG(*seed, 0))
	var kills []kill
	for last := 0; last < steps-int(*each/pace)-1; {
		k, newest, err := e.kill(*each, random)
		if err != nil {
			t.Logf("no further kill: %v", err) // a loaded machine replaces the dead late; e.end tells whether training is done
			break
		}
		kills, last = append(kills, k), newest
	}
	end := seconds(time.Now())
	e.end(steps, samples, batch)
	e.rate(kills, begin, end, first+warm, measured)
}

// kill waits for a time and for a world of several workers, kills a random one of them, and returns
// the newest step. It returns an error if the job ends first.
func (e *ledgerJob) kill(after time.Duration, random *rand.Rand) (k kill, newest int, err error) {
	e.t.Helper()
	<-time.After(after)
	if err := e.Until(e.t.Context(), "a world of several", func() bool { return len(e.World.Slots) > 1 }); err != nil {
		return k, 0, err
	}
	k = kill{at: seconds(time.Now()), generation: e.World.Generation}
	for _, s := range e.World.Slots {
		k.survivors = append(k.survivors, s.PID)
	}
	victim := random.IntN(len(k.survivors))
	k.pid = k.survivors[victim]
	k.survivors = slices.Delete(k.survivors, victim, victim+1)
	if err := syscall.Kill(k.pid, syscall.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
	for _, x := range e.look() {
		newest = max(newest, x.Step)
	}
	return k, newest, nil
}

// rate logs what the deaths cost, relative to the undisturbed steps measured from step from on.
func (e *ledgerJob) rate(kills []kill, begin, end float64, from, measured int) {
	e.t.Helper()
	made := e.made()
	ordinary := (made[from+measured] - made[from]) / float64(measured)
	steps := 0
	for _, at := range made {
		if begin < at && at <= end {
			steps++
		}
	}
	load, _ := os.ReadFile("/proc/loadavg") // the figures are less useful without it
	next, beyond := e.recoveries(kills, ordinary)
	rate := float64(steps) / (end - begin)
	e.t.Logf("%d kills in %.0f s: the last survivor has its next step after %s, %s later than without the death; "+
		"%.1f steps/s, undisturbed %.1f: %.0f %%; load %s", len(kills), end-begin, spread(next), spread(beyond),
		rate, 1/ordinary, rate*ordinary*100, strings.TrimSpace(string(load)))
}

func soakWay(t *testing.T, way []string, connection string) {
	e := startElastic(t, connection, nil, []string{"--blacklist-cooldown-range", "0.1,0.1"}, way...)
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
	e.rate(kills, begin, end, first+warm, measured)
}

// spread formats quantiles of milliseconds.
func spread(all []float64) string {
	slices.Sort(all)
	return fmt.Sprintf("%.0f ms (p50), %.0f (p99), %.0f (max)", all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
}

// seconds converts a time to the form of the ledger.
func seconds(at time.Time) float64 { return float64(at.UnixMicro()) / 1e6 }

// committed blocks until a step is committed.
func (e *ledgerJob) committed(step int) {
	e.t.Helper()
	e.until(fmt.Sprintf("step %d", step), 0, func(x entry) bool { return x.Event == "commit" && x.Step >= step })
}

// whole blocks until four workers have made a step after the kills, and a second after the last
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

// killFor kills workers repeatedly for a time.
func (e *ledgerJob) killFor(long time.Duration, random *rand.Rand) (kills []kill) {
	e.t.Helper()
	for end := time.Now().Add(long); time.Now().Before(end); {
		e.whole(kills)
		k, _, err := e.kill(time.Duration(random.Int64N(int64(pace))), random) // at any time of a step
		if err != nil {
			e.t.Fatal(err)
		}
		kills = append(kills, k)
	}
	return kills
}

// made returns when each step was first committed.
func (e *ledgerJob) made() map[int]float64 {
	at := map[int]float64{}
	for _, x := range e.look() {
		if old, ok := at[x.Step]; x.Event == "commit" && (!ok || x.Time < old) {
			at[x.Step] = x.Time
		}
	}
	return at
}

// since returns the milliseconds from a kill to the named event of its worker, or to the
// publication of the next world.
func (e *ledgerJob) since(k kill, name events.EventName) float64 {
	for _, x := range e.Events {
		if at := seconds(x.Time); x.Name == name && at > k.at && (x.PID == k.pid || name == events.WorldPublished) {
			return (at - k.at) * 1e3
		}
	}
	return 0
}

// recoveries returns, for each kill, the milliseconds until the last survivor has committed in a
// newer world, and by how much this exceeds the usual time, ordinary seconds after its previous
// commit.
func (e *ledgerJob) recoveries(kills []kill, ordinary float64) (next, beyond []float64) {
	e.t.Helper()
	for _, k := range kills {
		last, late := 0.0, 0.0
		for _, pid := range k.survivors {
			before := 0.0
			i := slices.IndexFunc(e.entries, func(x entry) bool {
				if x.Event != "commit" || x.PID != pid {
					return false
				}
				if x.Generation <= k.generation {
					before = x.Time
				}
				return x.Generation > k.generation
			})
			if i < 0 {
				e.t.Errorf("process %d has made no step after the death of %d", pid, k.pid)
				continue
			}
			last = max(last, e.entries[i].Time)
			late = max(late, e.entries[i].Time-before-ordinary)
		}
		next, beyond = append(next, (last-k.at)*1e3), append(beyond, late*1e3)
		e.t.Logf("world %d: %d killed, its end noticed after %.0f ms, a world after %.0f, the next step after %.0f, %.0f later than without",
			k.generation, k.pid, e.since(k, events.WorkerExited), e.since(k, events.WorldPublished), (last-k.at)*1e3, late*1e3)
	}
	if len(kills) == 0 {
		e.t.Fatal("nobody was killed")
	}
	return next, beyond
}
