package torch

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// program returns the path of a program of this folder.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// runs runs a command in this folder and returns its output. The exit status must be 0 if succeeds
// is set, and not 0 otherwise.
func runs(t *testing.T, succeeds bool, command ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "XDG_CACHE_HOME="+t.TempDir(), "PYTHONPATH="+program(t, "../../python"))
	out, err := cmd.CombinedOutput()
	if (err == nil) != succeeds {
		t.Fatalf("%q: %v\n%s", command, err, out)
	}
	return string(out)
}

// elasticJob returns the command of a job of np workers on one host, at least one of which must
// live.
func elasticJob(np string, rest ...string) []string {
	return append([]string{hvdrun, "-np", np, "--min-np", "1", "--start-timeout", "10m", "--join-timeout", "5m",
		"--blacklist-cooldown-range", "1,2", *python}, rest...)
}

// TestWhole: the result of a training does not depend on deaths, whatever part of the state changes
// in a step, and in whatever way: buffers, values, tensors, a scheduler, an average of the weights,
// a data loader's workers, several passes per step, evaluations with collectives, lines of a log.
func TestWhole(t *testing.T) {
	needTorch(t)
	results := func(name string, command []string) []string {
		path := filepath.Join(t.TempDir(), name)
		runs(t, true, append(command, program(t, "whole.py"), path, path+".died-")...)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
	want := results("alone", []string{*python})[0]
	var counted struct {
		Buffers []float64
		Seen    int
		Log     bool
		History bool
		Lines   bool
	}
	if err := json.Unmarshal([]byte(want), &counted); err != nil || counted.Seen != 20*6 || !counted.Log || !counted.History || !counted.Lines ||
		len(counted.Buffers) != 3 || counted.Buffers[0] != 2*20 || counted.Buffers[1] != 2*20 || counted.Buffers[2] != 2*20 {
		t.Fatalf("%s, %v", want, err)
	}
	path := filepath.Join(t.TempDir(), "deaths")
	runs(t, true, elasticJob("4", program(t, "whole.py"), path, path+".died-", "backward", "evaluation", "commit")...)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	died, err := filepath.Glob(path + ".died-*")
	if err != nil || len(died) != 3 {
		t.Errorf("%q have died, %v", died, err)
	}
	for line := range strings.Lines(string(text)) {
		if got := strings.TrimSpace(line); got != want {
			t.Errorf("with three deaths\n%s\nwithout\n%s", got, want)
		}
	}
	if len(bytes.TrimSpace(text)) == 0 {
		t.Error("no rank has come to the end")
	}
}

// TestErrors: an error of one rank ends only that rank, under the error's name. If a program wraps
// the error of a broken world, the wrapped error counts as that of the world.
func TestErrors(t *testing.T) {
	needTorch(t)
	for way, want := range map[string]string{
		"wrapped": "",
		"own":     "connection to feature store lost",
		"after":   "though no rank is known to be lost, and is repeated: ",
	} {
		t.Run(way, func(t *testing.T) {
			out := runs(t, true, elasticJob("2", program(t, "errors.py"), filepath.Join(t.TempDir(), "mark"), way)...)
			if !strings.Contains(out, "has made 20 steps") || !strings.Contains(out, want) {
				t.Errorf("without %q, or the end of the training:\n%s", want, out)
			}
		})
	}
	for way, want := range map[string]string{
		"differs": "hvdrun: seed must be the same on all ranks: rank 0 has ",
		"parts":   "this step adds to gradients that the last step has left and that differ from rank to rank",
		"no_sync": "for several passes in a step, use step.micro(n) instead of no_sync",
	} {
		t.Run(way, func(t *testing.T) {
			if out := runs(t, false, elasticJob("2", program(t, "errors.py"), filepath.Join(t.TempDir(), "mark"), way)...); !strings.Contains(out, want) {
				t.Errorf("without %q:\n%s", want, out)
			}
		})
	}
}

// TestMistakes: each mistake of a program causes an error that names the part and the remedy.
func TestMistakes(t *testing.T) {
	needTorch(t)
	want := map[string]string{
		"good":                             "done",
		"good by epoch":                    "done",
		"optimizer in the body":            "the program steps the optimizer 'optimizer' within the step",
		"parameters by hand":               "the parameter 'weight' of the part 'model' has changed",
		"parameters by data":               "the parameter 'bias' of the part 'model' has changed",
		"parameters by data in commit":     "done",
		"a large object in the body":       "the part 'average' has changed since the step began",
		"a large object in commit":         "done",
		"commit replaces a large object":   "the part 'average' has changed since the step began",
		"evaluate replaces a large object": "the part 'average' has changed since the step began",
		"the model in commit":              "state.model is called within step.commit(update)",
		"commit twice":                     "commit is called twice in a step",
		"no commit":                        "to skip a step, call step.commit(lambda: None)",
		"commit of nothing":                "done",
		"a module that is no part":         "the optimizer 'optimizer' steps a parameter of shape (1, 3) that no part of the state has",
		"an optimizer that calls the loss": "step.commit(lambda: optimizer.step(closure))",
		"layers without shapes":            "the part 'model' has layers whose shape is not known yet",
		"a sampler by weights":             "cannot use data=DataLoader(sampler=WeightedRandomSampler)",
		"a sampler that repeats":           "cannot use data=DataLoader(sampler=RandomSampler)",
		"batches of its own":               "cannot use data=DataLoader(batch_sampler=list)",
		"a sampler of others":              "use torch.utils.data.Subset for a part of the data set",
		"a stream":                         "data has an IterableDataset",
		"a loader that shuffles":           "done",
		"a loader of a rank":               "done",
		"batch 0":                          "batch=0: a step needs at least one sample",
		"no samples":                       "samples=0: the data set is empty",
		"an unknown option":                "nonsense",
		"mean of a number":                 "step.mean of a float",
		"an unknown value":                 "'loss' is not a value of the state",
		"a module is assigned":             "'model' is not a value of the state",
		"a checkpoint of other shapes":     "the part 'model' does not fit",
		"a checkpoint without a part":      "has no part 'best' of the state",
		"a folder that is not there":       "False",
		"no optimizer":                     "no part of the state is an optimizer",
		"optimizers in a list":             "the part 'optimizers' is a list that contains a SGD",
		"optimizers in a dict":             "the part 'optimizers' is a dict that contains a SGD",
		"scheduler by the program too":     "each_epoch=['scheduler']",
		"scheduler in the body":            "the program has stepped the scheduler 'scheduler' within the step",
		"each_epoch of no scheduler":       "each_epoch names 'optimizer', but no part of that name is a scheduler",
		"tensor for a number":              "the value 'best' of the state cannot become a tensor",
		"part named save":                  "a part named 'save'",
		"part named _x":                    "a part named '_x'",
		"wrapped model":                    "the part 'model' is wrapped in DistributedDataParallel",
		"step of a tensor":                 "the number of completed steps must be an int",
		"total of a float":                 "total=2.0: the number of steps must be an int",
		"batch of a float":                 "batch=2.5: a number of samples must be an int",
		"every without evaluate":           "every=2: it must be a number of steps, or 'epoch', and needs evaluate",
		"epochs without samples":           "every='epoch' needs samples",
		"together in the loop":             "job.together follows job.steps(…, more=True)",
		"init of another backend":          "init was called with the backend 'gloo', and now with 'nccl'",
		"init twice":                       "True",
	}
	for line := range strings.Lines(runs(t, true, *python, program(t, "mistakes.py"))) {
		var said struct{ Name, Said string }
		if json.Unmarshal([]byte(line), &said) != nil {
			continue // a warning of torch
		}
		if w, is := want[said.Name]; !is || !strings.Contains(said.Said, w) {
			// torch 1.13 has no hooks: the changed parameter reveals the mistake.
			if said.Name != "optimizer in the body" || !strings.Contains(said.Said, "the parameter 'weight'") {
				t.Errorf("%s: %q, want %q", said.Name, said.Said, w)
			}
		}
		delete(want, said.Name)
	}
	for name := range want {
		t.Errorf("nothing was said of %q", name)
	}
}
