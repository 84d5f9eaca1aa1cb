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

// Source gives access to a job. Its methods may be called by several goroutines.
type Source interface {
	// Status returns the job's status, even if the job has no driver or has ended.
	Status(ctx context.Context) (job.Status, error)
	// Command makes the job execute a command, and returns what was done. If the job refuses, the
	// error is a *job.RefusedError.
	Command(ctx context.Context, c job.Command) (done string, err error)
}

// Job is what a page shows.
type Job struct {
	Source Source
	// Command is the job's command line, for display.
	Command []string
	// Events is the path of the job's events file, whose first EventsFrom bytes are of other jobs.
	// Empty: the job has no events file.
	Events     string
	EventsFrom int64
	// Recorded returns the events in the job's journal, oldest first, as in an events file. It is
	// used if there is no events file. Nil: the journal is not read.
	Recorded func() ([]json.RawMessage, error)
	// Tasks returns the status of the job's scheduler of tasks as JSON, or nil if it has none. A
	// nil Tasks is not called.
	Tasks func(ctx context.Context) (json.RawMessage, error)
	// Output is the folder of the workers' output. Empty: output is not kept.
	Output string
}

const (
	// maxEvents and maxEventBytes bound the events of a view; older ones are in the events file.
	maxEvents     = 1000
	maxEventBytes = 1 << 20
	// readAtOnce bounds the bytes read from the events file in one call of Look, and readBack those
	// read by the first call.
	readAtOnce = 4 << 20
	readBack   = 64 << 20
	// maxLine bounds a line of an events file, in bytes: a world of 10,000 has 700 KiB.
	maxLine = 4 << 20
	// recordPause is the shortest time between two reads of the journal.
	recordPause = 5 * time.Second
)

// Feed follows a job. Its methods are for one goroutine.
type Feed struct {
	job     Job
	history *history
	events  []Event
	bytes   int // total size of the texts of events
	seq     int

	file     io.ReadSeekCloser // the events file; nil: not open
	begun    bool              // the events file was read from its beginning
	part     []byte            // the incomplete last line
	skip     bool              // the line is too long, or its beginning was not read
	ended    bool              // the job's last event has been read
	newest   []byte            // the newest event of the last status
	known    time.Time         // time of the newest event taken from a journal or a status
	recorded time.Time         // time of the last read of the journal
	over     *View             // the final view of an ended job
}

// NewFeed returns the feed of a job. It does nothing until Look is called. The caller must call
// Close.
func NewFeed(j Job) *Feed { return &Feed{job: j, history: newHistory()} }

// Close closes the events file.
func (f *Feed) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// Look requests the job's status, reads its new events, and returns a view. It blocks as long as
// the source does. If the status cannot be read, the view has Problem set, and the events and
// history so far.
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
		f.over = v // it can no longer change
	}
	return v
}

// fill copies what the feed knows into a view.
func (f *Feed) fill(v *View) {
	h := f.history
	if v.Over() { // the slots, if they still exist, have the state of the last heartbeat
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

// add adds one line of events.
func (f *Feed) add(line []byte) {
	fact, err := job.ParseEvent(line)
	if err != nil {
		return // others write to the file too
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

// readFile reads new bytes of the events file, and returns whether there is such a file.
func (f *Feed) readFile() bool {
	if f.job.Events == "" {
		return false
	}
	if f.file == nil {
		file, err := safefile.Read(f.job.Events)
		if err != nil {
			return f.begun // a file that existed before is not replaced by the journal
		}
		fi, err := file.Stat()
		if err != nil || !fi.Mode().IsRegular() || fi.Size() < f.job.EventsFrom {
			_ = file.Close() // a pipe or something else
			return false
		}
		from := max(f.job.EventsFrom, fi.Size()-readBack)
		_, _ = file.Seek(from, io.SeekStart) // cannot fail for a regular file
		f.file, f.begun, f.skip = file, true, from > f.job.EventsFrom
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

// readSome reads up to most bytes.
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

// lines adds the next bytes of the events file.
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

// takeStatus adds the events of a status, which has the last few, and if there is a gap before
// them, those of the journal.
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
