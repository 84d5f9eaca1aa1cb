package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestEnrolledCluster: two agents enroll with a token and run a job. While the job trains, their
// certificates are renewed and the gossip key is replaced; the job does not notice.
func TestEnrolledCluster(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "cluster")
	hvdrun := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(binaries.Hvdrun, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("hvdrun %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	hvdrun("cluster", "init", keys)
	net := address()
	seed := net + ":7946"
	background(t, "cluster", "serve", keys, "--listen", net+":7945", "--agent-life", "30s", "--pause", "200ms")
	certificate := func(host string) []byte {
		text, err := os.ReadFile(filepath.Join(dir, host, "agent.pem"))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, name := range []string{"a", "b"} {
		bind := seed
		if name == "b" {
			bind = "127.0.0.1:0"
		}
		background(t, "agent", "--enroll", net+":7945", "--token-file", filepath.Join(keys, "token"), "--state-dir", filepath.Join(dir, name),
			"--name", name, "--slots", "1", "--join", seed, "--bind", bind)
	}
	source := []string{"--gossip-join", seed, "--cluster", keys, "--gossip-bind", "127.0.0.1:0"}
	var out []byte
	if !follow.Await(t, func() bool {
		var err error
		out, err = exec.Command(binaries.Hvdrun, append([]string{"discover"}, source...)...).CombinedOutput()
		return err == nil && strings.Count(string(out), "agent") == 2
	}) {
		t.Fatalf("there is no cluster: %s", out)
	}
	first := map[string][]byte{"a": certificate("a"), "b": certificate("b")}
	r := start(t, Job{
		Flags:   append(flags("-np", "2", "--min-np", "1"), source...),
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	w := world(t, r, 0, 2)
	if said := hvdrun("cluster", "rotate", keys, "--hold", "1s", "--timeout", "2m"); !strings.Contains(said, "is replaced") {
		t.Errorf("the rotation says %q", said)
	}
	for host, before := range first {
		if !follow.Await(t, func() bool { return !bytes.Equal(certificate(host), before) }) {
			t.Errorf("the certificate of %s is not renewed", host)
		}
	}
	if n := strings.Count(hvdrun("cluster", "hosts", keys), "current"); n != 2 {
		t.Errorf("%d hosts have the current keys", n)
	}
	ask(t, r.PID)
	res := finish(t, r, 143, 100000)
	for _, e := range res.Events {
		if e.Name == "world_published" && e.Generation > w.Generation || e.Name == "worker_exited" && e.Cause == "failed" || e.Name == "discovery_failed" {
			t.Errorf("the job has noticed: %+v", e)
		}
	}
}

// TestDriverIsTheSeed: agents know only the driver's address. The next driver of the job knows the
// agents at once, and learns that one of them was asked to leave.
func TestDriverIsTheSeed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	if out, err := exec.Command(binaries.Hvdrun, "agent", "--generate-key", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	seed := address() + ":7946"
	agents := map[string]*exec.Cmd{}
	for _, name := range []string{"a", "b"} {
		agents[name], _ = background(t, "agent", "--key-file", key, "--join", seed, "--name", name, "--slots", "1",
			"--bind", "127.0.0.1:0", "--drain-timeout", "10m")
	}
	r := start(t, Job{
		Flags:   append(flags("-np", "2", "--min-np", "1"), "--gossip-join", seed, "--gossip-key-file", key, "--gossip-bind", seed),
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	w := world(t, r, 0, 2)
	r.KillDriver()
	r = resume(t, r)
	ask(t, agents["b"].Process.Pid)
	w = world(t, r, w.Generation, 1)
	if w.Slots[0].Host != "a" {
		t.Errorf("the world is %v", w.Slots)
	}
	ask(t, r.PID)
	inOrder(t, finish(t, r, 143, 100000), "left", "stopped")
}
