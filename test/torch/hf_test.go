package torch

import (
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	events "github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/test/follow"
)

// hfVersions are those of transformers and accelerate; empty: they are not there.
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

// startHF starts a job of hf_accelerate.py, with a worker for each
// slot of the first stage.
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

// three are the hosts of a job of three workers.
var three = []follow.Stage{{Hosts: "localhost:3"}}

// hfTraining is what a ledger tells of a training.
type hfTraining struct {
	losses, evaluations, rates map[int]float64
	after                      []float64
	weights                    float64
}

// end awaits the end of a job whose workers succeed, and reads what its ledger tells: each step was
// made in one world by all of its ranks, and each sample came once in an epoch, each log line and
// checkpoint once.
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
	saves, seen, made := map[int]float64{}, map[int]int{}, map[int]map[int][]int{}
	for _, x := range e.look() {
		switch x.Event {
		case "commit":
			if made[x.Step] == nil || made[x.Step][x.Rank] != nil { // a step that a dead world has made is made again
				made[x.Step] = map[int][]int{}
			}
			made[x.Step][x.Rank] = append([]int{}, x.Indices...)
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
		for _, indices := range made[step] {
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

// same checks that two trainings are the same, but for the order of sums.
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
	if diff := math.Abs(got.weights/want.weights - 1); diff > 1e-5 {
		t.Errorf("the weights differ by %g", diff)
	}
}

// died checks how many ranks have died.
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

// TestAccelerate: a loop of accelerate's parts over job.steps goes on when ranks die.
func TestAccelerate(t *testing.T) {
	needHF(t)
	dir := t.TempDir()
	undisturbed := startHF(t, "hf_accelerate.py", filepath.Join(dir, "undisturbed"), 24, three).end(24, 500, 24)
	e := startHF(t, "hf_accelerate.py", filepath.Join(dir, "disturbed"), 24, three, "die:backward:2:3", "die:evaluate:0:11")
	e.end(24, 500, 24).same(t, undisturbed)
	e.died(2)
}
