package dashboard

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// TestFigures: curves of the figures that rank 0 reports have at most maxPoints points, extend to
// the present, and omit values that are not numbers.
func TestFigures(t *testing.T) {
	h := newHistory()
	now := time.Unix(1000, 0)
	const looks = 5 * maxPoints
	for i := range looks {
		value := float64(i)
		if i%7 == 0 {
			value = math.NaN()
		}
		h.report(now.Add(time.Duration(i)*time.Second), []job.Figure{{Name: "loss", Value: value}})
	}
	points := h.figures["loss"].points
	if n := len(points); n < maxPoints/2 || n > maxPoints {
		t.Fatalf("%d points", n)
	}
	if last := points[len(points)-1]; last.Rate < looks-40 || now.Add(looks*time.Second).Sub(last.Time) > 40*time.Second {
		t.Errorf("the last point is %v", last)
	}
	for i, p := range points {
		if math.IsNaN(p.Rate) || i > 0 && p.Rate <= points[i-1].Rate {
			t.Errorf("point %d is %v", i, p)
		}
	}
	for i := range 2 * maxFigures {
		h.report(now, []job.Figure{{Name: string(rune('a' + i)), Value: 1}})
	}
	if len(h.figures) != maxFigures {
		t.Errorf("%d curves", len(h.figures))
	}
}

// TestEndOfHistory: the number of commits of an ended job comes from its end, because the slots no
// longer report it.
func TestEndOfHistory(t *testing.T) {
	f := &Feed{history: newHistory()}
	f.history.add(&job.Entry{Name: job.JobDone, Status: 143, Commits: 2_211_559})
	running, ended := &View{Commits: 7}, &View{Commits: 609_328}
	running.Status.State, ended.Status.State = job.Running, job.Failed
	f.fill(running)
	f.fill(ended)
	if running.Commits != 7 || ended.Commits != 2_211_559 {
		t.Errorf("while it runs %d, when it has ended %d", running.Commits, ended.Commits)
	}
	out, err := show(ended)
	if err != nil || !strings.Contains(string(out.parts["job"]), `"commits":2211559`) {
		t.Errorf("%s, %v", out.parts["job"], err)
	}
}

// TestFoldedEvents: the audit record of a start repeats worker_started and is folded; other records
// are not.
func TestFoldedEvents(t *testing.T) {
	for _, c := range []struct {
		e      job.Entry
		folded bool
	}{
		{job.Entry{Name: job.Audit, What: "start", Host: "a", Outcome: "done"}, true},
		{job.Entry{Name: job.Audit, What: "start", Host: "a", Outcome: "refused: the host is draining"}, false},
		{job.Entry{Name: job.Audit, What: "stop", Outcome: "done"}, false},
		{job.Entry{Name: job.WorkerStarted, Host: "a"}, false},
	} {
		if got := told(&c.e).Folded; got != c.folded {
			t.Errorf("%+v: folded %v", c.e, got)
		}
	}
}
