package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestOddEnvironments: two workers join and get the complete environment, although it is as large
// as that of a pod among thousands of Services, names proxies for everything, and contains
// functions and bytes that are not UTF-8.
func TestOddEnvironments(t *testing.T) {
	t.Parallel()
	const variables = 15000
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), binaries.Hvdrun, "-np", "2", "-H", hostA+":1,"+hostC+":1", "sh", "-c",
		`echo "have $(env | grep -ac '^SVC_.*=x\{60\}$')"; echo "byte $L."; exec "$0" "$@"`,
		binaries.Trainer, "-log", filepath.Join(dir, "steplog"), "-dir", dir, "-steps", "3")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "L=\xe9", "BASH_FUNC_module%%=() { eval\n}",
		"http_proxy=http://127.0.0.1:9", "https_proxy=http://127.0.0.1:9", "HTTPS_PROXY=http://127.0.0.1:9",
		"all_proxy=socks5://127.0.0.1:9", "grpc_proxy=http://127.0.0.1:9")
	for i := range variables {
		cmd.Env = append(cmd.Env, fmt.Sprintf("SVC_%05d_PORT=%s", i, strings.Repeat("x", 60)))
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{fmt.Sprintf("have %d\n", variables), "byte \xe9.\n", "size=2 step=3 "} {
		if n := bytes.Count(out, []byte(want)); n != 2 {
			t.Errorf("%q stands there %d times, not twice:\n%s", want, n, out)
		}
	}
}

// TestHangup: a program that nohup started continues when its terminal is closed.
func TestHangup(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"job":      {"-np", "1"},
		"torchrun": {"torchrun", "--standalone", "--nproc-per-node", "1", "--no-python"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			words := append([]string{"-c", `trap "" HUP; exec "$0" "$@"`, binaries.Hvdrun}, args...)
			words = append(words, "sh", "-c", `>"$0/runs"; until [ -e "$0/end" ]; do sleep 0.02; done`, dir)
			cmd := exec.CommandContext(t.Context(), "sh", words...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			runs := func() bool { _, err := os.Stat(filepath.Join(dir, "runs")); return err == nil }
			if !follow.Await(t, runs) {
				_ = cmd.Process.Kill()
			} else if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "end"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, out.String())
			}
		})
	}
}

// TestAllAskedToEnd: a job ends well if all its processes get SIGTERM at once, as systemd and Slurm
// do it.
func TestAllAskedToEnd(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "3", "--min-np", "1", "-H", hostA+":2,"+hostB+":1"),
		Trainer: []string{"-steps", "1000000", "-step-time", "2ms"},
	})
	awaitStep(t, r, 5)
	for _, pid := range append(r.Processes(), r.PID) {
		_ = syscall.Kill(pid, syscall.SIGTERM) // it may have ended
	}
	res := finish(t, r, 128+int(syscall.SIGTERM), 1000000)
	if left := r.Processes(); len(left) > 0 {
		t.Errorf("%v are left after %v", left, res.Status)
	}
}
