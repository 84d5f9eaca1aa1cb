package torch

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestBackend runs the tests of the backend hvdrun, in Python: operations against gloo's, order,
// deaths, signals, forks, DDP.
func TestBackend(t *testing.T) {
	needTorch(t)
	library := filepath.Join(t.TempDir(), "libhvdrun.so")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-tags", "netgo,osusergo", "-o", library, "../../cmd/libhvdrun")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), *python, "-W", "ignore", "../../python/tests/test_backend.py")
	cmd.Env = append(os.Environ(), "HVD_LIBRARY="+library, "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
