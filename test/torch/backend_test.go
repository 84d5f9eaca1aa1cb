package torch

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// buildLibrary builds libhvdrun.so beside hvdrun, where hvdrun looks for it.
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

// TestBackend runs the Python tests of the backend hvdrun: operations compared with gloo's, order,
// deaths, signals, forks, DDP.
func TestBackend(t *testing.T) { runTests(t, "test_backend.py") }

// TestWorlds runs the tests of reconfigured process groups, gloo's and hvdrun's.
func TestWorlds(t *testing.T) { runTests(t, "test_worlds.py") }

// TestJob runs the tests of a Job without other ranks.
func TestJob(t *testing.T) { runTests(t, "test_job.py") }

// TestValues: a state that is read from a checkpoint is the same as the one that was written.
func TestValues(t *testing.T) { runTests(t, "test_values.py") }

// TestEnvironment: a process that a worker starts has the ranks and sizes of the newest world in
// its environment.
func TestEnvironment(t *testing.T) { runTests(t, "test_environ.py") }

// cases is the path of PyTorch's own test of reconfigured process groups, at which -python can read
// it. It is in PyTorch's repository, at the tag of the torch that is tested.
var cases = flag.String("cases", "", "`file` test/distributed/test_c10d_fault_tolerance.py of PyTorch, which TestCases runs")

// TestCases runs the file unchanged, as a worker of hvdrun: with gloo and a store of torch, with
// gloo and the job's store, and with the backend hvdrun.
func TestCases(t *testing.T) {
	needTorch(t)
	if *cases == "" || !version().reconfigures {
		t.Skip("PyTorch's own cases are NOT run: there is no -cases, or torch is older than they are")
	}
	script, err := filepath.Abs("cases.py")
	if err != nil {
		t.Fatal(err)
	}
	library(t)
	r := follow.Programs{Hvdrun: hvdrun}.Test(t, follow.Job{
		Flags: []string{"-np", "1", "-H", "localhost:1"}, Command: []string{*python, script, *cases},
		Env: []string{"XDG_CACHE_HOME=" + t.TempDir(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"},
	})
	res, err := r.Wait()
	out := follow.Tail(r.OutputPath(), 20000)
	t.Logf("%s", out)
	if err != nil || res.Status != 0 {
		t.Errorf("status %d, %v", res.Status, err)
	}
}

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

// installed creates a Python environment, without a network, and installs a wheel with the library
// into it.
func installed(t *testing.T) (fresh string) {
	t.Helper()
	needTorch(t)
	if out, err := exec.Command(*python, "-c", "import pip, setuptools, wheel").CombinedOutput(); err != nil {
		t.Skipf("no wheel is built: %s", out)
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "python")
	fresh = filepath.Join(dir, "fresh")
	if err := os.CopyFS(source, os.DirFS("../../python")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(library(t), filepath.Join(source, "hvdrun", "libhvdrun.so")); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), *python, append([]string{"-m"}, args...)...)
		cmd.Env = append(os.Environ(), "HVD_WHEEL_VERSION=v1.2.3-rc.1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	run("pip", "-q", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", dir, source)
	wheels, err := filepath.Glob(filepath.Join(dir, "hvdrun-1.2.3rc1-py3-none-linux_*.whl"))
	if err != nil || len(wheels) != 1 {
		t.Fatalf("%q, %v: want one wheel of this platform", wheels, err)
	}
	run("venv", "--without-pip", "--system-site-packages", fresh)
	run("pip", "-q", "--python", fresh, "install", "--no-deps", "--no-index", wheels[0])
	return fresh
}

// TestWheel: torch finds the wheel's backend, and the wheel's metadata are complete.
func TestWheel(t *testing.T) {
	fresh := installed(t)
	// The environment's Python is in the root of -python, which only -python enters.
	enter := "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
	cmd := exec.CommandContext(t.Context(), *python, "-c", enter, filepath.Join(fresh, "bin", "python3"), "-c", `import sys
from importlib import metadata
import torch, torch.distributed as dist
import hvdrun.torch
assert hvdrun.torch.__file__.startswith(sys.argv[1]), hvdrun.torch.__file__
about = metadata.metadata("hvdrun")
assert hvdrun.__version__ == about["Version"] == "1.2.3rc1", (hvdrun.__version__, about["Version"])
assert about["Author"] == "The authors of hvdrun" and "PyTorch" in about["Summary"] and "Apache-2.0" in (about["License"], about["License-Expression"]), about
assert "hvd.init" in about.get_payload() and about.get_all("Project-URL") and "Typing :: Typed" in about.get_all("Classifier"), about
assert [r for r in about.get_all("Requires-Dist") if "extra" not in r] == [], about
assert any(f.name == "py.typed" for f in metadata.files("hvdrun")), metadata.files("hvdrun")
if not hasattr(dist, "_reconfigure"):  # it does not look for entry points either
    import hvdrun._backend
    hvdrun._backend.register()
dist.init_process_group("hvdrun", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print(dist.get_backend())`, fresh)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "hvdrun\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestTypes: mypy --strict accepts a user's program, and reports an error in each line that is
// marked as wrong, of the kind that the mark names.
func TestTypes(t *testing.T) {
	fresh := installed(t)
	if out, err := exec.Command(*python, "-c", "import mypy").CombinedOutput(); err != nil {
		t.Skipf("types are NOT checked: %s", out)
	}
	program, err := os.ReadFile("typed.py")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), *python, "-m", "mypy", "--strict", "--no-warn-unused-ignores", "--no-error-summary",
		"--hide-error-context", "--cache-dir", t.TempDir(), "--python-executable", filepath.Join(fresh, "bin", "python3"), "typed.py")
	out, _ := cmd.CombinedOutput() // mypy fails because of the marked lines
	found := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		file, rest, _ := strings.Cut(line, ":")
		number, text, is := strings.Cut(rest, ": error: ")
		note := strings.Contains(rest, ": note: ") // some versions say where a function is that a call does not fit
		if !note && (file != "typed.py" || !is) {
			t.Errorf("mypy: %s", line)
		}
		if is {
			found[number] += text
		}
	}
	i := 0
	for line := range strings.Lines(string(program)) {
		i++
		number := strconv.Itoa(i)
		_, mark, _ := strings.Cut(line, "  # E: ")
		want := strings.TrimSpace(mark)
		if got := found[number]; !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("typed.py:%d: mypy says %q, want %q", i, got, want)
		}
	}
}
