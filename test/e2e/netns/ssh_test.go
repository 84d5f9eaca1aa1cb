//go:build netns

package netns

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/e2e"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// sshd starts an ssh server on the host and returns its client configuration.
func (n *network) sshd(host, addr string) e2e.Host {
	n.t.Helper()
	return e2e.Host{Name: host, Server: e2e.StartSSHD(n.t, addr, "ip", "netns", "exec", n.space(host))}
}

// steps waits until rank 0 has completed this number of further steps.
func (j *job) steps(more int) {
	j.t.Helper()
	from := -1
	err := j.AwaitLines(j.t.Context(), func(lines []steplog.Line) bool {
		last := 0
		for _, l := range lines {
			last = max(last, l.Step)
		}
		if from < 0 {
			from = last
		}
		return last >= from+more
	})
	if err != nil {
		j.t.Fatal(err)
	}
}

// exits counts the workers that have ended so far.
func (j *job) exits() (n int) {
	j.t.Helper()
	_ = j.AwaitEvents(j.t.Context(), func(all []follow.Event) bool {
		n = follow.Count(all, "worker_exited")
		return true
	})
	return n
}

// TestLinkOfASSHHost: the link of an ssh host is slow, then interrupted for a second, then
// interrupted for longer than the driver waits. The first two only cost time; the last costs only
// that host's worker. When the host is reachable again, the old worker's processes end there, and a
// new worker joins.
func TestLinkOfASSHHost(t *testing.T) {
	n := newNetwork(t)
	addrs := map[string]string{}
	for _, h := range []string{"a", "b", "driver"} {
		addrs[h] = n.add(h)
	}
	command, err := e2e.Client(t.TempDir(), n.sshd("a", addrs["a"]), n.sshd("b", addrs["b"]))
	if err != nil {
		t.Fatal(err)
	}
	const limit = 6 * time.Second // a lost SYN is repeated after 1 s and after 3 s
	j := n.run("-np", "2", "--min-np", "1", "-H", "a:1,b:1", "--ssh-command", command, "--remote-hvdrun", binaries.Hvdrun,
		"--agent-timeout", limit.String(), "--blacklist-cooldown-range", "1,1")
	j.world("a", "b")

	n.ip("netns", "exec", n.space("hub"), "tc", "qdisc", "add", "dev", "to-b", "root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
	since := time.Now()
	j.steps(100)
	t.Logf("at 1 Mbit/s: 100 steps in %v", time.Since(since))
	n.ip("netns", "exec", n.space("hub"), "tc", "qdisc", "del", "dev", "to-b", "root")
	n.cable("b", "down")
	<-time.After(time.Second)
	n.cable("b", "up")
	since = time.Now()
	j.steps(100)
	t.Logf("after a second without a link: 100 steps in %v", time.Since(since))
	if n := j.exits(); n > 0 {
		t.Fatalf("%d workers have ended, though no link was away for long", n)
	}

	since = time.Now()
	n.cable("b", "down")
	exit := j.exited("b", since)
	left := j.world("a")
	t.Logf("a host is cut off: its worker lost after %v, the next world after %v", exit.Time.Sub(since), left.Time.Sub(since))
	old := fmt.Sprintf("/proc/%d", exit.PID)
	agent, err := parentOf(exit.PID)
	if err != nil {
		t.Errorf("the worker that was cut off has ended already: %v", err)
	}
	if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", agent)); err != nil || !strings.Contains(string(line), "agent") {
		t.Errorf("the parent of the worker is no agent: %q, %v", line, err)
	}
	since = time.Now()
	n.cable("b", "up")
	j.world("a", "b")
	t.Logf("it is back: the next world after %v", time.Since(since))
	for _, process := range []string{old, fmt.Sprintf("/proc/%d", agent)} {
		if !follow.Await(t, func() bool {
			stat, err := os.ReadFile(process + "/stat")
			return err != nil || strings.Contains(string(stat), ") Z ")
		}) {
			t.Fatalf("%s is still there", process)
		}
	}
	if n := j.exits(); n != 1 {
		t.Errorf("%d workers have ended, and only one was cut off", n)
	}

	j.end()
}

// parentOf returns the PID of a process's parent.
func parentOf(pid int) (parent int, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(stat), ") ") // the state and the parent follow the name
	if _, rest, _ = strings.Cut(rest, " "); rest == "" {
		return 0, fmt.Errorf("/proc/%d/stat is %q", pid, stat)
	}
	word, _, _ := strings.Cut(rest, " ")
	return strconv.Atoi(word)
}
