package torch

import (
	"strings"
	"testing"
)

// TestPrograms runs the programs of programs.py: each has the right value in the end, though ranks
// die, or ends with the error that says what is wrong.
func TestPrograms(t *testing.T) {
	for name, fails := range map[string]string{
		"alternating":       "",
		"evaluation":        "",
		"at_the_end":        "",
		"own_loop":          "",
		"loader_forkserver": "",
		"loader_spawn":      "",
		"differ_batch":      "batch must be the same on all ranks: rank 0 has ",
		"differ_total":      "total must be the same on all ranks: rank 0 has ",
		"differ_samples":    "samples must be the same on all ranks: rank 0 has ",
		"too_early":         "worlds begin with job.steps",
	} {
		t.Run(name, func(t *testing.T) {
			needTorch(t)
			out := runs(t, fails == "", elasticJob("3", program(t, "programs.py"), t.TempDir(), name)...)
			if strings.Contains(out, "AssertionError") || strings.Contains(out, "all right") != (fails == "") || !strings.Contains(out, fails) {
				t.Errorf("without %q\n%s", fails, out)
			}
		})
	}
}

// TestCellTwice: a cell of a notebook that makes a job and trains may be run again.
func TestCellTwice(t *testing.T) {
	needTorch(t)
	if out := runs(t, true, *python, program(t, "programs.py"), t.TempDir(), "cell_twice"); !strings.Contains(out, "all right") {
		t.Error(out)
	}
}
