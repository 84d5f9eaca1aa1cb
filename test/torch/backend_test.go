package torch

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// buildLibrary builds libhvdrun.so beside hvdrun, where that finds it.
var buildLibrary = sync.OnceValues(func() (path string, err error) {
	path = filepath.Join(filepath.Dir(hvdrun), "libhvdrun.so")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-tags", "netgo,osusergo", "-o", path, "../../cmd/libhvdrun")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, nil
})

func library(t *testing.T) string {
	t.Helper()
	path, err := buildLibrary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestBackend runs the tests of the backend hvdrun, in Python: operations against gloo's, order,
// deaths, signals, forks, DDP.
func TestBackend(t *testing.T) { runTests(t, "test_backend.py") }

// TestWorlds runs those of process groups that are reconfigured, gloo's and hvdrun's.
func TestWorlds(t *testing.T) { runTests(t, "test_worlds.py") }

func runTests(t *testing.T, file string) {
	t.Helper()
	needTorch(t)
	cmd := exec.CommandContext(t.Context(), *python, "-W", "ignore", "../../python/tests/"+file)
	cmd.Env = append(os.Environ(), "HVD_LIBRARY="+library(t), "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
