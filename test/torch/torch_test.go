package torch

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/etcdserver"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// python is an interpreter that has torch; make check-torch SUITE=trixie uses that of another
// Debian release.
var python = flag.String("python", "/usr/bin/python3", "the `program` that has torch")

// hvdrun is the path of the program, which TestMain builds.
var hvdrun string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(sandbox.Run(m, func(dir string) error {
		hvdrun = filepath.Join(dir, "hvdrun")
		if out, err := exec.Command("go", "build", "-o", hvdrun, "../../cmd/hvdrun").CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	}))
}

// version describes the installed torch; number is "" if there is no torch.
var version = sync.OnceValue(func() (v struct {
	number       string
	reconfigures bool // process groups
	scales       bool // losses on CPUs
	gpu          bool
}) {
	out, _ := exec.Command(*python, "-c", `import torch, torch.distributed as d
print(torch.__version__, hasattr(d, "_reconfigure"), hasattr(torch.amp, "GradScaler"), torch.cuda.is_available())`).Output()
	if words := strings.Fields(string(out)); len(words) == 4 {
		v.number, v.reconfigures, v.scales, v.gpu = words[0], words[1] == "True", words[2] == "True", words[3] == "True"
	}
	return v
})

func needTorch(t *testing.T) {
	t.Helper()
	if version().number == "" {
		t.Skipf("%s has no torch: PyTorch programs are NOT run (make check-torch brings it)", *python)
	}
	t.Logf("torch %s", version().number)
}

// torchrun returns the command hvdrun torchrun with the Python that has torch.
func torchrun(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), hvdrun, append([]string{"torchrun"}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHON_EXEC="+*python, "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	return cmd
}

// TestExample: the example trains, and continues from its checkpoint.
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
	if err != nil || !strings.Contains(string(out), "continues at epoch 2 with 3 processes") || !strings.Contains(string(out), "accuracy 0.9") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestKilledWorker: one of two workers kills itself; after the restart, training reaches the end.
func TestKilledWorker(t *testing.T) {
	needTorch(t)
	log := filepath.Join(t.TempDir(), "log")
	out, err := torchrun(t, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "worker.py", log, "10", "1", "3").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	secondLife(t, log, 2, string(out))
}

// secondLife checks that all ranks made the last of ten steps after a restart.
func secondLife(t *testing.T, log string, world int, out string) {
	t.Helper()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	last := map[string]bool{}
	killed, next := 0.0, 0.0
	for line := range strings.Lines(string(text)) {
		e, ok := parse(line)
		switch {
		case !ok:
		case e.restart != "0" && e.restart != "1":
			t.Errorf("a worker was told that there were %s restarts", e.restart)
		case e.name == "kill":
			killed = e.at
		case e.name == "step" && e.restart == "1" && next == 0:
			next = e.at
		case e.name == "step" && e.restart == "1" && e.step == "9":
			last[e.rank] = true
		}
	}
	t.Logf("the next step after %.1f s", next-killed)
	if len(last) != world {
		t.Errorf("ranks that have made the last step of the second life: %v\n%s", last, out)
	}
}

