package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/hvdrun/hvdrun/test/etcdserver"
	"github.com/hvdrun/hvdrun/test/follow"
)

// Jobs that lose their driver's machine while another machine has a copy of the journal in etcd.

// TestStandby: when the driver is dead, a standby that has only the copy of the journal continues
// the job. This happens twice; the workers do not notice.
func TestStandby(t *testing.T) {
	t.Parallel()
	server, err := etcdserver.Start(t.Context(), t.TempDir(), address())
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	key := filepath.Join(t.TempDir(), "key")
	if out, err := exec.Command(binaries.Hvdrun, "agent", "--generate-key", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	copied := []string{"--journal", "etcd://" + server.Endpoint, "--journal-key-file", key}
	const steps = 60
	first := start(t, Job{
		Flags: append(slices.Clone(copied), "-np", "3", "--min-np", "1", "-H", on(hostA, 2)+","+on(hostB, 1),
			"--orphan-timeout", "10m", "--journal-lease", "5s"),
		Trainer: []string{"-steps", strconv.Itoa(steps), "-step-time", "1ms", "-gate", "20=once", "-gate", "40=twice"},
	})
	r := first
	for n, gate := range []string{"once", "twice"} {
		awaitStep(t, r, (n+1)*20)
		there := first.Job
		there.State = filepath.Join(t.TempDir(), "state")
		next, err := r.ResumeAs(there, binaries, append(slices.Clone(copied), "--standby")...)
		if err != nil {
			t.Fatal(err)
		}
		r.KillDriver()
		if err := os.RemoveAll(filepath.Join(first.RuntimeDir(), "hvdrun", "keys")); err != nil { // it is lost with the machine
			t.Fatal(err)
		}
		if err := next.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "resumed") == n+1 }); err != nil {
			t.Fatal(err)
		}
		mark(t, next, gate)
		r = next
	}
	res := finish(t, r, 0, steps)
	if worlds := follow.Count(res.Events, "world_published"); worlds != 1 || follow.Count(res.Events, "reset") != 0 {
		t.Errorf("%d worlds and %d resets, want one world", worlds, follow.Count(res.Events, "reset"))
	}
	if n := follow.Count(res.Events, "worker_started"); n != 3 {
		t.Errorf("%d workers were started, want 3", n)
	}
	folder, err := first.Folder()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(binaries.Hvdrun, append([]string{"resume", filepath.Base(folder)}, copied...)...).CombinedOutput()
	if err == nil {
		t.Errorf("a job that has ended is resumed from etcd: %s", out)
	}
}
