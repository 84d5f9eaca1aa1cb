// Package replay computes the state of a past job at any time from its events file, for the page in
// the browser.
package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

const (
	// maxLine and maxBytes bound a line of an events file, and the bytes kept of a job.
	maxLine  = 4 << 20
	maxBytes = 512 << 20
	// shownEvents is the number of the last events in a status.
	shownEvents = 1000
)

// Recording is the record of a job. It does not change.
type Recording struct {
	// Run is the job's id; empty: unknown.
	Run    string
	events []job.Entry
	lines  []json.RawMessage // the text of each event
	trend  []progress
}

// progress is a time at which the number of commits is known. Between two such times the number
// grows evenly.
type progress struct {
	at      time.Time
	commits float64
}

// Read reads the events of the last job in an events file. A job begins after the end of another
// job, or with an audit record of another run, since a killed driver writes no end. Errors name the
// line.
func Read(from io.Reader) (*Recording, error) { return readUpTo(maxBytes, from) }

// readUpTo is like Read, with most as the maximum number of bytes of a job.
func readUpTo(most int, from io.Reader) (*Recording, error) {
	r, n, bytes := &Recording{}, 0, 0
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		n++
		line := append(json.RawMessage(nil), lines.Bytes()...)
		if len(line) == 0 {
			continue
		}
		e, err := job.ParseEvent(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		run := runOf(e.Name, line)
		if r.endsBefore(run) {
			*r, bytes = Recording{}, 0
		}
		if bytes += len(line); bytes > most {
			return nil, fmt.Errorf("line %d: the job has more than %d bytes", n, most)
		}
		if r.Run == "" {
			r.Run = run
		}
		r.events, r.lines = append(r.events, e), append(r.lines, line)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	if len(r.events) == 0 {
		return nil, errors.New("there is no event")
	}
	r.trend = r.trendOf()
	return r, nil
}

// endsBefore returns whether the job has ended before an event of that run, which may be unknown.
func (r *Recording) endsBefore(run string) bool {
	if n := len(r.events); n > 0 && r.events[n-1].Name == job.JobDone {
		return true
	}
	return r.Run != "" && run != "" && run != r.Run
}

// runOf returns the job's id in an audit record, or "" if it has none or the event is of another
// kind.
func runOf(name job.EventName, line []byte) string {
	if name != job.Audit {
		return ""
	}
	var record struct {
		Who struct {
			Run string `json:"run"`
		} `json:"who"`
	}
	_ = json.Unmarshal(line, &record) // cannot fail: ParseEvent has parsed it; other forms have no id
	return record.Who.Run
}

// Begun returns the time of the first event.
func (r *Recording) Begun() time.Time { return r.events[0].Time }

// Ended returns the time of the last event.
func (r *Recording) Ended() time.Time { return r.events[len(r.events)-1].Time }

// trendOf returns the times at which the number of commits is known: each world's first commit, the
// end of each world, whose number the next first commit gives, and the end of the job.
func (r *Recording) trendOf() (trend []progress) {
	for _, e := range r.events {
		switch e.Name {
		case job.FirstCommit:
			if left := e.Time.Add(-time.Duration(e.Seconds * float64(time.Second))); len(trend) > 0 && left.After(trend[len(trend)-1].at) {
				trend = append(trend, progress{left, float64(max(e.Commits, 1) - 1)})
			}
			trend = append(trend, progress{e.Time, float64(e.Commits)})
		case job.JobDone:
			if n := len(trend); n > 0 && e.Time.After(trend[n-1].at) {
				trend = append(trend, progress{e.Time, max(float64(e.Commits), trend[n-1].commits)})
			}
		}
	}
	return trend
}

// Commits returns an estimate of the number of commits at a time.
func (r *Recording) Commits(at time.Time) uint64 {
	before := progress{r.Begun(), 0}
	for _, p := range r.trend {
		if p.at.After(at) {
			if p.commits <= before.commits || before.at.Before(r.trend[0].at) {
				return uint64(before.commits)
			}
			share := at.Sub(before.at).Seconds() / p.at.Sub(before.at).Seconds()
			return uint64(before.commits + share*(p.commits-before.commits))
		}
		before = p
	}
	return uint64(before.commits)
}

// Player plays a recording. Its methods are for one goroutine.
type Player struct {
	r     *Recording
	next  int // index of the next event
	state state
}

// NewPlayer returns a player at the beginning.
func (r *Recording) NewPlayer() *Player { return &Player{r: r, state: newState(r)} }

// Status returns the status of the job at a time, which must not be before that of the last call.
// It includes the goodput only at the end.
func (p *Player) Status(at time.Time) job.Status {
	for p.next < len(p.r.events) && !p.r.events[p.next].Time.After(at) {
		p.state.apply(&p.r.events[p.next], p.r.lines[p.next])
		p.next++
	}
	s := p.state.status(at, p.r.Commits(at))
	s.Events = append(s.Events, p.r.lines[max(0, p.next-shownEvents):p.next]...)
	return s
}
