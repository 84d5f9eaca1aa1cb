//go:build netns

package netns

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// job is a job over a cluster of agents, with the events observed so far.
type job struct {
	*follow.Running
	t    *testing.T
	seen int // those before the position of await
}

// run starts an endless job whose driver is on the host "driver".
func (n *network) run(flags ...string) *job {
	n.t.Helper()
	return n.train([]string{"-steps", strconv.Itoa(endless), "-step-time", "5ms"}, flags...)
}

// train starts a job like run, with these flags of the trainer.
func (n *network) train(trainer []string, flags ...string) *job {
	n.t.Helper()
	programs := follow.Programs{Hvdrun: n.hvdrun("driver"), Trainer: binaries.Trainer}
	return &job{t: n.t, Running: programs.Test(n.t, follow.Job{
		Flags:   append(flags, "--log-level", "debug", "--drain-timeout", "5"),
		Trainer: trainer,
	})}
}

const endless = 1_000_000 // steps

// end stops the job and checks that it ends gracefully.
func (j *job) end() {
	j.t.Helper()
	j.endWith(steplog.Size)
}

// endWith is like end, for workers with this number of weights.
func (j *job) endWith(weights int) {
	j.t.Helper()
	if err := syscall.Kill(j.PID, syscall.SIGTERM); err != nil {
		j.t.Fatal(err)
	}
	res, err := j.Wait()
	if err != nil || res.Status != 128+int(syscall.SIGTERM) || len(res.Left) > 0 {
		j.t.Errorf("status %d, left %q, %v", res.Status, res.Left, err)
	}
	if err := steplog.Check(res.Lines, endless, weights); err != nil {
		j.t.Error(err)
	}
}

// await blocks until there is an event after the current position that satisfies the condition, and
// returns it. The position moves behind that event.
func (j *job) await(what string, is func(follow.Event) bool) follow.Event {
	j.t.Helper()
	var found follow.Event
	err := j.AwaitEvents(j.t.Context(), func(all []follow.Event) bool {
		for i := j.seen; i < len(all); i++ {
			if is(all[i]) {
				found, j.seen = all[i], i+1
				return true
			}
		}
		return false
	})
	if err != nil {
		j.t.Fatalf("waiting for %s: %v", what, err)
	}
	return found
}

// hosts waits for an event whose list has exactly these hosts; "b!" is a draining one.
func (j *job) hosts(names ...string) follow.Event {
	j.t.Helper()
	return j.await("hosts "+strings.Join(names, " "), func(e follow.Event) bool {
		var got []string
		for _, h := range e.Hosts {
			name := h.Host
			if h.Draining {
				name += "!"
			}
			got = append(got, name)
		}
		return e.Name == "hosts_found" && slices.Equal(got, names)
	})
}

// world waits until a world of these hosts, one slot each, in the order of rank, has committed: a
// world that failed to connect does not count.
func (j *job) world(hosts ...string) follow.Event {
	j.t.Helper()
	var last follow.Event
	j.await("a commit in a world of "+strings.Join(hosts, " "), func(e follow.Event) bool {
		var got []string
		for _, s := range e.Slots {
			got = append(got, s.Host)
		}
		if e.Name == "world_published" && slices.Equal(got, hosts) {
			last = e
		}
		return e.Name == "first_commit" && e.Generation == last.Generation
	})
	return last
}

// exited waits for the end of a host's worker. The event can precede or follow the others' first
// commit without that worker, so exited does not move the position of await.
func (j *job) exited(host string, since time.Time) follow.Event {
	j.t.Helper()
	seen := j.seen
	defer func() { j.seen = seen }()
	j.seen = 0
	return j.await("the end of the worker on "+host, func(e follow.Event) bool {
		return e.Name == "worker_exited" && e.Host == host && e.Time.After(since)
	})
}

