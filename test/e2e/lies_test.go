package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// Workers that report something false.

// TestLies: whatever one worker reports, the others train to the end from their own state, and none
// of them is stopped or replaced. At worst the liar itself is.
func TestLies(t *testing.T) {
	const liar = hostA + ":1"
	for how, test := range map[string]struct {
		says  string
		steps int // of 100 ms; 120 take longer than --stall-timeout
	}{
		"lie-done":       {"reported that training is done, but by their own account these ranks still train: 0 2", 40},
		"lie-drain":      {"was asked to leave", 40},
		"lie-commits":    {"", 120},
		"lie-generation": {"asked for a world after generation 9223372036854775808, but the newest is 1", 120},
		"lie-beats":      {"", 120},
		"lie-reports":    {"which is not its duty: the report is ignored", 40},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags:   stalling("-np", "3", "--min-np", "2", "--finish-timeout", "30s"),
				Stages:  []Stage{{Hosts: on(hostA, 3)}},
				Trainer: []string{"-steps", fmt.Sprint(test.steps), "-step-time", "100ms", "-log-all", "-exit", liar + "@step=5:" + how},
			})
			res := finish(t, r, 0, test.steps)
			for _, e := range res.Events {
				if e.Name == "worker_exited" && e.Slot != nil && fmt.Sprintf("%s:%d", e.Host, *e.Slot) != liar && e.Cause != "done" {
					t.Errorf("%s:%d ended: %s", e.Host, *e.Slot, e.Cause)
				}
			}
			if ends := exits(res, liar); len(ends) == 0 {
				t.Errorf("%s has not ended", liar)
			}
			if !strings.Contains(res.Output, how+" in generation 1") || !strings.Contains(res.Output, test.says) {
				t.Errorf("the output lacks %q", test.says)
			}
		})
	}
}

// TestLieInStaticJob: a job that is not elastic fails, and names the worker that falsely reported
// done.
func TestLieInStaticJob(t *testing.T) {
	t.Parallel()
	res, err := start(t, Job{
		Flags:   []string{"-np", "3", "--finish-timeout", "30s"},
		Trainer: []string{"-steps", "100000", "-step-time", "50ms", "-exit", hostA + ":1@step=5:lie-done"},
	}).Wait()
	if err != nil {
		t.Fatal(err)
	}
	const named = "host localhost slot 1 rank 1 reported that training is done, but by their own account these ranks still train: 0 2"
	if res.Hung || res.Status != 1 || !strings.Contains(res.Output, named) || follow.Count(res.Events, "job_done") != 1 {
		t.Errorf("exit status %d, hung: %v, %s", res.Status, res.Hung, res.Output)
	}
}

// TestCredentialsOfChildren: a process that a worker starts after it has joined has the job's
// variables, but not the credentials, neither in its own environment nor in that of its parent, and
// cannot join.
func TestCredentialsOfChildren(t *testing.T) {
	t.Parallel()
	const child = `cat /proc/$$/environ | tr '\0' '\n' | grep -c -e ^HVD_RUN_ID= -e ^HVD_CREDENTIALS= | sed 's/^/variables: /'; ` +
		`"$0" -steps 1 2>&1 || true`
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 2)}},
		Trainer: []string{"-steps", "3", "-child", strings.ReplaceAll(child, "$0", binaries.Trainer)},
	}), 0, 3)
	for _, want := range []string{"variables: 1\n", "HVD_CREDENTIALS is not set: this process was started by a worker that has already joined"} {
		if n := strings.Count(res.Output, want); n != 2 {
			t.Errorf("%q is said by %d of 2 workers:\n%s", want, n, res.Output)
		}
	}
	if strings.Contains(res.Output, "variables: 2") {
		t.Error("a child has the credentials")
	}
}
