package driver

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/job"
)

// counters returns the counters of a worker that has done n commits and operations.
func counters(n uint64) *line.Counters {
	return &line.Counters{
		Commits: n, CommitTime: time.Duration(n) * time.Second, CommitBytes: 10 * n,
		Operations: []line.Operations{{Kind: "AllReduce", Backend: "memory", SizeClass: 3, Count: n, Duration: time.Duration(n), Bytes: 2 * n}},
	}
}

// TestSums: the counters of workers are added up, those of ended workers still count, and each rank
// has its own.
func TestSums(t *testing.T) {
	s := newStalls(job.Timeouts{})
	now := time.Unix(1000, 0)
	for _, id := range []string{"a", "b"} {
		s.expect(id)
	}
	s.enter(now, 4, []string{"a", "b"})
	s.hear(now, "a", line.Beat{Generation: 4, Phase: line.Training, Commits: 17, Counters: counters(5)})
	s.hear(now.Add(time.Second), "b", line.Beat{Generation: 4, Phase: line.Training, Commits: 16, Counters: counters(7)})
	s.forget("b")
	m := s.measure(now.Add(3 * time.Second))
	if m.Beats != 2 || m.Commits != 12 || m.CommitTime != 12*time.Second || m.CommitBytes != 120 {
		t.Errorf("%+v", m)
	}
	if len(m.Operations) != 1 || m.Operations[0] != (job.Operations{Kind: "AllReduce", Backend: "memory", SizeClass: 3, Count: 12, Duration: 12, Bytes: 24}) {
		t.Errorf("%+v", m.Operations)
	}
	if len(m.Ranks) != 2 || !reflect.DeepEqual(m.Ranks[0], job.Rank{Heard: true, Age: 3 * time.Second, Commits: 17, InOperations: 5}) || m.Ranks[1].Heard {
		t.Errorf("%+v", m.Ranks)
	}
}

// TestUsage: processor time is the difference between two heartbeats, a shortage of memory is
// reported once, and figures are the newest ones.
func TestUsage(t *testing.T) {
	s := newStalls(job.Timeouts{})
	now := time.Unix(1000, 0)
	for _, id := range []string{"a", "b"} {
		s.expect(id)
	}
	s.enter(now, 4, []string{"a", "b"})
	hear := func(at time.Duration, used uint64, loss float64) []string {
		s.hear(now.Add(at), "b", line.Beat{
			Generation: 4, Phase: line.Training, Figures: []line.Figure{{Name: "loss", Value: loss}},
			Usage: &proc.Usage{Processor: 2 * at, Resident: 1000 << 20, Used: used << 20, Limit: 10000 << 20},
		})
		return s.shortages()
	}
	if lines := hear(0, 8000, 3); len(lines) != 0 {
		t.Error(lines)
	}
	lines := hear(3*time.Second, 9500, 2.5)
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "rank 1: 9472 of 10000 MiB") {
		t.Errorf("%q", lines)
	}
	if lines := hear(4*time.Second, 9700, math.NaN()); len(lines) != 0 {
		t.Errorf("told twice: %q", lines)
	}
	shows := s.shows(now)
	u, figures := shows("b", 4).Usage, shows("b", 4).Figures
	if u == nil || u.Processors != 2 || !u.Short() || u.Resident != 992<<20 {
		t.Errorf("%+v", u)
	}
	text, err := json.Marshal(figures)
	if err != nil || string(text) != `[{"name":"loss","value":null}]` {
		t.Errorf("%s, %v", text, err)
	}
	if shows("a", 4).Usage != nil || shows("c", 4).Usage != nil || shows("c", 4).Figures != nil || (*job.Usage)(nil).Short() {
		t.Error("something is known of workers that have told nothing")
	}
	if r := s.measure(now.Add(5 * time.Second)).Ranks[1]; r.Usage == nil || len(r.Figures) != 1 {
		t.Errorf("%+v", r)
	}
}

// TestFalseCounters: no sum ever decreases, and the number of kinds that workers can invent is
// bounded.
func TestFalseCounters(t *testing.T) {
	s := newStalls(job.Timeouts{})
	now := time.Unix(1000, 0)
	s.expect("a")
	hear := func(c *line.Counters) job.Workers {
		s.hear(now, "a", line.Beat{Phase: line.Training, Counters: c})
		return s.measure(now)
	}
	hear(counters(9))
	if m := hear(counters(3)); m.Commits != 9 || m.CommitBytes != 90 || m.Operations[0].Count != 9 || m.Operations[0].Bytes != 18 {
		t.Errorf("smaller: %+v", m)
	}
	if m := hear(nil); m.Commits != 9 {
		t.Errorf("none: %+v", m)
	}
	for worker := range 20 {
		id := fmt.Sprint("liar", worker)
		s.expect(id)
		for beat := range 3 {
			c := &line.Counters{}
			for i := range line.MaxOperations {
				c.Operations = append(c.Operations, line.Operations{Kind: fmt.Sprint(worker, "-", beat, "-", i), Backend: "x", Count: 1})
			}
			s.hear(now, id, line.Beat{Phase: line.Training, Counters: c})
		}
		if worker%2 == 0 {
			s.forget(id)
		}
	}
	m := s.measure(now)
	if len(m.Operations) > mostKinds+1 {
		t.Errorf("%d kinds", len(m.Operations))
	}
	var all uint64
	for _, o := range m.Operations {
		all += o.Count
	}
	if all != 9+20*line.MaxOperations {
		t.Errorf("%d operations in all", all)
	}
}
