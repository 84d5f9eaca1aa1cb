//go:build netns

package netns

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// torchNode is a process of hvdrun torchrun on its own host.
type torchNode struct {
	host string
	cmd  *exec.Cmd
	log  string // the file of its output
	done chan struct{}
}

// torchrun starts a node in the job's folder. The node meets the others at port 29400 of host a,
// where the first node to start runs the store. torchrun returns once the store listens. At the end
// of the test, the node and its workers get the signal end.
func (n *network) torchrun(host, dir string, end syscall.Signal, args ...string) *torchNode {
	n.t.Helper()
	one := &torchNode{host: host, log: filepath.Join(dir, host+".log"), done: make(chan struct{})}
	one.cmd = exec.Command(n.hvdrun(host), append([]string{"torchrun", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1"}, args...)...)
	one.cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, host), "XDG_RUNTIME_DIR="+dir)
	out, err := os.Create(one.log)
	if err != nil {
		n.t.Fatal(err)
	}
	defer out.Close()
	one.cmd.Stdout, one.cmd.Stderr = out, out
	one.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := one.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() {
		_ = one.cmd.Wait()
		close(one.done)
	}()
	n.t.Cleanup(func() {
		_ = syscall.Kill(-one.cmd.Process.Pid, end)
		<-one.done
		if n.t.Failed() {
			n.t.Logf("node %s\n%s", one.host, one.said())
		}
	})
	if host == "a" {
		n.listens("a", 29400)
	}
	return one
}

// said returns what the node has printed so far.
func (one *torchNode) said() string {
	text, _ := os.ReadFile(one.log) // start created it
	return string(text)
}

// TestElasticNodeFallsSilent: of three nodes without a separate driver, the cable of the one that
// runs the driver and the store is cut. The other nodes continue without it, and none of their
// workers is started again. The disconnected node joins again when its cable is back.
func TestElasticNodeFallsSilent(t *testing.T) {
	n := newNetwork(t)
	hosts := []string{"a", "b", "c"}
	for _, h := range hosts {
		n.add(h)
	}
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	n.agent("a", "--generate-key", key).wait()
	steps := filepath.Join(dir, "steplog")
	var nodes []*torchNode
	t.Cleanup(func() {
		left := func() []int { return follow.Processes(dir, "XDG_RUNTIME_DIR="+dir) } // drivers have only the variable
		if !follow.Await(t, func() bool { return len(left()) == 0 }) {
			t.Errorf("left behind: %v", left())
		}
	})
	for _, h := range hosts {
		nodes = append(nodes, n.torchrun(h, dir, syscall.SIGKILL, "--elastic", "--nnodes", "2:3", "--rdzv-id", "silent",
			"--rdzv-conf", "last_call_timeout=1,key_file="+key, "--log-level", "debug", "--shutdown-timeout", "5",
			binaries.Trainer, "-log", steps, "-log-all", "-dir", dir, "-steps", strconv.Itoa(endless), "-step-time", "5ms"))
	}
	log := steplog.Follow[steplog.Line](steps)
	var lines []steplog.Line
	await := func(what string, is func(steplog.Line) bool) (found steplog.Line) {
		t.Helper()
		if !follow.Await(t, func() bool {
			more, err := log.Next()
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, more...)
			i := slices.IndexFunc(lines, is)
			if i >= 0 {
				found = lines[i]
			}
			return i >= 0
		}) {
			t.Fatalf("no %s", what)
		}
		return found
	}
	await("steps of three", func(l steplog.Line) bool { return l.Size == 3 && l.Step > 20 })
	driver := slices.IndexFunc(nodes, func(one *torchNode) bool { return hasDriver(one.cmd.Process.Pid) })
	if driver < 0 {
		t.Fatal("no node has a driver")
	}
	cut := nodes[driver]
	lost := time.Now()
	n.cable(cut.host, "down")
	next := await("step of two", func(l steplog.Line) bool { return l.Size == 2 && l.Event == steplog.Step })
	t.Logf("the others take a step %v after node %s, with the driver, has fallen silent", time.Unix(0, next.Time).Sub(lost), cut.host)
	await("more steps", func(l steplog.Line) bool { return l.Size == 2 && l.Step > next.Step+100 })
	n.cable(cut.host, "up")
	again := await("step of three again", func(l steplog.Line) bool { return l.Size == 3 && l.Generation > next.Generation })
	await("more steps of three", func(l steplog.Line) bool { return l.Generation == again.Generation && l.Step > again.Step+20 })
	started := map[string]map[int]bool{}
	for _, l := range lines {
		if started[l.Host] == nil {
			started[l.Host] = map[int]bool{}
		}
		started[l.Host][l.PID] = true
	}
	for host, pids := range started {
		if most := map[bool]int{true: 2, false: 1}[strings.HasSuffix(host, "-29400")]; len(pids) > most {
			t.Errorf("host %s had the processes %v", host, pids)
		}
	}
	if err := steplog.Check(lines, endless, steplog.Size); err != nil {
		t.Error(err)
	}
}

