package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// newest checks that the newest checkpoint in a directory is complete and contains the job's newest
// commit.
func newest(t *testing.T, res Result, folder string) {
	t.Helper()
	last := 0
	for _, l := range res.Lines {
		if l.Outcome == steplog.OK || l.Outcome == steplog.Updated {
			last = max(last, l.Step)
		}
	}
	kept, err := checkpoint.List(folder)
	if err != nil || len(kept) == 0 || kept[0] != uint64(last) {
		t.Fatalf("checkpoints of %v, %v; the last commit is %d", kept, err, last)
	}
	f, err := checkpoint.Open(checkpoint.Path(folder, kept[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.About.Parts {
		if err := f.Check(p); err != nil {
			t.Error(err)
		}
	}
}

// TestStopKeepsTheNewestCommit: however a job is stopped, its newest commit is on disk, or the exit
// status reports that it is not.
func TestStopKeepsTheNewestCommit(t *testing.T) {
	for name, c := range map[string]struct {
		stop   func(t *testing.T, r *Running, first Event)
		broken bool // the folder is gone when the job is stopped
		status int
	}{
		"hvdrun stop": {func(t *testing.T, r *Running, _ Event) {
			if out, err := hvdrun(r, "stop"); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}, false, 143},
		"all but the last drained": {func(t *testing.T, r *Running, first Event) {
			for _, s := range first.Slots {
				ask(t, s.PID)
			}
			world(t, r, first.Generation, 1)
			ask(t, r.PID)
		}, false, 143},
		"the last asked before": {func(t *testing.T, r *Running, first Event) {
			for _, s := range first.Slots {
				ask(t, s.PID)
			}
			world(t, r, first.Generation, 1)
			awaitStep(t, r, 600) // more than a second later
			ask(t, r.PID)
		}, false, 143},
		"no folder": {func(t *testing.T, r *Running, _ Event) { ask(t, r.PID) }, true, 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := filepath.Join(t.TempDir(), "kept")
			r := start(t, Job{
				Flags: []string{"-np", "3", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 1),
					"--blacklist-cooldown-range", "600,600"}, // the last worker stays the last
				Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all", "-checkpoints", folder},
			})
			first := world(t, r, 0, 3)
			awaitStep(t, r, 5)
			if c.broken {
				if err := os.Rename(folder, folder+".gone"); err != nil {
					t.Error(err)
				}
				if err := os.WriteFile(folder, nil, 0o600); err != nil {
					t.Error(err)
				}
			}
			c.stop(t, r, first)
			res := finish(t, r, c.status, 100000)
			inOrder(t, res, "left", "stopped")
			if c.broken {
				says(t, res, "the last checkpoint could not be written: commit ")
				says(t, res, "elastic: no checkpoint of the last commit, ")
				return
			}
			newest(t, res, folder)
		})
	}
}

// TestStopWithoutADriver: the newest commit is on disk even if no driver is left to select the
// writer.
func TestStopWithoutADriver(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "kept")
	r := start(t, Job{
		Flags:   []string{"-np", "3", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 1)},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all", "-checkpoints", folder},
	})
	world(t, r, 0, 3)
	awaitStep(t, r, 5)
	if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.Ended()
	if out, err := hvdrun(r, "stop"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if left := r.AwaitGone(0); len(left) > 0 {
		t.Errorf("there are still %q", left)
	}
	res, err := r.Wait()
	if err != nil {
		t.Fatal(err)
	}
	newest(t, res, folder)
}
