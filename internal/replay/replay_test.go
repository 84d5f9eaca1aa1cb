package replay

import (
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

func read(t *testing.T, text string) *Recording {
	t.Helper()
	r, err := Read(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const past = `{"time":"2026-01-02T03:04:00Z","event":"audit","who":{"run":"7cc1d2e3"},"what":"run","outcome":"done"}
{"time":"2026-01-02T03:04:00Z","event":"hosts_found","hosts":[{"host":"a","slots":2}]}
{"time":"2026-01-02T03:04:01Z","event":"worker_started","host":"a","slot":0,"pid":7}
{"time":"2026-01-02T03:04:01Z","event":"worker_started","host":"a","slot":1,"pid":8}
{"time":"2026-01-02T03:04:01Z","event":"worker_ready","host":"a","slot":1}
{"time":"2026-01-02T03:04:02Z","event":"world_published","generation":1,"size":2,"slots":[{"rank":0,"host":"a","slot":0,"pid":7},{"rank":1,"host":"a","slot":1,"pid":8}]}
{"time":"2026-01-02T03:04:03Z","event":"first_commit","generation":1,"commits":1,"seconds":3}
{"time":"2026-01-02T03:04:13Z","event":"reset","count":1}
{"time":"2026-01-02T03:04:13Z","event":"worker_exited","host":"a","slot":1,"pid":8,"rank":1,"code":137,"signal":9,"cause":"failed"}
{"time":"2026-01-02T03:04:13Z","event":"excluded","host":"a","slot":1,"until":"2026-01-02T03:04:14Z"}
{"time":"2026-01-02T03:04:13Z","event":"world_published","generation":2,"size":1,"slots":[{"rank":0,"host":"a","slot":0,"pid":7}]}
{"time":"2026-01-02T03:04:14Z","event":"first_commit","generation":2,"commits":102,"seconds":1}
{"time":"2026-01-02T03:04:15Z","event":"returned","host":"a","slot":1}
{"time":"2026-01-02T03:04:24Z","event":"job_done","status":130,"message":"stopped by signal: interrupt","goodput":{"seconds":24,"parts":[{"part":"training","seconds":20}]},"commits":202}
`

// TestStatus: the status at several moments of a job. Its commits grow evenly while it trains.
func TestStatus(t *testing.T) {
	p := read(t, past).NewPlayer()
	begun := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	for _, c := range []struct {
		after   float64
		state   job.State
		size    int
		slots   string
		commits uint64
	}{
		{0, job.Waiting, 0, "free free", 0},
		{1, job.Starting, 0, "starting ready", 0},
		{2.5, job.Running, 2, "training training", 0},
		{8, job.Running, 2, "training training", 51},
		{13, job.Running, 1, "training excluded", 101},
		{13.9, job.Running, 1, "training excluded", 101},
		{19, job.Running, 1, "training free", 152},
		{30, job.Failed, 1, "training free", 202},
	} {
		at := begun.Add(time.Duration(c.after * float64(time.Second)))
		s := p.Status(at)
		var slots []string
		for _, slot := range s.Hosts[0].Slots {
			slots = append(slots, string(slot.State))
		}
		if got := strings.Join(slots, " "); s.State != c.state || s.Size != c.size || got != c.slots || !s.Time.Equal(at) || s.Job != "7cc1d2e3" {
			t.Errorf("after %v s: %s, %d workers, %s", c.after, s.State, s.Size, got)
		}
		if n := p.r.Commits(at); n != c.commits {
			t.Errorf("after %v s: %d commits, want %d", c.after, n, c.commits)
		}
	}
	if s := p.Status(begun.Add(time.Hour)); s.Goodput.Of(job.PartTraining) != 20 || s.Message == "" || !s.Stopped || s.Driver != 0 || len(s.Events) != 14 {
		t.Errorf("at the end: %+v", s)
	}
}

// TestRead: the last job of a file counts, and errors name the line.
func TestRead(t *testing.T) {
	r := read(t, past+`{"time":"2026-01-03T00:00:00Z","event":"hosts_found","hosts":[]}`+"\n")
	if len(r.events) != 1 || r.Run != "" || r.Begun().Day() != 3 {
		t.Errorf("%d events of %q since %v", len(r.events), r.Run, r.Begun())
	}
	begin := func(run string) string {
		return `{"time":"2026-01-03T00:00:00Z","event":"audit","who":{"run":"` + run + `"},"what":"run","outcome":"done"}` + "\n"
	}
	killed, _, _ := strings.Cut(past, `{"time":"2026-01-02T03:04:24Z","event":"job_done"`)
	if r := read(t, killed+begin("7cc1d2e3")); len(r.events) != 14 {
		t.Errorf("resumed: %d events", len(r.events))
	}
	if r := read(t, killed+begin("f00d")); len(r.events) != 1 || r.Run != "f00d" {
		t.Errorf("after a driver that was killed: %d events of %q", len(r.events), r.Run)
	}
	if r, err := readUpTo(len(past), strings.NewReader(past+past)); err != nil || len(r.events) != 14 {
		t.Errorf("two jobs that are too long together: %v", err)
	}
	if _, err := readUpTo(len(past)-15, strings.NewReader(past)); err == nil || !strings.HasPrefix(err.Error(), "line 14: the job has more than") {
		t.Errorf("a job that is too long: %v", err)
	}
	for text, want := range map[string]string{
		"":              "there is no event",
		past + "no\n":   "line 15: event: ",
		past + "\n[]\n": "line 16: event: ",
	} {
		if _, err := Read(strings.NewReader(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	wild := read(t, `{"time":"2026-01-03T00:00:00Z","event":"world_published","generation":1,"size":1,"slots":[{"rank":0,"host":"a","slot":-1},{"rank":1,"host":"b","slot":1000000000}]}`)
	if s := wild.NewPlayer().Status(wild.Ended()); s.Size != 1 {
		t.Errorf("%+v", s)
	}
}
