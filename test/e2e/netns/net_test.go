//go:build netns

package netns

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

var binaries follow.Programs

func TestMain(m *testing.M) {
	if err := exec.Command("unshare", "--net", "true").Run(); err != nil {
		fmt.Fprintln(os.Stderr, "netns: network namespaces cannot be made here: run `make check-net` as root, "+
			"in a container with the capabilities SYS_ADMIN and NET_ADMIN")
		os.Exit(1)
	}
	if _, err := exec.LookPath("ip"); err != nil {
		fmt.Fprintln(os.Stderr, "netns: ip is missing: install iproute2")
		os.Exit(1)
	}
	os.Exit(sandbox.Run(m, func(dir string) (err error) {
		binaries, err = follow.Build(context.Background(), dir, buildFlags...)
		return err
	}))
}

// network is a set of namespaces on a bridge. The bridge is in its own namespace, so the machine's
// network is not affected.
type network struct {
	t      *testing.T
	prefix string
	hosts  []string
}

func newNetwork(t *testing.T) *network {
	n := &network{t: t, prefix: fmt.Sprintf("hvd%d", os.Getpid())}
	t.Cleanup(func() {
		for _, h := range append(n.hosts, "hub") {
			if out, err := exec.Command("ip", "netns", "del", n.space(h)).CombinedOutput(); err != nil {
				t.Errorf("ip netns del: %v: %s", err, out)
			}
		}
	})
	n.ip("netns", "add", n.space("hub"))
	n.ip("-n", n.space("hub"), "link", "add", "bridge0", "type", "bridge")
	n.ip("-n", n.space("hub"), "link", "set", "bridge0", "up")
	return n
}

func (n *network) space(host string) string { return n.prefix + host }

func (n *network) ip(args ...string) {
	n.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// add creates a host and returns its address.
func (n *network) add(host string) string {
	n.t.Helper()
	n.hosts = append(n.hosts, host)
	addr := fmt.Sprintf("10.77.0.%d", len(n.hosts))
	space, hub := n.space(host), n.space("hub")
	n.ip("netns", "add", space)
	n.ip("-n", space, "link", "set", "lo", "up")
	n.ip("-n", hub, "link", "add", "to-"+host, "type", "veth", "peer", "name", "eth0", "netns", space)
	n.ip("-n", hub, "link", "set", "to-"+host, "master", "bridge0", "up")
	n.ip("-n", space, "addr", "add", addr+"/24", "dev", "eth0")
	n.ip("-n", space, "link", "set", "eth0", "up")
	return addr
}

// cable sets the state of a host's link, "up" or "down".
func (n *network) cable(host, state string) {
	n.t.Helper()
	n.ip("-n", n.space("hub"), "link", "set", "to-"+host, state)
}

// hvdrun returns the path of a script that runs hvdrun in the host's namespace.
func (n *network) hvdrun(host string) string {
	n.t.Helper()
	path := filepath.Join(n.t.TempDir(), "hvdrun")
	text := fmt.Sprintf("#!/bin/sh\nexec ip netns exec %s '%s' \"$@\"\n", n.space(host), binaries.Hvdrun)
	if err := sandbox.WriteProgram(path, []byte(text)); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// agent is a process of `hvdrun agent`.
type agent struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan error
}

// agent starts an agent on the host.
func (n *network) agent(host string, flags ...string) *agent {
	n.t.Helper()
	a := &agent{t: n.t, cmd: exec.Command(n.hvdrun(host), append([]string{"agent"}, flags...)...), done: make(chan error, 1)}
	log := filepath.Join(n.t.TempDir(), "log")
	f, err := os.Create(log)
	if err != nil {
		n.t.Fatal(err)
	}
	defer f.Close()
	a.cmd.Stdout, a.cmd.Stderr = f, f
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := a.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() { a.done <- a.cmd.Wait() }()
	n.t.Cleanup(func() {
		a.cmd.Process.Kill()
		<-a.done
		if n.t.Failed() {
			n.t.Logf("agent of %s\n%s", host, follow.Tail(log, 2000))
		}
	})
	return a
}

// listens waits until a process listens on a TCP port of the host.
func (n *network) listens(host string, port int) {
	n.t.Helper()
	if !follow.Await(n.t, func() bool {
		cmd := exec.Command("ip", "netns", "exec", n.space(host), "ss", "-Hltn", fmt.Sprintf("sport = :%d", port))
		out, err := cmd.CombinedOutput()
		if err != nil {
			n.t.Fatalf("%v: %v\n%s", cmd, err, out)
		}
		return len(out) > 0
	}) {
		n.t.Fatalf("nobody listens to port %d of %s", port, host)
	}
}

// ask asks the agent to stop.
func (a *agent) ask() {
	a.t.Helper()
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		a.t.Fatal(err)
	}
}

// wait waits until the agent has ended, and checks that its exit status is 0.
func (a *agent) wait() {
	a.t.Helper()
	err := <-a.done
	a.done <- nil
	if err != nil {
		a.t.Fatalf("the agent: %v", err)
	}
}