// leaves asks a host's agent to leave and returns the next world, which must consist of the hosts
// that stay. listed is the host list meanwhile.
func (j *job) leaves(host string, a *agent, listed []string, stay ...string) follow.Event {
	j.t.Helper()
	since := time.Now()
	a.ask()
	found := j.hosts(listed...).Time.Sub(since)
	moved := j.world(stay...)
	if exit := j.exited(host, since); exit.Cause != "left" || exit.Code != 0 {
		j.t.Errorf("the worker of the host that leaves: %+v", exit)
	}
	gone := j.hosts(stay...).Time.Sub(since)
	j.t.Logf("a host leaves: draining after %v, the next world after %v, off the list after %v", found, moved.Time.Sub(since), gone)
	a.wait()
	return moved
}

// TestHostsComeAndGo: three agents and a driver, each on its own host. A host is disconnected and
// returns; the driver's host is disconnected for a moment, which has no effect; a host leaves
// gracefully and returns.
func TestHostsComeAndGo(t *testing.T) {
	n := newNetwork(t)
	key := filepath.Join(t.TempDir(), "key")
	names := []string{"a", "b", "c"}
	addrs := map[string]string{}
	for _, h := range append(names, "driver") {
		addrs[h] = n.add(h)
	}
	seeds := strings.Join([]string{addrs["a"], addrs["b"], addrs["c"]}, ",")
	n.agent("driver", "--generate-key", key).wait()
	begin := func(host string) *agent {
		return n.agent(host, "--key-file", key, "--label", "test", "--name", host, "--slots", "1", "--join", seeds,
			"--bind", addrs[host], "--log-level", "debug")
	}
	agents := map[string]*agent{}
	agents["a"] = begin("a")
	n.listens("a", 7946)
	j := n.run("-np", "1", "--gossip-join", seeds, "--gossip-key-file", key, "--gossip-label", "test",
		"--gossip-bind", addrs["driver"]+":0", "--elastic-timeout", "60")
	j.hosts("a")
	j.world("a")
	since := time.Now()
	agents["b"] = begin("b")
	found := j.hosts("a", "b").Time.Sub(since)
	told := j.await("the news of it", func(e follow.Event) bool { return e.Name == "hosts_updated" }).Time.Sub(since)
	t.Logf("an agent starts: on the list after %v, workers told, with a new one that has joined, after %v", found, told)
	j.world("a", "b")
	agents["c"] = begin("c")
	j.hosts("a", "b", "c")
	j.world("a", "b", "c")

	since = time.Now()
	n.cable("c", "down")
	found = j.hosts("a", "b").Time.Sub(since)
	exit := j.exited("c", since)
	left := j.world("a", "b")
	// If the driver sent no message, the kernel would end the survivors' wait 5 s after the
	// disconnection.
	t.Logf("a host is cut off: off the list after %v, its worker lost after %v, the next world after %v",
		found, exit.Time.Sub(since), left.Time.Sub(since))
	since = time.Now()
	n.cable("c", "up")
	found = j.hosts("a", "b", "c").Time.Sub(since)
	back := j.world("a", "b", "c")
	t.Logf("it is back: on the list after %v, the next world after %v", found, back.Time.Sub(since))

	// On a busy machine any host can be suspected at any time, which also causes a reset.
	listed := []string{"a", "b!", "c"}
	for attempt := 1; ; attempt++ {
		since = time.Now()
		n.cable("driver", "down")
		noticed := j.await("the driver's notice that it is cut off", func(e follow.Event) bool { return e.Name == "discovery_failed" })
		n.cable("driver", "up")
		t.Logf("the driver itself is cut off: noticed after %v", noticed.Time.Sub(since))
		moved := j.leaves("b", agents["b"], listed, "a", "c")
		since = time.Now()
		agents["b"] = begin("b")
		t.Logf("an agent's start to hosts_found: %v", j.hosts("a", "c", "b").Time.Sub(since))
		before := back
		back, listed = j.world("a", "c", "b"), []string{"a", "c", "b!"}
		if moved.Generation == before.Generation+1 {
			break
		}
		if attempt == 3 {
			t.Fatalf("generation %d follows %d: the driver's being cut off has cost a reset, as twice before", moved.Generation, before.Generation)
		}
	}

	j.end()
	for _, a := range agents {
		a.ask()
		a.wait()
	}
}
