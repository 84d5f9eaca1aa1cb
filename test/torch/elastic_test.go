package torch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	events "github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/follow"
)

// entry is a line of the ledger that elastic.py writes.
type entry struct {
	Event      string  `json:"event"`
	Time       float64 `json:"time"`
	PID        int     `json:"pid"`
	Generation uint64  `json:"generation"`
	Step       int     `json:"step"`
	Rank       int     `json:"rank"`
	Size       int     `json:"size"`
	Indices    []int   `json:"indices"`
	Sum        float64 `json:"sum"`
	Rate       float64 `json:"rate"`
}

// ledgerJob is a job of elastic.py under the real hvdrun.
type ledgerJob struct {
	*follow.Running
	t       *testing.T
	ledger  string
	read    int
	entries []entry
}

// connected are the ways in which the ranks of a world are connected: gloo, a process group that is
// reconfigured if torch supports that; anew, one of gloo that is created for each world; and
// hvdrun, the backend hvdrun. Two others are gpu, which is gloo with tensors on the GPU, and nccl.
var connected = []string{"gloo", "anew", "hvdrun"}

// by runs a test for some of these connections.
func by(t *testing.T, connections []string, test func(t *testing.T, connection string)) {
	for _, connection := range connections {
		t.Run(connection, func(t *testing.T) {
			needTorch(t)
			if connection == "anew" && !version().reconfigures {
				t.Skip("this torch has no other way")
			}
			if (connection == "gpu" || connection == "nccl") && !version().gpu {
				t.Skip("there is no GPU that this torch can use")
			}
			test(t, connection)
		})
	}
}

// startElastic starts a job of elastic.py with four workers. If a stage waits for a file After,
// call mark to create it. flags are added to hvdrun's.
func startElastic(t *testing.T, connection string, stages []follow.Stage, flags []string, ways ...string) *ledgerJob {
	t.Helper()
	return startProgram(t, "elastic.py", connection, stages, flags, ways...)
}

