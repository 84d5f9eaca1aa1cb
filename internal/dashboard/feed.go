package dashboard

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// Source is a job that can be asked and told. Its methods may be called by several goroutines.
type Source interface {
	// Status returns the job's status, also of one that has no driver or has ended.
	Status(ctx context.Context) (job.Status, error)
	// Command asks the job to carry out a command, and returns what was done. A refusal is a
	// *job.RefusedError.
	Command(ctx context.Context, c job.Command) (done string, err error)
}

// Job is what a page shows.
type Job struct {
	Source Source
	// Command is the job's command line, for reading.
	Command []string
	// Events is the job's events file, of which the first EventsFrom bytes are of other jobs.
	// Empty: the job has no events file.
	Events     string
	EventsFrom int64
	// Recorded returns the events that the job's journal tells, oldest first, as in an events file.
	// It serves where there is no events file. Nil: nothing does.
	Recorded func() ([]json.RawMessage, error)
	// Tasks returns the status of the job's scheduler of tasks as JSON; nil: it has none. A nil
	// Tasks is never called.
	Tasks func(ctx context.Context) (json.RawMessage, error)
	// Output is the folder of the workers' output. Empty: it is not kept.
	Output string
}

const (
	// maxEvents and maxEventBytes bound the events of a view; older ones are in the events file.
	maxEvents     = 1000
	maxEventBytes = 1 << 20
	// readAtOnce bounds what is read of the events file between two looks, and readBack how much of
	// it is read at first; both in bytes.
	readAtOnce = 4 << 20
	readBack   = 64 << 20
	// maxLine bounds a line of an events file, in bytes: a world of 10,000 has 700 KiB.
	maxLine = 4 << 20
	// recordPause is the least time between two readings of the journal.
	recordPause = 5 * time.Second
)

// Feed follows a job. Its methods are for one goroutine.
type Feed struct {
	job     Job
	history *history
	events  []Event
	bytes   int // of the texts of events
	seq     int

	file     io.ReadSeekCloser // the events file; nil: not open
	begun    bool              // the events file was read from its beginning
	part     []byte            // of the last line, which is not whole yet
	skip     bool              // the line is too long, or its beginning was left out
	ended    bool              // the job's last event was read
	newest   []byte            // the newest event of a status
	known    time.Time         // of the newest event that was taken from a journal or a status
	recorded time.Time         // when the journal was read
	over     *View             // of a job that has ended and is not looked at again
}

// NewFeed returns the feed of a job. It does nothing until Look. The caller must call Close.
func NewFeed(j Job) *Feed { return &Feed{job: j, history: newHistory()} }

// Close closes the events file.
func (f *Feed) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// Look asks the job and reads its events. It blocks for as long as the source does. A view of a job
// that cannot be asked has Problem set, and what was known of it before.
func (f *Feed) Look(ctx context.Context, now time.Time) *View {
	if f.over != nil {
		return f.over
	}
	v := &View{Command: f.job.Command, Output: f.job.Output != ""}
	s, err := f.job.Source.Status(ctx)
	if err != nil {
		v.Problem = err.Error()
	}
	if s.Time.IsZero() {
		s.Time = now
	}
	fromFile := f.readFile()
	if !fromFile && err == nil {
		f.takeStatus(s.Events, now)
	}
	s.Events = nil
	v.Status = s
	v.Commits = commitsOf(&s)
	if s.State == job.Running && v.Commits > 0 && s.Driver != 0 {
		v.Rate = f.history.look(s.Time, v.Commits)
	}
	f.history.report(s.Time, figuresOf(&s))
	if f.job.Tasks != nil && s.Driver != 0 && !v.Over() {
		if text, err := f.job.Tasks(ctx); err == nil {
			v.Tasks = text
		}
	}
	f.fill(v)
	if v.Over() && s.Driver == 0 && err == nil && (f.ended || !fromFile) {
		f.over = v // nothing of it changes any more
	}
	return v
}

