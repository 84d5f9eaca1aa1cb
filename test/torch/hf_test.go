package torch

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	events "github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
)

// hfVersions returns the versions of transformers and accelerate, or "" if they are not installed.
var hfVersions = sync.OnceValue(func() string {
	out, _ := exec.Command(*python, "-c", "import transformers, accelerate; print(transformers.__version__, accelerate.__version__)").Output()
	return strings.TrimSpace(string(out))
})

func needHF(t *testing.T) {
	t.Helper()
	if hfVersions() == "" {
		t.Skipf("%s has no transformers and accelerate: programs of these are NOT run (make check-torch SUITE=sid brings them)", *python)
	}
	t.Logf("torch %s, transformers and accelerate %s", version().number, hfVersions())
}

// startHF starts a job of hf.py, or of another program that writes such a ledger, with a worker for
// each slot of the first stage.
func startHF(t *testing.T, program, ledger string, steps int, stages []follow.Stage, ways ...string) *ledgerJob {
	t.Helper()
	script, err := filepath.Abs(program)
	if err != nil {
		t.Fatal(err)
	}
	slots := strings.TrimPrefix(stages[0].Hosts, "localhost:")
	e := &ledgerJob{t: t, ledger: ledger}
	e.Running = follow.Programs{Hvdrun: hvdrun}.Test(t, follow.Job{
		Stages: stages,
		Flags: []string{"-np", slots, "--min-np", "1", "--discovery-interval", "100ms", "--start-timeout", "10m", "--join-timeout", "5m",
			"--blacklist-cooldown-range", "1,2"},
		Command: append([]string{*python, script, ledger, fmt.Sprint(steps)}, ways...),
		Env:     []string{"XDG_CACHE_HOME=" + t.TempDir(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"},
	})
	return e
}

// three is the only stage of a job of three workers.
var three = []follow.Stage{{Hosts: "localhost:3"}}

// hfTraining is what a ledger records about a training.
type hfTraining struct {
	losses, evaluations, rates map[int]float64
	after                      []float64
	weights                    float64
}

// end waits for the end of a job whose workers must succeed, and reads the ledger. It checks that
// all ranks of one world made each step, and that each sample was used once per epoch, and each log
// line and checkpoint was written once.
func (e *ledgerJob) end(steps, samples, batch int) hfTraining {
	e.t.Helper()
	res, err := e.Wait()
	if err != nil || res.Status != 0 {
		e.t.Fatalf("status %d, %v\n%s", res.Status, err, follow.Tail(e.OutputPath(), 4000))
	}
	told := hfTraining{losses: map[int]float64{}, evaluations: map[int]float64{}, rates: map[int]float64{}}
	once := func(all map[int]float64, x entry) {
		if _, ok := all[x.Step]; ok {
			e.t.Errorf("%s of step %d is told twice", x.Event, x.Step)
		}
		all[x.Step] = x.Sum
	}
	type place struct {
		step int
		gen  uint64
	}
	saves, seen, parts, made := map[int]float64{}, map[int]int{}, map[place]map[int][]int{}, map[int]uint64{}
	for _, x := range e.look() {
		switch x.Event {
		case "part":
			at := place{x.Step, x.Generation}
			if parts[at] == nil {
				parts[at] = map[int][]int{}
			}
			parts[at][x.Rank] = x.Indices
		case "commit":
			made[x.Step] = x.Generation
		case "loss":
			once(told.losses, x)
			told.rates[x.Step] = x.Rate
		case "evaluate":
			once(told.evaluations, x)
		case "save":
			once(saves, x)
		case "after":
			told.after = append(told.after, x.Sum)
		case "end":
			told.weights = x.Sum
		}
	}
	perEpoch := (samples + batch - 1) / batch
	for step := range steps {
		count := 0
		for _, indices := range parts[place{step, made[step]}] {
			for _, i := range indices {
				count++
				if seen[i]++; seen[i] != step/perEpoch+1 {
					e.t.Fatalf("sample %d comes %d times in the steps up to %d", i, seen[i], step)
				}
			}
		}
		if want := min(batch, samples-step%perEpoch*batch); count != want {
			e.t.Errorf("step %d has %d samples, want %d", step, count, want)
		}
	}
	e.t.Logf("%d workers were started", follow.Count(res.Events, events.WorkerStarted))
	return told
}

// same checks that two trainings are the same, except for the order of sums.
func (got hfTraining) same(t *testing.T, want hfTraining) {
	t.Helper()
	compare := func(what string, got, want map[int]float64) {
		most := 0.0
		for step, value := range want {
			other, ok := got[step]
			if !ok {
				t.Errorf("%s of step %d is missing", what, step)
			}
			most = max(most, math.Abs(other-value)/max(1, math.Abs(value)))
		}
		if t.Logf("%s: %.1e at most", what, most); most > 1e-6 || len(got) != len(want) {
			t.Errorf("%s differs by %g, at %d steps and %d", what, most, len(got), len(want))
		}
	}
	compare("the loss", got.losses, want.losses)
	compare("the loss of the evaluation", got.evaluations, want.evaluations)
	compare("the learning rate", got.rates, want.rates)
	for _, value := range got.after {
		if math.Abs(value-want.after[0]) > 1e-6 {
			t.Errorf("the evaluation after the training gives %g, want %g", value, want.after[0])
		}
	}
	if diff := math.Abs(got.weights/want.weights - 1); diff > 1e-5 {
		t.Errorf("the weights differ by %g", diff)
	}
}

// died checks the number of ranks that have died.
func (e *ledgerJob) died(want int) {
	e.t.Helper()
	n := 0
	for _, x := range e.look() {
		if x.Event == "dies" {
			n++
		}
	}
	if n != want {
		e.t.Errorf("%d ranks have died, want %d", n, want)
	}
}

// full waits for the gate before a step, and until this number of workers have become ready since
// the beginning; then it opens the gate.
func (e *ledgerJob) full(step, ready int) {
	e.t.Helper()
	e.until(fmt.Sprintf("the gate of step %d", step), 0, func(x entry) bool { return x.Event == "gate" && x.Step == step })
	if err := e.Until(e.t.Context(), "newcomers", func() bool { return follow.Count(e.Events, events.WorkerReady) >= ready }); err != nil {
		e.t.Fatal(err)
	}
	e.write(fmt.Sprint(".", step), "")
}

// TestTrainerDeaths: a rank dies in a backward pass, a log, an evaluation, a save, between the
// commit of a step and its update, or at the end of an epoch. The training must be the same as
// without deaths.
func TestTrainerDeaths(t *testing.T) {
	for _, x := range []struct {
		ways, deaths   []string
		samples, batch int
	}{
		{[]string{"odd", "best", "after"},
			[]string{"backward:2:3", "log:0:7", "evaluate:1:12", "update:0:14", "save:0:18", "epoch:1:21", "after:0:24"}, 500, 24},
		{[]string{"odd", "mean", "plateau", "first"}, []string{"log:0:4", "evaluate:1:12"}, 500, 24},
		{[]string{"odd", "accumulate", "workers"}, []string{"backward:2:3", "epoch:1:11"}, 500, 48},
		{[]string{"stream"}, []string{"backward:1:5", "evaluate:0:12"}, 480, 24},
		{[]string{"stream", "workers"}, []string{"backward:1:5", "update:0:13"}, 480, 24},
	} {
		t.Run(strings.Join(x.ways, " "), func(t *testing.T) {
			needHF(t)
			dir := t.TempDir()
			undisturbed := startHF(t, "hf.py", filepath.Join(dir, "undisturbed"), 24, three, x.ways...).end(24, x.samples, x.batch)
			ways := slices.Clone(x.ways)
			for i, death := range x.deaths {
				ways = append(ways, "die:"+death)
				if i%2 == 0 && i > 0 {
					var step int
					fmt.Sscanf(death[strings.LastIndex(death, ":")+1:], "%d", &step)
					ways = append(ways, fmt.Sprintf("gate:%d", step-2))
				}
			}
			e := startHF(t, "hf.py", filepath.Join(dir, "disturbed"), 24, three, ways...)
			for i := 2; i < len(x.deaths); i += 2 {
				var step int
				fmt.Sscanf(x.deaths[i][strings.LastIndex(x.deaths[i], ":")+1:], "%d", &step)
				e.full(step-2, 3+i)
			}
			e.end(24, x.samples, x.batch).same(t, undisturbed)
			e.died(len(x.deaths))
		})
	}
}

// TestTrainerHostsComeAndGo: discovery adds two ranks and removes one; running workers continue.
func TestTrainerHostsComeAndGo(t *testing.T) {
	needHF(t)
	dir := t.TempDir()
	undisturbed := startHF(t, "hf.py", filepath.Join(dir, "undisturbed"), 24, []follow.Stage{{Hosts: "localhost:2"}}, "odd").end(24, 500, 16)
	e := startHF(t, "hf.py", filepath.Join(dir, "disturbed"), 24, []follow.Stage{
		{Hosts: "localhost:2"}, {Hosts: "localhost:2 127.0.0.2:2", After: "more"}, {Hosts: "localhost:2 127.0.0.2:1", After: "fewer"},
	}, "odd", "gate:6", "gate:12")
	e.until("the gate of step 6", 0, func(x entry) bool { return x.Event == "gate" && x.Step == 6 })
	e.mark("more")
	e.full(6, 4)
	e.until("the gate of step 12", 0, func(x entry) bool { return x.Event == "gate" && x.Step == 12 })
	e.mark("fewer")
	if err := e.Until(t.Context(), "the notification", func() bool { return follow.Count(e.Events, events.HostsUpdated) > 1 }); err != nil {
		t.Fatal(err)
	}
	e.write(".12", "")
	e.end(24, 500, 16).same(t, undisturbed)
	sizes := map[int]bool{}
	for _, x := range e.look() {
		if x.Event == "commit" {
			sizes[x.Size] = true
		}
	}
	if started := follow.Count(e.Events, events.WorkerStarted); !sizes[2] || !sizes[4] || !sizes[3] || started != 4 {
		t.Errorf("worlds of %v, %d workers were started", sizes, started)
	}
}

// TestTrainerResume: two ranks continue the training of three from its checkpoint, with the batch
// of three.
func TestTrainerResume(t *testing.T) {
	needHF(t)
	dir := t.TempDir()
	undisturbed := startHF(t, "hf.py", filepath.Join(dir, "undisturbed"), 24, three, "odd").end(24, 500, 24)
	ledger := filepath.Join(dir, "resumed")
	if res, err := startHF(t, "hf.py", ledger, 24, three, "odd", "stop:12").Wait(); err != nil || res.Status != 0 {
		t.Fatal(res.Status, err)
	}
	// An incomplete checkpoint is skipped.
	if err := os.Mkdir(ledger+".out/checkpoint-18", 0o700); err != nil {
		t.Fatal(err)
	}
	startHF(t, "hf.py", ledger, 24, []follow.Stage{{Hosts: "localhost:2"}}, "odd", "resume").end(24, 500, 24).same(t, undisturbed)
}

// TestTrainerRefuses: what an elastic Trainer does not support is refused by name before it begins.
func TestTrainerRefuses(t *testing.T) {
	needHF(t)
	out, err := exec.Command(*python, "hf_refuses.py").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// TestAccelerate: a loop over job.steps with accelerate's parts continues when ranks die.
func TestAccelerate(t *testing.T) {
	needHF(t)
	for _, way := range []string{"", "scaled"} {
		t.Run(way, func(t *testing.T) {
			dir := t.TempDir()
			undisturbed := startHF(t, "hf_accelerate.py", filepath.Join(dir, "undisturbed"), 24, three, way).end(24, 500, 24)
			e := startHF(t, "hf_accelerate.py", filepath.Join(dir, "disturbed"), 24, three, way, "gate:9", "die:backward:2:6", "die:evaluate:0:11")
			e.full(9, 4)
			e.end(24, 500, 24).same(t, undisturbed)
			e.died(2)
		})
	}
}

// TestScripts: scripts in the way of run_glue.py and run_translation.py end with the same metrics,
// predictions and files if a rank dies. The metrics are those of all samples, each counted once.
func TestScripts(t *testing.T) {
	for script, samples := range map[string]float64{"glue.py": 33, "translation.py": 13} {
		t.Run(script, func(t *testing.T) {
			needHF(t)
			run := func(dies bool) any {
				dir := t.TempDir()
				died := filepath.Join(dir, "died")
				if !dies {
					if err := os.WriteFile(died, nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				out := runs(t, true, elasticJob("2", program(t, script), dir)...)
				if _, err := os.Stat(died); err != nil {
					t.Errorf("nobody has died: %v\n%s", err, out)
				}
				got := results(t, filepath.Join(dir, "result"))
				if len(got) != 1 {
					t.Fatalf("%d results\n%s", len(got), out)
				}
				return got[0]
			}
			want, got := run(false), run(true)
			if !alike(got, want, 1e-4) {
				t.Errorf("with a death\n%v\nwithout\n%v", got, want)
			}
			if counted := want.([]any)[0]; counted != samples {
				t.Errorf("the metrics are of %v samples, want %v", counted, samples)
			}
		})
	}
}