// hasDriver returns whether a child of a process, or of its descendants, is the job's driver.
func hasDriver(pid int) bool {
	tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	for _, path := range tasks {
		text, _ := os.ReadFile(path) // the thread may have ended
		for child := range strings.FieldsSeq(string(text)) {
			id, err := strconv.Atoi(child)
			if err == nil && (strings.Contains(follow.CommandLine(id), "torchrun-driver") || hasDriver(id)) {
				return true
			}
		}
	}
	return false
}

// TestNameAtLoopback: nodes meet at a host whose own name resolves to loopback, as in Debian's
// /etc/hosts.
func TestNameAtLoopback(t *testing.T) {
	n := newNetwork(t)
	for i, host := range []string{"a", "b"} {
		n.add(host)
		dir := filepath.Join("/etc/netns", n.space(host))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		names := []string{"127.0.0.1 localhost\n127.0.1.1 node-a\n", "127.0.0.1 localhost\n10.77.0.1 node-a\n"}[i]
		if err := os.WriteFile(filepath.Join(dir, "hosts"), []byte(names), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, flags := range [][]string{
		{"--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a", "--rdzv-id", "names"},
		{"--master-addr", "node-a"},
	} {
		var all sync.WaitGroup
		for i, host := range []string{"a", "b"} {
			args := slices.Concat([]string{"torchrun", "--nnodes", "2", "--node-rank", strconv.Itoa(i), "--rdzv-conf", "insecure=true"},
				flags, []string{"--no-python", "true"})
			cmd := exec.CommandContext(t.Context(), n.hvdrun(host), args...)
			all.Go(func() {
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("%q: %v\n%s", flags, err, out)
				}
			})
		}
		all.Wait()
	}
}

// reject makes a firewall on a host reject incoming and outgoing TCP packets until accept is
// called.
func (n *network) reject(host string) (accept func()) {
	n.t.Helper()
	if _, err := exec.LookPath("iptables"); err != nil {
		n.t.Skip("iptables is missing: a firewall that rejects is not tested")
	}
	rule := func(do, chain, way string) {
		n.t.Helper()
		n.ip("netns", "exec", n.space(host), "iptables", do, chain, "-p", "tcp", "!", way, "lo", "-j", "REJECT", "--reject-with", "tcp-reset")
	}
	rule("-A", "INPUT", "-i")
	rule("-A", "OUTPUT", "-o")
	return func() {
		n.t.Helper()
		rule("-D", "INPUT", "-i")
		rule("-D", "OUTPUT", "-o")
	}
}

// TestFirewallRejects: a firewall between two nodes resets their connections and refuses new ones
// for a while. Neither node considers the other dead, and no worker is started again.
func TestFirewallRejects(t *testing.T) {
	n := newNetwork(t)
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	var nodes []*torchNode
	for i, host := range []string{"a", "b"} {
		n.add(host)
		if i == 0 {
			n.agent(host, "--generate-key", key).wait()
		}
	}
	for _, host := range []string{"a", "b"} {
		nodes = append(nodes, n.torchrun(host, dir, syscall.SIGTERM, "--nnodes", "2", "--max-restarts", "3", "--rdzv-id", "rejects", "--log-level", "info",
			"--rdzv-conf", "keep_alive_max_attempt=100,key_file="+key,
			"--no-python", "sh", "-c", `echo started >>`+dir+`/rank-$RANK; exec sleep infinity`))
	}
	text := func(name string) string {
		text, _ := os.ReadFile(filepath.Join(dir, name)) // it may not exist yet
		return string(text)
	}
	await := func(what, file, words string) {
		t.Helper()
		if !follow.Await(t, func() bool { return strings.Contains(text(file), words) }) {
			t.Fatalf("no %s", what)
		}
	}
	await("worker on a", "rank-0", "started")
	await("worker on b", "rank-1", "started")
	accept := n.reject("b")
	await("missing store", "b.log", "the store of the nodes cannot be reached")
	accept()
	await("store", "b.log", "the store of the nodes can be reached again")
	for _, one := range nodes {
		if strings.Contains(one.said(), "the agent of node") {
			t.Errorf("node %s has taken the other for dead", one.host)
		}
	}
	for _, rank := range []string{"rank-0", "rank-1"} {
		if text(rank) != "started\n" {
			t.Errorf("the worker of %s was started again: %q", rank, text(rank))
		}
	}
}
