package e2e

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
)

// differs are the parts of the log that differ from job to job, and their replacements.
var differs = []struct {
	text *regexp.Regexp
	as   string
}{
	{regexp.MustCompile(`^\S+ (INFO|WARN) +`), "$1 "},
	{regexp.MustCompile(`hvdrun top [0-9a-f]{4} `), "hvdrun top ID "},
	{regexp.MustCompile(`\b[0-9a-f]{16}\b`), "ID"},
	{regexp.MustCompile(`(after|within) [0-9.]+m?s`), "$1 TIME"},
	{regexp.MustCompile(`[0-9.]+m?s ago`), "TIME ago"},
	{regexp.MustCompile(`[0-9,]+ commits`), "N commits"},
	{regexp.MustCompile(`trained .*`), "trained PARTS"},
	{regexp.MustCompile(`was lost$|failed \(killed by signal 9\)$`), "was lost"},
	{regexp.MustCompile(`events in \S+`), "events in FILE"},
}

// logOf returns the parts of the job's log that are the same in every job of this kind, even if
// processes start slowly.
func logOf(t *testing.T, r *Running) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(r.OutputPath())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if !regexp.MustCompile(`^[0-9:.]+ (INFO|WARN) `).MatchString(line) || strings.Contains(line, " the job still waits for ") {
			continue
		}
		for _, d := range differs {
			line = d.text.ReplaceAllString(line, d.as)
		}
		lines = append(lines, line)
	}
	return lines
}

// TestStoryOfASession compares what a terminal shows of a job from its start to Ctrl-C. The job has
// a death, a growth to 6 workers, a drain, a removal, another driver and other bounds. Each fact
// has one line.
func TestStoryOfASession(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Stages: []follow.Stage{
			{Hosts: on(hostA, 4)}, {Hosts: on(hostA, 4, hostB, 2), After: "more"}, {Hosts: on(hostA, 4), After: "fewer"},
		},
		Flags: flags("-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "3600", "3600", "--orphan-timeout", "60s",
			"--start-timeout", "10m"),
		Trainer: []string{"-steps", strconv.Itoa(controlledSteps), "-step-time", "10ms"},
	})
	told := func(words string) {
		t.Helper()
		if !follow.Await(t, func() bool { return strings.Contains(strings.Join(logOf(t, r), "\n"), words) }) {
			t.Fatalf("the log lacks %q:\n%s", words, strings.Join(logOf(t, r), "\n"))
		}
	}
	told("world 1:")
	for _, s := range statusOf(t, r).Hosts[0].Slots {
		if *s.Rank == 2 {
			_ = syscall.Kill(s.PID, syscall.SIGKILL)
		}
	}
	told("world 2:")
	order(t, r, "may be used again", "readmit", hostA+":2")
	told("world 3:")
	mark(t, r, "more")
	told("world 4:")
	order(t, r, "its worker leaves", "drain", hostA+":3")
	told("world 5:")
	mark(t, r, "fewer")
	told("world 6:")
	r.KillDriver()
	r = resume(t, r)
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, job.Resumed) == 1 }); err != nil {
		t.Fatal(err)
	}
	order(t, r, "2 workers, before 2 or more workers", "scale", "--max-np", "2")
	told("world 7:")
	_ = syscall.Kill(r.PID, syscall.SIGINT)
	finish(t, r, 128+2, controlledSteps)
	want := `INFO OMP_NUM_THREADS is not set: it is 1 for workers that share a host
INFO job ID: 4 workers on 1 host; hvdrun top ID shows them
INFO world 1: 4 workers on 1 host, a step after TIME
WARN host localhost slot 2 rank 2 was killed by signal 9 (killed)
WARN slot localhost:2 is excluded for 1h0m0s
INFO world 2: 3 workers on 1 host, a step after TIME: rank 2 on localhost:2 was lost
INFO command: slot localhost:2 may be used again
INFO world 3: 4 workers on 1 host, a step after TIME: localhost:2 is back
INFO world 4: 6 workers on 2 hosts, a step after TIME: 127.0.0.1 came
INFO command: slot localhost:3 is drained: its worker leaves at the next commit
INFO world 5: 5 workers on 2 hosts, a step after TIME: localhost:3 is drained
INFO world 6: 3 workers on 1 host, a step after TIME: 127.0.0.1 went
INFO resumed in generation 6 with 3 workers; the previous driver's last event was TIME ago
INFO command: 2 workers, before 2 or more workers
INFO world 7: 2 workers on 1 host, a step after TIME: workers allowed: 2
WARN stopped by signal: interrupt: stopping the workers, 30s at most, or as long as the last checkpoint grows; again to kill them
INFO the job was stopped after TIME: 2 workers, N commits, no checkpoint written; events in FILE
INFO trained PARTS`
	if got := strings.Join(logOf(t, r), "\n"); got != want {
		t.Errorf("the log is\n%s\nwant\n%s", got, want)
	}
}
