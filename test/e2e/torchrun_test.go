package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/etcdserver"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Jobs of hvdrun torchrun --elastic: several nodes without a separate driver, whose programs use
// package elastic.

// nodes are the nodes of one job, all on this machine.
type nodes struct {
	t     *testing.T
	dir   string
	flags []string
	train []string
	all   []*node
	log   *steplog.Follower[steplog.Line]
	lines []steplog.Line
}

// node is a process of hvdrun torchrun.
type node struct {
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan struct{} // closed when it has ended
}

// torchNodes returns a job of two to three nodes with two workers each. No node is started yet.
func torchNodes(t *testing.T, backend, endpoint string, trainer ...string) *nodes {
	n := &nodes{t: t, dir: t.TempDir()}
	n.flags = []string{"torchrun", "--elastic", "--nnodes", "2:3", "--nproc-per-node", "2", "--rdzv-backend", backend,
		"--rdzv-endpoint", endpoint, "--rdzv-id", filepath.Base(n.dir) + t.Name(), "--rdzv-conf", "last_call_timeout=1",
		"--log-level", "info"}
	steps := filepath.Join(n.dir, "steplog")
	n.train = append([]string{binaries.Trainer, "-log", steps, "-log-all", "-dir", n.dir}, trainer...)
	n.log = steplog.Follow[steplog.Line](steps)
	t.Cleanup(func() {
		for _, one := range n.all {
			_ = syscall.Kill(-one.cmd.Process.Pid, syscall.SIGKILL)
			<-one.done
		}
		left := func() []int { return follow.Processes(n.dir, "XDG_RUNTIME_DIR="+n.dir) } // drivers have only the variable
		if !follow.Await(t, func() bool { return len(left()) == 0 }) {
			t.Errorf("left behind: %v", left())
		}
		if t.Failed() {
			for i, one := range n.all {
				t.Logf("node %d\n%s", i, one.out.String())
			}
		}
	})
	return n
}

// start starts another node.
func (n *nodes) start() *node {
	n.t.Helper()
	one := &node{cmd: exec.Command(binaries.Hvdrun, slices.Concat(n.flags, n.train)...), done: make(chan struct{})}
	one.cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(n.dir, "state"), "XDG_RUNTIME_DIR="+n.dir,
		"HVD_BLACKLIST_COOLDOWN_RANGE=1,1", "HVD_AGENT_TIMEOUT=30s") // nodes wait for processors too
	one.cmd.Stdout, one.cmd.Stderr = &one.out, &one.out
	one.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := one.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() {
		_ = one.cmd.Wait()
		close(one.done)
	}()
	n.all = append(n.all, one)
	return one
}

// await blocks until the steplog has a line that satisfies the condition, and returns it.
func (n *nodes) await(what string, is func(steplog.Line) bool) (found steplog.Line) {
	n.t.Helper()
	ok := follow.Await(n.t, func() bool {
		more, err := n.log.Next()
		if err != nil {
			n.t.Fatal(err)
		}
		n.lines = append(n.lines, more...)
		i := slices.IndexFunc(n.lines, is)
		if i >= 0 {
			found = n.lines[i]
		}
		return i >= 0
	})
	if !ok {
		n.t.Fatalf("no %s", what)
	}
	return found
}

// world blocks until a world of size workers with a generation above after has completed a step,
// and returns the step's line.
func (n *nodes) world(size int, after uint64) steplog.Line {
	n.t.Helper()
	return n.await(fmt.Sprintf("step of %d workers after generation %d", size, after), func(l steplog.Line) bool {
		return l.Size == size && l.Generation > after && l.Event == steplog.Step
	})
}

// drivers returns the PID of the driver of each node that has one.
func (n *nodes) drivers() map[*node]int {
	n.t.Helper()
	found := make(map[*node]int)
	for _, one := range n.all {
		pid := one.cmd.Process.Pid
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		var children []string
		for _, path := range tasks {
			text, _ := os.ReadFile(path) // the thread may have ended
			children = append(children, strings.Fields(string(text))...)
		}
		for _, child := range children {
			if id, err := strconv.Atoi(child); err == nil && strings.Contains(follow.CommandLine(id), "torchrun-driver") {
				found[one] = id
			}
		}
	}
	return found
}

// driver waits until exactly one node has a driver, and returns that node and the driver's PID.
func (n *nodes) driver() (*node, int) {
	n.t.Helper()
	var all map[*node]int
	if !follow.Await(n.t, func() bool { all = n.drivers(); return len(all) == 1 }) {
		n.t.Fatalf("%d nodes have a driver", len(all))
	}
	for one, pid := range all {
		return one, pid
	}
	return nil, 0
}

// over waits for a node's end.
func (n *nodes) over(one *node) {
	n.t.Helper()
	if !follow.Await(n.t, func() bool {
		select {
		case <-one.done:
			return true
		default:
			return false
		}
	}) {
		n.t.Fatal("a node does not end")
	}
}

