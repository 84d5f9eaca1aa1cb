package torch

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestPrograms runs the programs of programs.py: although ranks die, each ends with the right
// value, or with the error that says what is wrong.
func TestPrograms(t *testing.T) {
	for name, x := range map[string]struct {
		says string
		ends bool // well
	}{
		"alternating":       {"", true},
		"evaluation":        {"", true},
		"at_the_end":        {"", true},
		"own_loop":          {"", true},
		"by_sampler":        {"", true},
		"of_its_own":        {"", true},
		"skips_together":    {"", true},
		"operations":        {"", true},
		"loader_forkserver": {"", true},
		"loader_spawn":      {"", true},
		"prints":            {"rank 1 is at step 10", true},
		"enumerated":        {"programs.py:" + lineOf(t, "# after the context") + ": code after `with step` also runs", true},
		// torch reports the death, or a tensor that the process had not yet handed over.
		"dying_loader":     {"exited with code 1: ", true},
		"leaves_exit":      {"the program has left the loop over job.steps after step 10", true},
		"leaves__exit":     {"", true},
		"leaves_interrupt": {"KeyboardInterrupt", true},
		"leaves_segv":      {"signal 11", true},
		"leaves_term":      {"", true},

		"always_exits":       {"the program has left the loop over job.steps after step 10", true},
		"breaks":             {"programs.py:" + lineOf(t, "break  # before the end") + ": the program has left the loop over job.steps after step 11", false},
		"by_islice":          {"the program has left the loop over job.steps after step 19", false},
		"naive_end":          {"programs.py:" + lineOf(t, "# after the loop") + ": a collective after the loop has failed", false},
		"naive_evaluation":   {"programs.py:" + lineOf(t, "# between steps") + ": world 1 has lost a rank", false},
		"bare":               {"the gradients of the optimizer 'optimizer' differ from rank to rank", false},
		"bare_update":        {"the gradients of the optimizer 'optimizer' differ from rank to rank", false},
		"never_synchronized": {"the gradients of the optimizer 'optimizer' differ from rank to rank", false},
		"own_rate":           {"the parameters of the part 'model' differ from rank to rank", false},
		"torn_update":        {"The function in step.commit(update) must not use collectives", false},
		"parts_differ":       {"the part 'model' does not fit that of the other ranks", true},
		"skips_bad":          {"to skip a step, call step.commit(lambda: None)", true},
		"bad_sample":         {"ValueError: bad sample 3", true},
		"differ_batch":       {"batch must be the same on all ranks: rank 0 has ", false},
		"differ_total":       {"total must be the same on all ranks: rank 0 has ", false},
		"differ_samples":     {"samples must be the same on all ranks: rank 0 has ", false},
		"before_barrier":     {"worlds begin with job.steps", false},
		"before_sampler":     {"worlds begin with job.steps", false},
		"before_rank":        {"worlds begin with job.steps", false},
		"before_wrapper":     {"worlds begin with job.steps", false},
		"before_init":        {"the program or a library has called init_process_group", false},
		"before_neither":     {"the program has called hvd.init, and neither job.steps nor", true},
	} {
		t.Run(name, func(t *testing.T) {
			needTorch(t)
			command := elasticJob("3", program(t, "programs.py"), t.TempDir(), name)
			if !x.ends { // no more lives than needed
				t.Setenv("HVD_FAILURE_LIMIT", "2")
				t.Setenv("HVD_BLACKLIST_COOLDOWN_RANGE", "60,600")
				i := slices.Index(command, "--blacklist-cooldown-range")
				command = slices.Delete(command, i, i+2)
			}
			out := runs(t, x.ends, command...)
			if strings.Contains(out, "AssertionError") || x.ends && !strings.Contains(out, "all right") || !strings.Contains(out, x.says) {
				t.Errorf("without %q\n%s", x.says, out)
			}
		})
	}
}

// TestCellTwice: a notebook cell that creates a job and trains can be run again.
func TestCellTwice(t *testing.T) {
	needTorch(t)
	if out := runs(t, true, *python, program(t, "programs.py"), t.TempDir(), "cell_twice"); !strings.Contains(out, "all right") {
		t.Error(out)
	}
}

// TestFailsBeforeImport: if the program of a job fails before it has imported hvdrun.torch, the
// job's last line has the exception and the line of the program, whichever command launches it.
func TestFailsBeforeImport(t *testing.T) {
	needTorch(t)
	for name, x := range map[string]struct{ text, says string }{
		"syntax": {"import os\n\ndef f(:\n    pass\n", "SyntaxError: "},
		"module": {"import os\n\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' "},
		"file":   {"import json\ndef f():\n    json.load(open('no-such-data.json'))\nf()\n", "FileNotFoundError: [Errno 2] No such file or directory: 'no-such-data.json' "},
		"library": {"import torch\n\ntorch.load('no-such-checkpoint.pt')\n",
			"FileNotFoundError: [Errno 2] No such file or directory: 'no-such-checkpoint.pt' "},
		"group": {"import torch.distributed as dist\ndist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\nraise ValueError('no')\n",
			"ValueError: no "},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), name+".py")
			if err := os.WriteFile(path, []byte(x.text), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PYTHON_EXEC", *python)
			t.Setenv("HVD_FAILURE_LIMIT", "1")
			for _, command := range [][]string{
				{hvdrun, "-np", "1", *python, path}, elasticJob("1", path), {hvdrun, "torchrun", "--standalone", path},
			} {
				lines := strings.Split(strings.TrimSpace(runs(t, false, command...)), "\n")
				last := lines[len(lines)-1]
				if !strings.Contains(last, "rank 0") || !strings.Contains(last, x.says) || !strings.HasSuffix(last, "("+path+":3)") {
					t.Errorf("%q ends with\n%s", command, last)
				}
			}
		})
	}
}

// lineOf returns the number of the line of programs.py that ends with end.
func lineOf(t *testing.T, end string) string {
	t.Helper()
	text, err := os.ReadFile("programs.py")
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(string(text), "\n") {
		if strings.HasSuffix(line, end) {
			return strconv.Itoa(i + 1)
		}
	}
	t.Fatalf("programs.py has no line with %q", end)
	return ""
}
