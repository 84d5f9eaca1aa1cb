package torch

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestOthers: programs of other libraries run unchanged under hvdrun torchrun and under hvdrun.
func TestOthers(t *testing.T) {
	for name, needs := range map[string]string{
		"process_group": "torch", "accelerate": "accelerate", "ignite": "ignite", "xgboost": "xgboost", "trainer": "transformers",
		"naive_trainer": "transformers",
	} {
		for by, command := range map[string][]string{
			"torchrun": {"torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"},
			"hvdrun":   {"-np", "2", *python},
		} {
			t.Run(name+"/"+by, func(t *testing.T) {
				needTorch(t)
				if err := exec.Command(*python, "-c", "import "+needs).Run(); err != nil {
					t.Skipf("%s has no %s: NOT run", *python, needs)
				}
				t.Setenv("PYTHON_EXEC", *python)
				t.Setenv("USE_LIBUV", "0") // Debian's torch lacks libuv
				if name == "naive_trainer" && by == "torchrun" {
					t.Skip("it is for hvdrun")
				}
				dir := t.TempDir()
				naive := name == "naive_trainer"
				out := runs(t, !naive, append(append([]string{hvdrun}, command...), program(t, "others.py"), dir, name)...)
				if strings.Count(out, "all right") != 2 && !naive {
					t.Errorf("not all ranks are right\n%s", out)
				}
				if said := strings.Contains(out, "the program or a library has called init_process_group"); said != naive {
					t.Errorf("said that the program makes its own process group: %v\n%s", said, out)
				}
				if _, err := os.Stat(dir + "/dead"); (err == nil) != (name == "trainer" && by == "torchrun") {
					t.Errorf("a rank has died: %v", err == nil)
				}
			})
		}
	}
}