// end waits for a node's end and checks its exit status.
func (n *nodes) end(one *node, status int) {
	n.t.Helper()
	n.over(one)
	if got := one.cmd.ProcessState.ExitCode(); got != status {
		n.t.Errorf("a node ended with %v, not with status %d", one.cmd.ProcessState, status)
	}
}

func (n *nodes) check(steps int) {
	n.t.Helper()
	more, err := n.log.Next()
	if err != nil {
		n.t.Fatal(err)
	}
	n.lines = append(n.lines, more...)
	if err := steplog.Check(n.lines, steps, steplog.Size); err != nil {
		n.t.Error(err)
	}
}

// TestElasticNodes: first the node that runs the driver and the store of the rendezvous dies, and
// another one joins. Then the driver's process dies, and then its node is asked to leave. The
// workers of the other nodes continue each time and are not started again.
func TestElasticNodes(t *testing.T) {
	t.Parallel()
	testElasticNodes(t, "c10d", address()+":29400")
}

// TestElasticNodesWithEtcd is like TestElasticNodes, with nodes that meet in etcd.
func TestElasticNodesWithEtcd(t *testing.T) {
	if testing.Short() {
		t.Skip("etcd passes the kit of stores; make test runs this one")
	}
	t.Parallel()
	server, err := etcdserver.Start(t.Context(), t.TempDir(), address())
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	testElasticNodes(t, "etcd", server.Endpoint)
}

func testElasticNodes(t *testing.T, backend, endpoint string) {
	const steps = 1 << 20
	n := torchNodes(t, backend, endpoint, "-steps", strconv.Itoa(steps), "-step-time", "2ms")
	for range 3 {
		n.start()
	}
	first := n.world(6, 0)
	one, _ := n.driver()
	lost := time.Now()
	if err := syscall.Kill(-one.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-one.done
	second := n.world(4, first.Generation)
	t.Logf("the others take a step %v after the loss of the driver's node", time.Unix(0, second.Time).Sub(lost))

	if backend == "c10d" { // the next node at the endpoint finds the running job
		n.await("more steps", func(l steplog.Line) bool { return l.Generation >= second.Generation && l.Step > second.Step+20 })
	}
	n.start()
	third := n.world(6, second.Generation)

	_, pid := n.driver()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if !follow.Await(n.t, func() bool { _, next := n.driver(); return next != pid }) {
		t.Fatal("no other driver")
	}
	last := n.lines[len(n.lines)-1].Step
	n.await("more steps", func(l steplog.Line) bool { return l.Step > last+50 })

	one, _ = n.driver()
	if err := syscall.Kill(one.cmd.Process.Pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	fourth := n.world(4, third.Generation)
	n.end(one, 128+int(syscall.SIGTERM))
	n.driver()
	n.await("more steps", func(l steplog.Line) bool { return l.Generation == fourth.Generation && l.Step > fourth.Step+50 })
	_, again, _ := net.SplitHostPort(endpoint) // two nodes have listened there, one after the other
	started := make(map[string]map[int]bool)   // processes by host
	for _, l := range n.lines {
		if started[l.Host] == nil {
			started[l.Host] = make(map[int]bool)
		}
		started[l.Host][l.PID] = true
	}
	for host, pids := range started {
		if len(pids) > 2 && !strings.HasSuffix(host, "-"+again) {
			t.Errorf("host %s had the processes %v, want two", host, pids)
		}
	}
	n.check(steps)
}

// TestElasticNodesEnd: a job that completes or fails ends on all nodes with the same status.
func TestElasticNodesEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		trainer []string
		status  int
	}{
		"done":   {[]string{"-steps", "30"}, 0},
		"failed": {[]string{"-no-such-flag"}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := torchNodes(t, "c10d", address()+":29400", c.trainer...)
			n.flags = append(n.flags, "--nnodes", "3") // a third node that came after the end would wait for a second
			for range 3 {
				n.start()
			}
			for _, one := range n.all {
				if c.status >= 0 {
					n.end(one, c.status)
					continue
				}
				n.over(one)
				if got := one.cmd.ProcessState.ExitCode(); got <= 0 || got != n.all[0].cmd.ProcessState.ExitCode() {
					t.Errorf("a node ended with %v", one.cmd.ProcessState)
				}
			}
			if c.status == 0 {
				n.check(30)
			}
		})
	}
}

// TestElasticNodeAlone: if no other node is left, a node that is asked to stop stops the job.
func TestElasticNodeAlone(t *testing.T) {
	t.Parallel()
	n := torchNodes(t, "c10d", address()+":29400", "-steps", "1000000")
	n.flags = append(n.flags, "--nnodes", "1:2")
	one := n.start()
	n.world(2, 0)
	if err := syscall.Kill(one.cmd.Process.Pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	n.end(one, 128+int(syscall.SIGTERM))
}
