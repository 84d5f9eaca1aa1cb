package torchrun

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
)

// warmProgram fails in the first round once the interpreters for the second are ready, or gone; in
// the second round it prints what it is.
const warmProgram = `
import os, sys, time
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
if life == "0":
    pids = []
    while len(pids) < 2 or sys.argv[3] == "gone" and any(os.path.exists("/proc/" + pid) for pid in pids):
        time.sleep(0.01)
        pids = open(sys.argv[1]).read().split() if os.path.exists(sys.argv[1]) else []
    sys.exit(5 if os.environ["RANK"] == "0" else 0)
print(life, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"] != "0", __name__, "wave" in sys.modules, sys.argv[2],
      file=sys.stderr if os.environ["RANK"] == "1" else sys.stdout)
sys.exit(7 if sys.argv[3] == "fail" and os.environ["RANK"] == "1" else 0)
`

// runWarm runs two workers of warmProgram with the prestart code and one restart.
func runWarm(t *testing.T, code, end string) (out string, err error) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed: interpreters started in advance are not tested")
	}
	dir := t.TempDir()
	script, warmed := filepath.Join(dir, "program.py"), filepath.Join(dir, "warmed")
	if err := os.WriteFile(script, []byte(warmProgram), 0o600); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	a := newAgent(t, Config{Rendezvous: new(Single), Workers: 2, MaxRestarts: 1, Launcher: launch.Local{},
		Env: append(os.Environ(), "WARMED="+warmed), Logs: Logs{Stdout: &stdout, Stderr: &stderr}})
	a.cfg.Command = []string{python, "-u", script, warmed, "local-${local_rank}", end}
	a.cfg.Prestart = `import os; open(os.environ["WARMED"], "a").write(f"{os.getpid()} "); ` + code
	if a.program, err = prestart.Parse(a.cfg.Command); err != nil {
		t.Fatal(err)
	}
	err = a.Run(t.Context())
	for local, w := range a.warm {
		if w != nil {
			t.Errorf("an interpreter waits for local rank %d", local)
		}
	}
	return stdout.String() + stderr.String(), err
}

// TestPrestart: the workers of the second round are interpreters that were started in advance.
func TestPrestart(t *testing.T) {
	out, err := runWarm(t, "import wave", "end")
	if want := "1 0 2 True __main__ True local-0\n1 1 2 True __main__ True local-1\n"; err != nil || out != want {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestPrestartFails: the failure of such a worker counts like any other.
func TestPrestartFails(t *testing.T) {
	out, err := runWarm(t, "import wave", "fail")
	failed, is := err.(*FailedError)
	if !is || failed.Root().Rank != 1 || failed.Root().ExitCode != 7 {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestPrestartEnds: if the code ends its interpreter, workers start without it.
func TestPrestartEnds(t *testing.T) {
	out, err := runWarm(t, "raise SystemExit(3)", "gone")
	if err != nil || strings.Count(out, "__main__ False") != 2 {
		t.Errorf("%v\n%s", err, out)
	}
}