// TestInitMethod: programs that specify the store's port themselves reach the store.
func TestInitMethod(t *testing.T) {
	needTorch(t)
	script := filepath.Join(t.TempDir(), "init.py")
	if err := os.WriteFile(script, []byte(`import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 2
print("both have met")
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, flags := range map[string][]string{"standalone": {"--standalone"}, "static": {"--master_addr=localhost", "--master_port=PORT"}} {
		t.Run(name, func(t *testing.T) {
			port, err := etcdserver.FreePort()
			if err != nil {
				t.Fatal(err)
			}
			line := strings.ReplaceAll(strings.Join(flags, " ")+" --nproc-per-node 2 "+script+" tcp://localhost:PORT", "PORT", port)
			out, err := torchrun(t, strings.Fields(line)...).CombinedOutput()
			if err != nil || strings.Count(string(out), "both have met") != 2 {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// job is a job of several nodes on this machine.
type job struct {
	t    *testing.T
	args []string
	net  string // of this job's nodes
	wg   sync.WaitGroup
	mu   sync.Mutex
	out  bytes.Buffer // of all nodes
}

// Write takes the output of a node.
func (j *job) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.out.Write(b)
}

// backends are the ways in which nodes meet.
var backends = []string{"c10d", "etcd", "static"}

// newJob returns a job whose nodes meet by the backend, and whose workers run worker.py with args.
// The caller must wait for the nodes.
func newJob(t *testing.T, backend, nodes string, args ...string) *job {
	t.Helper()
	network, err := sandbox.Net()
	if err != nil {
		t.Fatal(err)
	}
	j := &job{t: t, net: network, args: []string{"--nnodes", nodes, "--rdzv-backend", backend, "--max-restarts", "1"}}
	endpoint := network + "1:29400"
	switch backend {
	case "static":
		j.args = append(j.args, "--master-addr", network+"1", "--master-port", "29500")
	case "etcd":
		s, err := etcdserver.Start(t.Context(), t.TempDir(), network+"1")
		if errors.Is(err, etcdserver.ErrMissing) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Stop)
		endpoint = s.Endpoint
		fallthrough
	default:
		j.args = append(j.args, "--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--rdzv-conf", "last_call_timeout=1")
	}
	j.args = append(j.args, args...)
	return j
}

// node is a running node.
type node struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// start starts a node. want is 0 if its exit status must be 0, or the signal that it will be sent.
func (j *job) start(number int, want syscall.Signal) *node {
	j.t.Helper()
	more := []string{"--local-addr", fmt.Sprint(j.net, number+1), "--node-rank", fmt.Sprint(number)}
	cmd := torchrun(j.t, append(more, j.args...)...)
	cmd.Stdout, cmd.Stderr = j, j
	if err := cmd.Start(); err != nil {
		j.t.Fatal(err)
	}
	n := &node{cmd, make(chan struct{})}
	j.wg.Go(func() {
		defer close(n.ended)
		err := cmd.Wait()
		code := cmd.ProcessState.ExitCode()
		switch {
		case want == syscall.SIGKILL && cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == want:
		case want == 0 && code == 0, want != 0 && code == 128+int(want):
		default:
			j.t.Errorf("node %d: %v; want signal %d\n%s", number, err, want, &j.out)
		}
	})
	return n
}

// send sends a signal to a node.
func (n *node) send(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := n.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// TestKilledWorkerOfTwoNodes: one of four workers on two nodes kills itself. After the restart all
// workers connect and reach the end.
func TestKilledWorkerOfTwoNodes(t *testing.T) {
	needTorch(t)
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log")
			j := newJob(t, backend, "2", "--nproc-per-node", "2", "worker.py", log, "10", "3", "2")
			j.start(0, 0)
			j.start(1, 0)
			j.wg.Wait()
			secondLife(t, log, 4, j.out.String())
		})
	}
}

// fifo creates a named pipe, and returns its path and the lines written to it.
func fifo(t *testing.T) (path string, in *lines) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "log")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return path, newLines(f)
}

// TestNodesComeAndGo: a job of one to two nodes grows when a node joins, and continues alone when
// it leaves.
func TestNodesComeAndGo(t *testing.T) {
	needTorch(t)
	log, in := fifo(t)
	j := newJob(t, "c10d", "1:2", "worker.py", log, "1000000")
	first := j.start(0, syscall.SIGTERM)
	in.await(t, "1")
	second := j.start(1, syscall.SIGTERM)
	in.await(t, "2")
	second.send(t, syscall.SIGTERM)
	<-second.ended
	in.await(t, "1")
	first.send(t, syscall.SIGTERM)
	j.wg.Wait()
}

// TestKilledNode: a node is killed, either the one at the endpoint, which runs the store, or the
// other. With a fixed number of nodes it is started again; otherwise the job continues without it.
func TestKilledNode(t *testing.T) {
	needTorch(t)
	for _, backend := range backends {
		for killed, name := range []string{"at the endpoint", "another"} {
			t.Run(backend+"/"+name, func(t *testing.T) {
				log, in := fifo(t)
				nodes := "1:2"
				if backend == "static" {
					nodes = "2"
				}
				j := newJob(t, backend, nodes, "worker.py", log, "1000000")
				ends := []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}
				ends[killed] = syscall.SIGKILL
				running := []*node{j.start(0, ends[0])}
				if backend != "static" {
					in.await(t, "1") // this node runs the store
				}
				running = append(running, j.start(1, ends[1]))
				in.await(t, "2")
				at := float64(time.Now().UnixMicro()) / 1e6
				running[killed].send(t, syscall.SIGKILL)
				<-running[killed].ended
				if backend == "static" {
					running[killed] = j.start(killed, syscall.SIGTERM)
					in.until(t, func(e event) bool { return e.name == "start" })
					in.await(t, "2")
				} else {
					running = []*node{running[1-killed]}
					in.await(t, "1")
				}
				t.Logf("the next step after %.1f s", in.last-at)
				for _, n := range running {
					n.send(t, syscall.SIGTERM)
				}
				j.wg.Wait()
			})
		}
	}
}
