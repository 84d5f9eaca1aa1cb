package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/driver/journal"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// clock is what the machine goes by: the time of day at its start, and as much later as a steady
// clock says. It does not go back, and tells nothing that could not be written down.
type clock struct {
	start time.Time
	wall  int64
}

// newClock returns one that begins now, or then, whichever is later.
func newClock(then time.Time) clock {
	now := time.Now()
	return clock{now, max(now.UnixNano(), then.UnixNano())}
}

func (c clock) now() time.Time { return time.Unix(0, c.wall+int64(time.Since(c.start))).UTC() }

// book is where the loop writes down what it feeds the machine. The zero book keeps nothing.
type book struct {
	j    *journal.Journal
	path string
	ids  []string // given since the last note
	log  logrus.FieldLogger

	// bound is the size of the journal from which on it is written anew, with a snapshot in place
	// of all records.
	bound int64
	// What could not be written is in the next snapshot, and the file says that it lacks it.
	since time.Time        // zero: all is written
	why   error            // the last try failed, or nothing is tried any more (j is nil)
	told  bool             // the log says so
	retry <-chan time.Time // tells when to try again; nil: at once
}

const (
	// rewrite is the pause between two tries to write the journal.
	rewrite = time.Second
	// journalSize is the least bound, growth how many times the size of its snapshot the journal
	// may be before the next.
	journalSize = 1 << 20
	growth      = 4
	// slack is room for the records of a moment in which there is no time for a snapshot.
	slack = 64 << 10
)

// newID names a worker.
func (b *book) newID(plan.SlotID) string {
	id := randomID()
	b.ids = append(b.ids, id)
	return id
}

// begin makes the journal of a new job.
func (b *book) begin(cfg Config, job decide.JobRecord) error {
	j, err := journal.Create(cfg.Journal, cfg.RunID)
	if err != nil {
		return err
	}
	b.take(j, cfg.Journal)
	b.write(job, true)
	return nil
}

// take makes the journal the book's, and has room kept for it. On a file system that keeps none, or
// has none, the journal is as good, until the disk is full.
func (b *book) take(j *journal.Journal, path string) {
	b.j, b.path = j, path
	b.setBound()
}

// setBound goes by what the journal holds now, which is hardly more than a snapshot.
func (b *book) setBound() {
	b.bound = max(journalSize, growth*b.j.Size())
	if err := b.j.Reserve(b.bound + slack); err != nil {
		b.log.WithError(err).Debug("the job could not be resumed if its driver died while the disk is full")
		if room := b.j.Room() - slack; room > 2*b.j.Size() {
			b.bound = min(b.bound, room)
		}
	}
}

// note writes down what the machine was fed, before its actions are performed. A world, and the end
// of the job, wait until it is on the disk: a machine that breaks down must not have told of what
// it forgets.
func (b *book) note(now time.Time, in decide.Input, actions []decide.Action) {
	ids := b.ids
	b.ids = nil
	if b.j == nil {
		return
	}
	sync := false
	for _, a := range actions {
		switch a.(type) {
		case decide.PublishWorld, decide.FinishJob:
			sync = true
		}
	}
	b.write(decide.NewRecord(now, in, ids), sync)
}

// write adds a record. Where the journal cannot be written, as on a disk that is full, the job goes
// on from memory.
func (b *book) write(record any, sync bool) {
	if !b.since.IsZero() {
		return // the next snapshot holds it
	}
	text, err := json.Marshal(record)
	if err != nil {
		b.giveUp(err)
		return
	}
	if err = b.j.Append(text); err == nil && sync {
		err = b.j.Sync()
	}
	if err == nil {
		return
	}
	// No driver may go on with what the file holds.
	if merr := b.j.SetBehind(); merr != nil {
		b.giveUp(errors.Join(err, merr))
		return
	}
	b.since, b.why, b.retry = time.Now(), err, nil
}

// due tells whether the journal is to be written anew now; quiet: there is nothing else to do.
func (b *book) due(quiet bool) bool {
	switch {
	case b.j == nil:
		return false
	case !b.since.IsZero():
		return b.retry == nil
	case quiet:
		return b.j.Size() > b.bound/4*3
	}
	return b.j.Size() > b.bound
}

// renew writes the journal anew: the records stand for all that was written, or could not be.
func (b *book) renew(records [][]byte) {
	b.retry = nil
	err := b.j.Replace(slices.Values(records), true)
	switch {
	case err == nil:
		if b.told {
			b.log.Warnf("the journal holds everything again, after %v", time.Since(b.since).Round(time.Millisecond))
		}
		b.since, b.why, b.told = time.Time{}, nil, false
		b.setBound()
	case b.since.IsZero():
		b.bound = 2 * b.j.Size()
		b.log.WithError(err).Warn("the journal cannot be written anew, and grows")
	default:
		if !b.told {
			b.log.WithError(b.why).Error("the journal cannot be written: the job goes on, but could not be resumed until it can be")
		}
		b.told, b.why, b.retry = true, err, time.After(rewrite)
	}
}

