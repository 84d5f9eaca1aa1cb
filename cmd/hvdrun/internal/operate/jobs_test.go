package operate

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
)

// TestJobsTable: running jobs come first, and among jobs of one state the newest. An ended job
// shows its end, status and duration.
func TestJobsTable(t *testing.T) {
	begin := time.Date(2026, 11, 21, 16, 0, 0, 0, time.Local)
	job := func(name string, state jobdir.State, after, took time.Duration, status int) jobdir.Line {
		l := jobdir.Line{Job: name, State: state, Begun: begin.Add(after), Command: []string{"train"}}
		if took > 0 {
			ended := l.Begun.Add(took)
			l.Ended, l.Status = &ended, &status
		}
		return l
	}
	lines := []jobdir.Line{
		job("old", "done", 0, 90*time.Second, 0),
		job("broken", jobdir.Broken, time.Second, 0, 0),
		job("left", jobdir.Resumable, 2*time.Second, 0, 0),
		job("first", jobdir.Running, 3*time.Second, 0, 0),
		job("second", jobdir.Running, 4*time.Second, 0, 0),
		job("new", "failed", 5*time.Second, 1500*time.Millisecond, 3),
	}
	sortJobs(lines)
	var out bytes.Buffer
	if err := printJobs(&cli.Program{Stdout: &out}, lines, begin.Add(time.Hour+4*time.Second)); err != nil {
		t.Fatal(err)
	}
	want := `
JOB     STATE      STATUS  BEGUN                ENDED                TOOK    WORKERS  GENERATION  COMMAND
second  running    -       2026-11-21 16:00:04  -                    1h0m0s  0        0           train
first   running    -       2026-11-21 16:00:03  -                    1h0m1s  0        0           train
left    resumable  -       2026-11-21 16:00:02  -                    1h0m2s  0        0           train
broken  broken     -       2026-11-21 16:00:01  -                    -       0        0           train
new     failed     3       2026-11-21 16:00:05  2026-11-21 16:00:06  1.5s    0        0           train
old     done       0       2026-11-21 16:00:00  2026-11-21 16:01:30  1m30s   0        0           train
`
	if got := out.String(); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("the table is\n%s", got)
	}
}
