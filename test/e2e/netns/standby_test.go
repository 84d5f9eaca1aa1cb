//go:build netns

package netns

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/etcdserver"
	"github.com/hvdrun/hvdrun/test/follow"
)

// TestDriversMachineIsLost: a job runs on three machines, and its driver on a fourth, which
// disappears: its cable is cut, so that no peer hears of its end, and then its processes and keys
// are gone. A standby on one of the others continues after the lease has ended, and no worker is
// started again.
func TestDriversMachineIsLost(t *testing.T) {
	const lease = 5 * time.Second
	n := newNetwork(t)
	addrs := map[string]string{}
	hosts := []string{"a", "b", "c"}
	for _, h := range append(hosts, "driver") {
		addrs[h] = n.add(h)
	}
	server, err := etcdserver.Start(t.Context(), t.TempDir(), addrs["c"], "ip", "netns", "exec", n.space("c"))
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	key := filepath.Join(t.TempDir(), "key")
	n.agent("driver", "--generate-key", key).wait()
	seeds := strings.Join([]string{addrs["a"], addrs["b"], addrs["c"]}, ",")
	for _, h := range hosts {
		n.agent(h, "--key-file", key, "--label", "test", "--name", h, "--slots", "1", "--join", seeds, "--bind", addrs[h], "--log-level", "debug")
		n.listens(h, 7946)
	}
	_, port, err := net.SplitHostPort(server.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	n.listens("c", number)
	copied := []string{"--journal", "etcd://" + server.Endpoint, "--journal-key-file", key}
	j := n.run(append(slices.Clone(copied), "-np", "3", "--min-np", "1", "--gossip-join", seeds, "--gossip-key-file", key,
		"--gossip-label", "test", "--elastic-timeout", "60", "--journal-lease", lease.String(), "--orphan-timeout", "10m")...)
	first := j.world("a", "b", "c")

	there := j.Job
	there.State = filepath.Join(t.TempDir(), "state")
	standby, err := j.ResumeAs(there, follow.Programs{Hvdrun: n.hvdrun("b"), Trainer: binaries.Trainer}, append(copied, "--standby")...)
	if err != nil {
		t.Fatal(err)
	}
	started := j.Count("worker_started")
	lost := time.Now()
	n.cable("driver", "down")
	j.KillDriver()
	if err := os.RemoveAll(filepath.Join(j.RuntimeDir(), "hvdrun", "keys")); err != nil { // it is lost with the machine
		t.Fatal(err)
	}
	j.Running = standby
	resumed := j.await("the standby to go on", func(e follow.Event) bool { return e.Name == "resumed" })
	t.Logf("the standby goes on %v after the loss, with a lease of %v", resumed.Time.Sub(lost), lease)
	j.steps(100)
	if n := j.Count("worker_started") - started; n != 0 || j.Count("reset") != 0 {
		t.Errorf("%d workers were started since; %d resets", n, j.Count("reset"))
	}
	// The world can still change: one of its workers dies and is replaced.
	i := slices.IndexFunc(j.Events, func(e follow.Event) bool { return e.Name == "worker_started" && e.Host == "a" })
	if err := syscall.Kill(j.Events[i].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if next := j.world("b", "c"); next.Generation <= first.Generation {
		t.Errorf("world %d follows %d", next.Generation, first.Generation)
	}
	j.end()
}