// fill copies what the feed knows into a view.
func (f *Feed) fill(v *View) {
	h := f.history
	if v.Over() { // the slots say what was known at the last heartbeat, if they are still there
		v.Commits = max(v.Commits, h.commits)
	}
	v.Worlds = append([]World(nil), h.worlds...)
	v.Forgotten = h.dropped
	v.Recoveries = Recoveries{Steps: h.counts.Steps, Failed: append([]int(nil), h.counts.Failed...), Planned: append([]int(nil), h.counts.Planned...)}
	v.Points = slices.Clone(h.rates.points)
	v.Curves = make(map[string][]Point, len(h.figures))
	for name, c := range h.figures {
		v.Curves[name] = slices.Clone(c.points)
	}
	v.Events = append([]Event(nil), f.events...)
}

// add takes one line of events.
func (f *Feed) add(line []byte) {
	fact, err := job.ParseEvent(line)
	if err != nil {
		return // a file that others write to as well
	}
	f.history.add(&fact)
	f.seq++
	e := told(&fact)
	e.Seq = f.seq
	f.events = append(f.events, e)
	f.bytes += len(e.Text)
	for len(f.events) > maxEvents || f.bytes > maxEventBytes {
		f.bytes -= len(f.events[0].Text)
		f.events[0] = Event{}
		f.events = f.events[1:]
	}
	f.ended = fact.Name == job.JobDone
}

// readFile reads what is new in the events file, and returns whether there is one.
func (f *Feed) readFile() bool {
	if f.job.Events == "" {
		return false
	}
	if f.file == nil {
		file, err := safefile.Read(f.job.Events)
		if err != nil {
			return f.begun // it was there before: it is not replaced by what the journal tells
		}
		if fi, err := file.Stat(); err != nil || !fi.Mode().IsRegular() || fi.Size() < f.job.EventsFrom {
			_ = file.Close() // a pipe, or another file
			return false
		} else if from := max(f.job.EventsFrom, fi.Size()-readBack); true {
			f.skip = from > f.job.EventsFrom
			_, _ = file.Seek(from, io.SeekStart) // a regular file
		}
		f.file, f.begun = file, true
	}
	for left := readBack; left > 0 && !f.ended; {
		n, err := f.readSome(min(left, readAtOnce))
		left -= n
		if n == 0 || err != nil {
			break
		}
	}
	return true
}

// readSome reads at most so many bytes.
func (f *Feed) readSome(most int) (int, error) {
	b := make([]byte, 64<<10)
	n := 0
	for n < most && !f.ended {
		k, err := f.file.Read(b)
		n += k
		f.lines(b[:k])
		if k == 0 || err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return n, err
		}
	}
	return n, nil
}

// lines takes the next bytes of the events file.
func (f *Feed) lines(b []byte) {
	for !f.ended {
		line, rest, whole := bytes.Cut(b, []byte{'\n'})
		if !f.skip {
			f.part = append(f.part, line...)
		}
		if len(f.part) > maxLine {
			f.part, f.skip = nil, true
		}
		if !whole {
			return
		}
		if !f.skip && len(f.part) > 0 {
			f.add(f.part)
		}
		f.part, f.skip, b = f.part[:0], false, rest
	}
}

// takeStatus takes events from a status, which has the last few, and from the journal where those
// before are not known.
func (f *Feed) takeStatus(events []json.RawMessage, now time.Time) {
	if len(events) == 0 || bytes.Equal(events[len(events)-1], f.newest) {
		return
	}
	fresh, gap := events, true
	for i := len(events) - 1; i >= 0; i-- {
		if bytes.Equal(events[i], f.newest) {
			fresh, gap = events[i+1:], false
			break
		}
	}
	if gap && f.job.Recorded != nil && (f.recorded.IsZero() || now.Sub(f.recorded) >= recordPause) {
		f.recorded = now
		if all, err := f.job.Recorded(); err == nil && len(all) > 0 {
			fresh = all
		}
	}
	known := f.known
	for _, line := range fresh {
		if fact, err := job.ParseEvent(line); err == nil && (!gap || fact.Time.After(known)) {
			f.add(line)
			f.known = fact.Time
		}
	}
	f.newest = bytes.Clone(events[len(events)-1])
}
