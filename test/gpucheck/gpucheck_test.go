package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// programVariable makes the test's binary the program.
const programVariable = "GPUCHECK_TEST_PROGRAM"

func TestMain(m *testing.M) {
	// This check exists only for tests: it never ends, and neither does the process that it starts
	// in a new session.
	checks = append(checks, check{"hang", 3 * time.Second, func(ctx context.Context, _ *options) ([]figure, error) {
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return nil, cmd.Wait()
	}})
	program := os.Getenv(programVariable) != "" || len(os.Args) > 1 && slices.Contains([]string{"check", "rank", "worker"}, os.Args[1])
	if program {
		os.Exit(start())
	}
	os.Exit(sandbox.Run(m, nil))
}

// program is a run of gpucheck, whose processes are found by the library's directory in their
// environment.
func program(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), programVariable+"=1")
	return cmd
}

func left() []int { return follow.Processes("FAKECUDA_FOLDER=" + os.Getenv("FAKECUDA_FOLDER")) }

// repeated are the checks that -short leaves out of TestWhole: other checks do the same with four
// ranks, TestWrongSums with two, and the tests of collective/cuda kill ranks of NCCL.
var repeated = []string{"ipc 2", "staging 2", "nccl 2", "sigkill nccl"}

// TestWhole: all checks with a simulated driver at small sizes.
func TestWhole(t *testing.T) {
	library := cudatest.Library(t)
	dir := t.TempDir()
	// The programs are built as by make gpu-programs: without cgo. With -short, this binary is
	// gpucheck.
	self, programs := os.Args[0], []string{"github.com/hvdrun/hvdrun/cmd/hvdrun", "github.com/hvdrun/hvdrun/examples/gpu"}
	if !testing.Short() {
		self, programs = filepath.Join(dir, "gpucheck"), append(programs, "github.com/hvdrun/hvdrun/test/gpucheck")
	}
	if err := sandbox.Build(dir, programs...); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "out.json")
	cmd := program(t.Context(), "-quick", "-driver", library, "-json", path, "-bin", dir,
		"-nccl", cudatest.NCCL(t, library), "-python", "/nowhere/python3")
	cmd.Path = self
	if testing.Short() {
		var names []string
		for _, c := range checks {
			if c.name != "hang" && !slices.Contains(repeated, c.name) {
				names = append(names, c.name)
			}
		}
		cmd.Args = append(cmd.Args, "-only", "^("+strings.Join(names, "|")+")$")
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r summary
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	want, count := map[string]string{"torch": "skip"}, len(checks)-1
	if testing.Short() {
		count -= len(repeated)
	}
	for _, done := range r.Results {
		if status := want[done.Check]; done.Status != status && (status != "" || done.Status != "pass") {
			t.Errorf("%s: %s: %s", done.Check, done.Status, done.Reason)
		}
		if done.Status == "skip" && done.Reason == "" || done.Status == "pass" && len(done.Figures) == 0 {
			t.Errorf("%s: %+v", done.Check, done)
		}
		for _, f := range done.Figures {
			if f.Met != nil || !bytes.Contains(out, []byte(f.String())) {
				t.Errorf("%s: %v is not in the table, or was judged", done.Check, f)
			}
		}
	}
	if len(r.Results) != count || !r.Quick || r.Driver != library || r.Device != "Fake in C" || !bytes.Contains(out, []byte("the figures mean nothing")) {
		t.Errorf("%d results:\n%s", len(r.Results), out)
	}
	if pids := left(); len(pids) > 0 {
		t.Errorf("processes are left: %v", pids)
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

// TestWrongSums: the checks fail for a device with a single wrong bit.
func TestWrongSums(t *testing.T) {
	library := cudatest.Library(t, "-DWRONG=1")
	out, err := program(t.Context(), "-quick", "-driver", library, "-only", "^(kernels|ipc 2|staging 2)$",
		"-nccl", "/nowhere/libnccl.so.2").CombinedOutput()
	text := string(out)
	if err == nil || !strings.Contains(text, "sum, 1 elements, place 2 of float32") || !strings.Contains(text, "sum of 2 ranks of float32") ||
		!strings.Contains(text, "checks: 1 passed, 2 failed, 0 skipped") {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestNoDriver(t *testing.T) {
	cmd := program(t.Context(), "-driver", "/nowhere/libcuda.so.1")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || strings.Count(string(out), "\n") != 1 ||
		!strings.HasPrefix(string(out), "gpucheck: no GPU can be used here, nothing was checked: cuda: not available: ") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestHang: a check that does not end fails, and none of its processes remains.
func TestHang(t *testing.T) {
	library := cudatest.Library(t)
	cmd := program(t.Context(), "-driver", library, "-only", "hang|driver")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "not done after 3s") ||
		!strings.Contains(string(out), "checks: 1 passed, 1 failed, 0 skipped") {
		t.Errorf("%v\n%s", err, out)
	}
	if pids := left(); len(pids) > 0 {
		t.Errorf("processes are left: %v", pids)
	}
}

// TestInterrupted: Ctrl-C leaves nothing behind.
func TestInterrupted(t *testing.T) {
	library := cudatest.Library(t)
	cmd := program(t.Context(), "-driver", library, "-only", "generations")
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := sandbox.Expired(); len(left()) < 6; { // gpucheck, the check, and its four ranks
		select {
		case <-deadline:
			t.Fatalf("%d processes: %s", len(left()), &said)
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() != 130 || !strings.Contains(said.String(), `interrupted in check "generations"`) {
		t.Errorf("%v: %s", err, &said)
	}
	if pids := left(); len(pids) > 0 {
		t.Errorf("processes are left: %v", pids)
	}
}

// TestTorch: the program is run and its output parsed, with a substitute for PyTorch.
func TestTorch(t *testing.T) {
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("there is no Python: ", err)
	}
	here, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", here)
	t.Setenv("PYTHONDONTWRITEBYTECODE", "1")
	o := &options{Temp: t.TempDir(), Python: python, Copy: 1e12}
	all, err := checkTorch(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range all {
		names = append(names, f.Name)
		if f.Value <= 0 || f.Met != nil {
			t.Errorf("%+v", f)
		}
	}
	if want := []string{"NCCL 2.30.7: ranks", "devices", "4 KiB, median", "4 KiB, worst", "1 MiB", "64 MiB", "256 MiB",
		"256 MiB, share of the bound B/(2n), n = 2"}; !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
	t.Setenv("FAKE_NCCL", "2.29.1")
	if _, err := checkTorch(t.Context(), o); resultOf(nil, err).Status != "skip" || !strings.Contains(err.Error(), "2.29.1 allows one rank a GPU") {
		t.Error(err)
	}
	if testing.Short() { // a real PyTorch takes seconds to load
		return
	}
	t.Setenv("PYTHONPATH", "")
	if _, err := checkTorch(t.Context(), o); err == nil || !regexp.MustCompile("there is no PyTorch|no CUDA or no NCCL|one rank a GPU").MatchString(err.Error()) {
		t.Error(err)
	}
}

// TestWhereNCCLIs: a given library takes precedence; Python's packages are the last choice.
func TestWhereNCCLIs(t *testing.T) {
	if _, err := nccl.Load(""); err == nil {
		t.Skip("there is NCCL here")
	}
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("there is no Python: ", err)
	}
	t.Setenv("HVD_NCCL_LIBRARY", "")
	packages := t.TempDir()
	path := filepath.Join(packages, "nvidia", "nccl", "lib", "libnccl.so.2")
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, nil, 0o666)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ named, python, packages, want string }{
		{"/opt/nccl.so", python, packages, "/opt/nccl.so"}, {"", python, packages, path}, {"", python, t.TempDir(), ""}, {"", "/nowhere/python3", packages, ""},
	} {
		t.Setenv("PYTHONPATH", c.packages)
		if got := ncclOf(t.Context(), &options{NCCL: c.named, Python: c.python}); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// TestJudgements: the slowest rank counts, targets depend on the card's copy bandwidth, and small
// sizes are not judged.
func TestJudgements(t *testing.T) {
	answers := []answer{{Speeds: []speed{{4 << 10, 50e-6, 70e-6}, {256 << 20, 1e-3, 1}}},
		{Speeds: []speed{{4 << 10, 59e-6, 60e-6}, {256 << 20, 2 << 20 / 1e9, 1}}}}
	for _, c := range []struct {
		n     int
		copy  float64
		want  string
		quick bool
	}{
		{2, 800e9, "us met; us -; GB/s -;  met", false}, // 128 GB/s of 200
		{2, 900e9, "us met; us -; GB/s -;  missed", false},
		{4, 2000e9, "us met; us -; GB/s -;  met", false}, // of 250
		{4, 0, "us met; us -; GB/s -", false},
		{2, 800e9, "us -; us -; GB/s -;  -", true},
	} {
		var got []string
		for _, f := range speedFigures(&options{Copy: c.copy, Quick: c.quick}, c.n, "ipc", answers) {
			verdict := "-"
			if f.Met != nil {
				verdict = map[bool]string{true: "met", false: "missed"}[*f.Met]
			}
			got = append(got, f.Unit+" "+verdict)
		}
		if strings.Join(got, "; ") != c.want {
			t.Errorf("%d ranks, copies of %v: %q, want %q", c.n, c.copy, strings.Join(got, "; "), c.want)
		}
	}
}

func TestConclusions(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		results []result
		status  int
		says    string
	}{
		{[]result{{Status: "pass", Figures: []figure{{Target: "x", Met: &yes}, {Target: "x", Met: &no}, {}}}, {Status: "skip"}}, 0,
			"checks: 1 passed, 0 failed, 1 skipped; targets: 1 met, 1 missed\n"},
		{[]result{{Status: "pass"}, {Status: "fail"}}, 1, "checks: 1 passed, 1 failed, 0 skipped; targets: 0 met, 0 missed\n"},
		{[]result{{Status: "skip"}}, 1, "checks: 0 passed, 0 failed, 1 skipped; targets: 0 met, 0 missed\n"},
	} {
		var b bytes.Buffer
		if got := (&summary{Results: c.results}).conclude(&b); got != c.status || b.String() != c.says {
			t.Errorf("%d: %s", got, &b)
		}
	}
	if got := (figure{Name: "x", Value: 1, Unit: "ms", Target: "< 2 ms", Met: &no}).String(); !strings.HasSuffix(got, "target < 2 ms: MISSED") {
		t.Error(got)
	}
}

// TestJudge: of several ranks' errors the cause is reported, not its consequences.
func TestJudge(t *testing.T) {
	err := judge([]answer{{Error: "lost", Aborted: true}, {Error: "broken"}, {}})
	if err == nil || err.Error() != "rank 1: broken" {
		t.Error(err)
	}
	if err := judge([]answer{{}, {Skip: "no"}}); err != (skipped{"no"}) {
		t.Error(err)
	}
	if err := same(kernel.Int32, "x", []byte{1, 0, 0, 0, 2, 0, 0, 0}, []byte{1, 0, 0, 0, 3, 0, 0, 0}); err == nil ||
		err.Error() != "x of int32: element 1 of 2 is 02000000, want 03000000 (bytes)" {
		t.Error(err)
	}
}