// giveUp removes a journal that cannot be of use any more.
func (b *book) giveUp(err error) {
	b.log.WithError(errors.Join(err, journal.Remove(b.path))).
		Error("the journal is given up: the job goes on, but could not be resumed")
	b.since, b.why, b.retry = time.Now(), err, nil
	_ = b.j.Close() // nobody reads it
	b.j = nil
}

// state tells a person what is wrong with the journal; "" is nothing.
func (b *book) state() string {
	switch {
	case b.why == nil:
		return ""
	case b.j == nil:
		return fmt.Sprintf("given up: %v", b.why)
	}
	return fmt.Sprintf("not written for %v: %v", time.Since(b.since).Round(time.Second), b.why)
}

// close lets go of the journal, and where the job has ended of the room for more.
func (b *book) close(ended bool) {
	if b.j == nil {
		return
	}
	if ended {
		_ = b.j.Release() // everything that matters is on the disk
	}
	_ = b.j.Close()
	b.j = nil
}

// tidy writes the journal anew where that is due.
func (l *loop) tidy() {
	if !l.book.due(len(l.events) == 0 && !l.m.Resetting()) {
		return
	}
	if records, err := l.records(); err != nil {
		l.book.giveUp(err)
	} else {
		l.book.renew(records)
	}
}

// records are those of a journal from which another driver would make what this one is.
func (l *loop) records() ([][]byte, error) {
	var mark json.RawMessage
	if l.cfg.Mark != nil {
		mark = l.cfg.Mark()
	}
	first := l.job
	first.Listen = l.listen.String()
	return l.m.Records(first, l.recent, mark)
}

// closeBook writes down, at the last moment, what could not be before.
func (l *loop) closeBook() {
	if l.book.j != nil && !l.book.since.IsZero() {
		l.book.retry = nil
		l.tidy()
	}
	l.book.close(finished(l.m))
}

// Resume goes on with a job whose driver has died: cfg.Journal is its journal, and whatever else
// cfg holds is what that driver was given, except that Size, Blame and Timeouts are taken from the
// journal, and RunID too. Its workers, which agents have kept, are taken over. Otherwise it is as
// Run. Besides, it returns journal.ErrLocked where the driver lives, ErrFinished where the job has
// ended, and other errors where the journal cannot be understood.
func Resume(ctx context.Context, cfg Config) error {
	p := &decide.Replay{Told: cfg.Replayed, Marked: cfg.Marked}
	j, run, err := journal.Open(cfg.Journal, p.Next)
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	l, err := takeOver(cfg, run, p)
	if err != nil {
		return errors.Join(err, j.Close())
	}
	l.book.take(j, cfg.Journal)
	if l.cfg.Output == nil {
		l.cfg.Output = &launch.Output{Stdout: os.Stdout, Stderr: os.Stderr}
		defer l.cfg.Output.Close()
	}
	return l.guarded(ctx)
}

// takeOver makes a loop around a machine that has been fed a journal.
func takeOver(cfg Config, run string, p *decide.Replay) (*loop, error) {
	switch {
	case p.Job == nil:
		return nil, errors.New("driver: the journal holds nothing: its driver died before it began")
	case finished(p.Machine):
		return nil, ErrFinished
	}
	cfg.RunID, cfg.Size, cfg.Blame, cfg.Timeouts = run, p.Job.Size, p.Job.Blame, p.Job.Timeouts
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := newLoop(cfg)
	l.job, l.resumes, l.clock, l.recent = *p.Job, true, newClock(p.Machine.Last()), p.Recent
	p.Machine.NameBy(l.book.newID)
	l.m = p.Machine
	return l, nil
}

// Job is what a journal tells of a job.
type Job struct {
	RunID string
	// Begun is when it began, Last when the last event happened.
	Begun, Last time.Time
	// Running: a driver is at work.
	Running bool
	// Finished: the job has come to its end, with Result (nil: done).
	Finished bool
	Result   error
	// Generation is that of the last world, Size its size, Workers how many processes live, as far
	// as the journal knows.
	Generation    uint64
	Size, Workers int
}

// Inspect reads the journal of a job, whose driver may be running. It changes nothing.
func Inspect(path string) (Job, error) {
	f, err := os.Open(path)
	if err != nil {
		return Job{}, fmt.Errorf("driver: %w", err)
	}
	defer f.Close()
	p := &decide.Replay{}
	job := Job{}
	if job.Running, err = journal.Locked(path); err != nil {
		return job, fmt.Errorf("driver: %w", err)
	}
	if job.RunID, _, err = journal.Read(f, p.Next); err != nil {
		return job, fmt.Errorf("driver: %w", err)
	}
	if p.Job == nil {
		return job, errors.New("driver: the journal holds nothing yet")
	}
	job.Begun, job.Last = time.Unix(0, p.Job.Begun), p.Machine.Last()
	job.Finished, job.Result = p.Machine.Finished()
	job.Generation, job.Size, job.Workers = p.Machine.World().Generation, p.Machine.World().Size(), len(p.Machine.Incarnations())
	return job, nil
}
