// Package replay computes the state of a past job at any time from its events file, for the page in
// the browser and for an animated picture.
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
	// maxLine and maxBytes bound a line of an events file and what is kept of a job, in bytes.
	maxLine  = 4 << 20
	maxBytes = 512 << 20
	// shownEvents is how many of the last events a status has.
	shownEvents = 1000
)

// Recording is what a job has done. It does not change.
type Recording struct {
	// Run is the job's id; empty: the events do not say.
	Run    string
	events []job.Entry
	lines  []json.RawMessage // the text of each event
	trend  []progress
}

// progress is a moment at which the number of commits is known. Between two moments it grows
// evenly.
type progress struct {
	at      time.Time
	commits float64
}

// Read reads the events of the last job of an events file. A job begins after the end of another
// one, or with an audit record of another run: a driver that is killed leaves no end. An error
// names the line.
func Read(from io.Reader) (*Recording, error) { return readUpTo(maxBytes, from) }

// readUpTo is Read of a job that has at most so many bytes.
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

// runOf returns the job's id that an audit record has; empty: it has none, or is another event.
func runOf(name job.EventName, line []byte) string {
	if name != job.Audit {
		return ""
	}
	var record struct {
		Who struct {
			Run string `json:"run"`
		} `json:"who"`
	}
	_ = json.Unmarshal(line, &record) // it is JSON, as ParseEvent has read it; another form has no id
	return record.Who.Run
}

// Begun is the time of the first event, and Ended that of the last one.
func (r *Recording) Begun() time.Time { return r.events[0].Time }

// Ended is the time of the last event.
func (r *Recording) Ended() time.Time { return r.events[len(r.events)-1].Time }

// trendOf returns the moments of the commits: each world's first one, the moment when the world was
// left, which the next first commit tells, and the end.
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

// Commits returns about how many commits the job had made at a time.
func (r *Recording) Commits(at time.Time) uint64 {
	before := progress{r.Begun(), 0}
	for _, p := range r.trend {
		if p.at.After(at) {
			if p.commits <= before.commits || len(r.trend) > 0 && before.at.Before(r.trend[0].at) {
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
	next  int // event
	state state
}

// NewPlayer returns a player at the beginning.
func (r *Recording) NewPlayer() *Player { return &Player{r: r, state: newState(r)} }

// Status returns what the job was like at a time, which must not be before that of the last call.
// Its goodput is known at the end only.
func (p *Player) Status(at time.Time) job.Status {
	for p.next < len(p.r.events) && !p.r.events[p.next].Time.After(at) {
		p.state.apply(&p.r.events[p.next], p.r.lines[p.next])
		p.next++
	}
	s := p.state.status(at, p.r.Commits(at))
	s.Events = append(s.Events, p.r.lines[max(0, p.next-shownEvents):p.next]...)
	return s
}
