package torch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

const python = "/usr/bin/python3"

// hvdrun is the program, which TestMain builds.
var hvdrun string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "hvdrun-torch-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	hvdrun = filepath.Join(dir, "hvdrun")
	if out, err := exec.Command("go", "build", "-o", hvdrun, "../../cmd/hvdrun").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
		return 1
	}
	return m.Run()
}

func needTorch(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/usr/lib/python3/dist-packages/torch"); err != nil {
		t.Skip("python3-torch is not installed: PyTorch programs are NOT run (make check-torch brings it)")
	}
}

// torchrun returns the command, with the Python that has torch.
func torchrun(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), hvdrun, append([]string{"torchrun"}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHON_EXEC="+python, "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1",
		"XDG_STATE_HOME="+filepath.Join(filepath.Dir(hvdrun), "state"))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	return cmd
}

// TestExample: the example trains, and goes on from its checkpoint.
func TestExample(t *testing.T) {
	needTorch(t)
	checkpoint := filepath.Join(t.TempDir(), "checkpoint.pt")
	out, err := torchrun(t, "--standalone", "--nproc_per_node", "2", "../../examples/torch/train.py",
		"--epochs", "2", "--checkpoint", checkpoint).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "epoch 1 ") {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err = torchrun(t, "--standalone", "--nproc-per-node=3", "../../examples/torch/train.py", "--epochs", "8",
		"--checkpoint", checkpoint).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "goes on at epoch 2 with 3 processes") || !strings.Contains(string(out), "accuracy 0.9") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestKilledWorker: one of two workers kills itself, and the second life goes to the end.
func TestKilledWorker(t *testing.T) {
	needTorch(t)
	log := filepath.Join(t.TempDir(), "log")
	out, err := torchrun(t, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "worker.py", log, "10", "1", "3").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	last := map[string]bool{}
	for _, e := range events(t, log) {
		if e[1] == "step" && e[5] == "1" && e[6] == "9" {
			last[e[3]] = true
		}
	}
	if len(last) != 2 {
		t.Errorf("ranks that have made the last step of the second life: %v\n%s", last, out)
	}
}

// events returns the lines of a worker's log, by fields.
func events(t *testing.T, path string) (all [][]string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t"); len(fields) == 7 {
			all = append(all, fields)
		}
	}
	return all
}

// TestNodesComeAndGo: a job of one to two nodes grows when another comes, and goes on alone when
// that leaves.
func TestNodesComeAndGo(t *testing.T) {
	needTorch(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := ln.Addr().String()
	ln.Close()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	if err := syscall.Mkfifo(log, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo, err := os.OpenFile(log, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fifo.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	start := func(name string) *exec.Cmd {
		cmd := torchrun(t, "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test",
			"--rdzv-conf", "last_call_timeout=1", "--local-addr", "127.0.0.1", "worker.py", log, "1000000")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		over := make(chan struct{})
		wg.Go(func() {
			select {
			case <-ctx.Done():
				_ = cmd.Process.Signal(syscall.SIGTERM)
			case <-over:
			}
		})
		wg.Go(func() {
			err := cmd.Wait()
			close(over)
			if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGTERM) {
				t.Errorf("%s: %v\n%s", name, err, &out)
			}
		})
		return cmd
	}
	in := newLines(fifo)
	start("first")
	in.await(t, "1")
	second := start("second")
	in.await(t, "2")
	if err := second.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	in.await(t, "1")
	cancel()
}