// startProgram is like startElastic, for another program that writes such a ledger.
func startProgram(t *testing.T, program, connection string, stages []follow.Stage, flags []string, ways ...string) *ledgerJob {
	t.Helper()
	var env []string
	if connection != "gloo" && connection != "anew" {
		ways = append(slices.Clone(ways), connection)
	}
	switch connection {
	case "anew":
		env = []string{"HVD_TORCH_ANEW=1"}
	case "hvdrun":
		library(t)
	case "nccl":
		env = []string{"NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_MAX_CTAS=8"} // there can be fewer GPUs than ranks
	}
	script, err := filepath.Abs(program)
	if err != nil {
		t.Fatal(err)
	}
	e := &ledgerJob{t: t, ledger: filepath.Join(t.TempDir(), "ledger")}
	if stages == nil {
		stages = []follow.Stage{{Hosts: "localhost:4"}}
	}
	hosts, err := plan.ParseHostList(strings.ReplaceAll(stages[0].Hosts, " ", ","), 1)
	if err != nil {
		t.Fatal(err)
	}
	slots := 0
	for _, host := range hosts {
		slots += host.Slots
	}
	e.Running = follow.Programs{Hvdrun: hvdrun}.Test(t, follow.Job{
		Stages: stages,
		// A replacement starts at once, and has the time that Python needs on a busy machine.
		Flags: append([]string{"-np", fmt.Sprint(slots), "--min-np", "1", "--discovery-interval", "100ms",
			"--start-timeout", "10m", "--join-timeout", "5m", "--blacklist-cooldown-range", "1,2"}, flags...),
		Command: append([]string{*python, script, e.ledger, "1000000"}, ways...),
		// A Python in another root can read this folder too.
		Env: append([]string{"XDG_CACHE_HOME=" + t.TempDir(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"}, env...),
	})
	return e
}

// look reads what was added to the ledger, and returns all of its entries.
func (e *ledgerJob) look() []entry {
	text, err := os.ReadFile(e.ledger)
	if err != nil && !os.IsNotExist(err) {
		e.t.Fatal(err)
	}
	fresh := text[min(e.read, len(text)):]
	fresh = fresh[:bytes.LastIndexByte(fresh, '\n')+1]
	e.read += len(fresh)
	for line := range bytes.Lines(fresh) {
		var one entry
		if err := json.Unmarshal(line, &one); err != nil {
			e.t.Fatalf("%q: %v", line, err)
		}
		e.entries = append(e.entries, one)
	}
	return e.entries
}

// until blocks until holds returns true for an entry, and returns it. It ignores the first after
// entries.
func (e *ledgerJob) until(what string, after int, holds func(entry) bool) entry {
	e.t.Helper()
	var found entry
	if err := e.Until(e.t.Context(), what, func() bool {
		all := e.look()
		i := slices.IndexFunc(all[min(after, len(all)):], holds)
		if i >= 0 {
			found = all[after+i]
		}
		return i >= 0
	}); err != nil {
		e.t.Fatalf("%s: %v\n%s", what, err, follow.Tail(e.OutputPath(), 4000))
	}
	return found
}

// size blocks until a world of this size has committed another step, and returns the step's entry.
func (e *ledgerJob) size(n int) entry {
	e.t.Helper()
	return e.until(fmt.Sprintf("a step of %d workers", n), len(e.look()), func(x entry) bool { return x.Event == "commit" && x.Size == n })
}

// send sends a signal to a rank of the newest world, and returns its PID.
func (e *ledgerJob) send(rank int, s syscall.Signal) int {
	e.t.Helper()
	if err := e.Look(); err != nil {
		e.t.Fatal(err)
	}
	pid := e.World.Slots[rank].PID
	if err := syscall.Kill(pid, s); err != nil {
		e.t.Fatal(err)
	}
	return pid
}

// write creates a file beside the ledger, which the workers look for.
func (e *ledgerJob) write(suffix, text string) {
	e.t.Helper()
	path := e.ledger + suffix
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		e.t.Fatal(err)
	}
}

// finish ends the job and checks its ledger: each step was made once, by all ranks of one world,
// and each epoch used each sample once. It returns the number of workers that were started.
func (e *ledgerJob) finish() (started int) {
	e.t.Helper()
	e.write(".stop", "")
	res, err := e.Wait()
	if err != nil || res.Status != 0 {
		e.t.Fatalf("status %d, %v\n%s", res.Status, err, follow.Tail(e.OutputPath(), 4000))
	}
	e.checkLedger(res.Events)
	e.logExits(res.Events)
	return follow.Count(res.Events, events.WorkerStarted)
}

// logExits logs how long the interpreters took to end after the last step.
func (e *ledgerJob) logExits(all []follow.Event) {
	done, gone := 0.0, 0.0
	for _, x := range e.look() {
		if x.Event == "end" {
			done = x.Time
		}
	}
	for _, x := range all {
		if x.Name == events.WorkerExited {
			gone = seconds(x.Time)
		}
	}
	e.t.Logf("the processes have ended %.1f s after their last step", gone-done)
}

// checkLedger checks that each step was made once and each sample was used once. Steps of ranks
// that have all failed are made again.
func (e *ledgerJob) checkLedger(all []follow.Event) {
	type place struct {
		step int
		gen  uint64
	}
	failed := map[int]bool{}
	for _, x := range all {
		if x.Name == events.WorkerExited && x.Code != 0 {
			failed[x.PID] = true
		}
	}
	parts, made, kept := map[place]map[int][]int{}, map[int]uint64{}, map[place]bool{}
	for _, x := range e.look() {
		at := place{x.Step, x.Generation}
		switch x.Event {
		case "wrong":
			e.t.Errorf("the mean of step %d was wrong in world %d", x.Step, x.Generation)
		case "part":
			if parts[at] == nil {
				parts[at] = map[int][]int{}
			}
			parts[at][x.Rank] = x.Indices
		case "commit":
			if old, ok := made[x.Step]; ok && old != x.Generation && kept[place{x.Step, old}] {
				e.t.Errorf("step %d was made in worlds %d and %d", x.Step, old, x.Generation)
			}
			made[x.Step] = x.Generation
			kept[at] = kept[at] || !failed[x.PID]
		}
	}
	const samples, batch = 1000, 24
	perEpoch := (samples + batch - 1) / batch
	seen := map[int]int{}
	for step := range len(made) {
		gen, ok := made[step]
		if !ok {
			e.t.Fatalf("of %d steps, step %d was not made", len(made), step)
		}
		for _, indices := range parts[place{step, gen}] {
			for _, i := range indices {
				if seen[i]++; seen[i] != step/perEpoch+1 {
					e.t.Fatalf("sample %d comes %d times in the steps up to %d", i, seen[i], step)
				}
			}
		}
	}
	e.t.Logf("%d steps in %d epochs", len(made), len(made)/perEpoch)
}

// ways are the kinds of programs with which deaths are tested.
var ways = [][]string{
	{"buffers", "adam"}, {"static"}, {"unused", "accumulate"}, {"loader"}, {"plain", "sendrecv"}, {"amp", "accumulate"}, {"compile"},
}

// compiles reports whether torch.compile works: it needs a C++ compiler and the headers of Python
// and torch.
var compiles = sync.OnceValue(func() bool {
	return exec.Command(*python, "-c", "import torch; torch.compile(lambda x: x.sin().cos())(torch.ones(9))").Run() == nil
})

// TestElasticDeaths: the last rank, the first, and one in between are killed, one after the other.
// The others continue in the next world without a restart, and a new worker takes each place.
func TestElasticDeaths(t *testing.T) {
	for _, way := range ways {
		t.Run(strings.Join(way, " "), func(t *testing.T) {
			by(t, connected, func(t *testing.T, connection string) {
				switch {
				case way[0] == "amp" && !version().scales:
					t.Skip("this torch has no GradScaler for CPUs")
				case way[0] == "compile" && !compiles():
					t.Skip("torch.compile does not work here: NOT tried (it needs g++, python3-dev and libtorch-dev)")
				}
				e := startElastic(t, connection, nil, nil, append(way, "slow")...)
				e.size(4)
				for i, rank := range []int{3, 0, 1} {
					at, n := seconds(time.Now()), len(e.look())
					killed := e.World.Slots[rank].PID
					if i == 2 && slices.Contains(way, "accumulate") {
						e.write(".within", fmt.Sprint(killed)) // between two passes, the first of which is within no_sync
					} else {
						killed = e.send(rank, syscall.SIGKILL)
					}
					gen := e.World.Generation
					next := e.until("the next step", n, func(x entry) bool {
						return x.Event == "commit" && x.Generation > gen && x.PID != killed
					})
					t.Logf("rank %d was killed: the next step after %.0f ms", rank, (next.Time-at)*1e3)
					if i == 0 {
						e.size(4)
					}
				}
				if started := e.finish(); started > 4+3+1 {
					t.Errorf("%d workers were started for 3 deaths", started)
				}
			})
		})
	}
}

// TestElasticDeathWhileForming: a rank is killed as soon as the world that follows another death is
// published.
func TestElasticDeathWhileForming(t *testing.T) {
	by(t, connected, func(t *testing.T, connection string) {
		e := startElastic(t, connection, nil, nil, "groups", "slow")
		e.size(4)
		for range 3 {
			gen := e.World.Generation
			e.send(3, syscall.SIGKILL)
			if err := e.Until(t.Context(), "a world of 3", func() bool { return e.World.Generation > gen }); err != nil {
				t.Fatal(err)
			}
			n := len(e.look())
			e.send(1, syscall.SIGKILL)
			e.until("a step", n, func(x entry) bool { return x.Event == "commit" && x.Generation > gen+1 })
			e.size(4)
		}
		e.finish()
	})
}

// TestElasticDeathWhileSending: a rank dies in the middle of the message that sends the state to a
// new worker, while gloo waits for the rest. The others continue, and no other worker is started
// again.
func TestElasticDeathWhileSending(t *testing.T) {
	by(t, []string{"gloo", "anew"}, func(t *testing.T, connection string) {
		e := startElastic(t, connection, nil, nil, "plain", "large", "slow")
		e.size(4)
		n := len(e.look())
		e.write(".dies", "")
		killed := e.send(3, syscall.SIGKILL)
		dies := e.until("the state", n, func(x entry) bool { return x.Event == "dies" })
		if err := os.Remove(e.ledger + ".dies"); err != nil {
			t.Fatal(err)
		}
		e.until("a step", n, func(x entry) bool { return x.Event == "commit" && x.Generation > dies.Generation })
		e.size(4)
		e.finish()
		for _, x := range e.Events {
			if x.Name == events.WorkerExited && x.Code != 0 && x.PID != killed && x.PID != dies.PID {
				t.Errorf("worker %d has failed, and was not killed", x.PID)
			}
		}
	})
}

// TestElasticHung: a rank that hangs before its part of a step is named and stopped while the
// others wait in torch, and the others continue without it.
func TestElasticHung(t *testing.T) {
	for _, way := range []string{"buffers", "plain"} {
		t.Run(way, func(t *testing.T) {
			by(t, []string{"gloo", "hvdrun"}, func(t *testing.T, connection string) {
				e := startElastic(t, connection, nil, []string{"--stall-warning", "3s", "--stall-timeout", "6s", "--drain-timeout", "1s"}, way, "slow")
				e.size(4)
				hung := e.World.Slots[2].PID
				e.write(".hang", fmt.Sprint(hung))
				if err := e.Until(t.Context(), "the end of the worker that hangs", func() bool {
					return slices.ContainsFunc(e.Events, func(x follow.Event) bool { return x.Name == events.WorkerExited && x.PID == hung })
				}); err != nil {
					t.Fatal(err)
				}
				for _, x := range e.Events {
					if x.Name == events.Stalled {
						t.Logf("%v", x.What)
					}
					if x.Name == events.Stalled && x.PID != hung || x.Name == events.WorkerExited && x.PID != hung {
						t.Errorf("%d hangs, and not %d: %v", hung, x.PID, x)
					}
				}
				e.size(4)
				if started := e.finish(); started != 5 {
					t.Errorf("%d workers were started, want 5", started)
				}
			})
		})
	}
}

// TestElasticHostsComeAndGo: discovery adds two ranks and then removes two; no worker is restarted.
func TestElasticHostsComeAndGo(t *testing.T) {
	by(t, connected, func(t *testing.T, connection string) {
		e := startElastic(t, connection, []follow.Stage{
			{Hosts: "localhost:2"}, {Hosts: "localhost:2 127.0.0.2:2", After: "more"}, {Hosts: "localhost:2", After: "fewer"},
		}, nil, "buffers", "slow")
		first := e.size(2)
		e.mark("more")
		e.size(4)
		e.mark("fewer")
		e.size(2)
		if started := e.finish(); started != 4 {
			t.Errorf("%d workers were started, want 4", started)
		}
		if last := e.entries[len(e.entries)-1]; !slices.ContainsFunc(e.entries, func(x entry) bool {
			return x.Event == "end" && x.PID == first.PID
		}) {
			t.Errorf("the first worker has not come to the end: %v", last)
		}
		if left := e.Events; slices.ContainsFunc(left, func(x follow.Event) bool { return x.Name == events.WorkerExited && x.Code != 0 }) {
			t.Errorf("a worker has failed: %v", left)
		}
	})
}

// TestElasticReplicas: a host of two ranks that share a model of FSDP2 is lost when one of them
// dies. The other host continues, and a new host gets the shards.
func TestElasticReplicas(t *testing.T) {
	by(t, connected, func(t *testing.T, connection string) {
		if !version().reconfigures {
			t.Skip("this torch has no such FSDP on CPUs")
		}
		e := startProgram(t, "hsdp.py", connection, []follow.Stage{{Hosts: "localhost:2 127.0.0.2:2"}},
			[]string{"--failure-policy", "host", "--drain-timeout", "100ms"})
		e.size(4)
		for _, rank := range []int{3, 0} {
			at, n := seconds(time.Now()), len(e.look())
			e.send(rank, syscall.SIGKILL)
			next := e.until("the next step", n, func(x entry) bool { return x.Event == "commit" && x.Size == 2 })
			t.Logf("rank %d was killed: the next step after %.0f ms", rank, (next.Time-at)*1e3)
			e.size(4)
		}
		if started := e.finish(); started != 4+2+2 {
			t.Errorf("%d workers were started for the loss of two hosts", started)
		}
	})
}

// mark creates the file that a stage waits for.
func (e *ledgerJob) mark(name string) {
	if err := os.WriteFile(filepath.Join(e.Dir, name), nil, 0o600); err != nil {
		e.t.Fatal(err)
	}
}

// TestElasticResume: hvdrun is killed and another one resumes the job. No worker is restarted, and
// the job also survives the next death.
func TestElasticResume(t *testing.T) {
	by(t, connected, func(t *testing.T, connection string) {
		e := startElastic(t, connection, nil, nil, "groups", "slow")
		e.size(4)
		folder, err := e.Folder()
		if err != nil {
			t.Fatal(err)
		}
		e.KillDriver()
		if e.Running, err = e.Resume(folder); err != nil {
			t.Fatal(err)
		}
		e.size(4)
		n := len(e.look())
		killed := e.send(2, syscall.SIGKILL)
		e.until("the next step", n, func(x entry) bool { return x.Event == "commit" && x.Size == 3 && x.PID != killed })
		if started := e.finish(); started > 6 {
			t.Errorf("%d workers were started", started)
		}
	})
}
