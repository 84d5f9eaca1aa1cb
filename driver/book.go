package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/journal"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// clock is what the machine goes by: the time of day at its start, and as much later as a steady clock says. It does not go
// back, and tells nothing that could not be written down.
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

	// What could not be written waits in memory, and the file says so.
	late  [][]byte
	size  int              // bytes in late
	since time.Time        // zero: all is written
	why   error            // the last try failed, or nothing is tried any more (j is nil)
	retry <-chan time.Time // tells when to try again; nil: never
}

const (
	// rewrite is the pause between two tries to write the journal.
	rewrite = time.Second
	// maxLate is the most bytes of records that wait for room.
	maxLate = 64 << 20
)

// newID names a worker.
func (b *book) newID(plan.SlotID) string {
	id := randomID()
	b.ids = append(b.ids, id)
	return id
}

// begin makes the journal of a new job.
func (b *book) begin(cfg Config, job jobRecord) error {
	j, err := journal.Create(cfg.Journal, cfg.RunID)
	if err != nil {
		return err
	}
	b.j, b.path = j, cfg.Journal
	b.write(job, true)
	return nil
}

// note writes down what the machine was fed, before its actions are performed. A world, and the end of the job, wait until
// it is on the disk: a machine that breaks down must not have told of what it forgets.
func (b *book) note(now time.Time, ev event, actions []action) {
	ids := b.ids
	b.ids = nil
	if b.j == nil {
		return
	}
	sync := false
	for _, a := range actions {
		switch a.(type) {
		case publishWorld, finishJob:
			sync = true
		}
	}
	b.write(newRecord(now, ev, ids), sync)
}

// write adds a record. Where the journal cannot be written, as on a disk that is full, the job goes on from memory.
func (b *book) write(record any, sync bool) {
	text, err := json.Marshal(record)
	if err != nil {
		b.giveUp(err)
		return
	}
	if !b.since.IsZero() {
		b.keep(text)
		return
	}
	if err := b.j.Append(text); err != nil {
		b.keep(text)
		b.fail(err)
	} else if sync {
		if err := b.j.Sync(); err != nil {
			b.fail(err)
		}
	}
}

// keep has a record wait for room.
func (b *book) keep(text []byte) {
	b.late = append(b.late, text)
	if b.size += len(text); b.size > maxLate {
		b.giveUp(fmt.Errorf("%d records wait for room", len(b.late)))
	}
}

// fail notes that the journal lacks records, in the file too: no driver goes on with what it holds.
func (b *book) fail(err error) {
	if merr := b.j.SetBehind(true); merr != nil {
		b.giveUp(errors.Join(err, merr))
		return
	}
	b.since, b.why, b.retry = time.Now(), err, time.After(rewrite)
	b.log.WithError(err).Error("the journal cannot be written: the job goes on, but could not be resumed until it can be")
}

// catchUp tries to write what waits.
func (b *book) catchUp() {
	b.retry = nil
	if b.since.IsZero() || b.j == nil {
		return
	}
	err := b.j.Mend()
	for err == nil && len(b.late) > 0 {
		if err = b.j.Append(b.late[0]); err == nil {
			b.size -= len(b.late[0])
			b.late = b.late[1:]
		}
	}
	// All records are on the disk before the file says so.
	for _, step := range []func() error{b.j.Sync, func() error { return b.j.SetBehind(false) }, b.j.Sync} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		b.why, b.retry = err, time.After(rewrite)
		return
	}
	b.log.Warnf("the journal holds everything again, after %v", time.Since(b.since).Round(time.Millisecond))
	b.late, b.size, b.since, b.why = nil, 0, time.Time{}, nil
}

// giveUp removes a journal that cannot be of use any more.
func (b *book) giveUp(err error) {
	b.log.WithError(errors.Join(err, os.Remove(b.path))).
		Error("the journal is given up: the job goes on, but could not be resumed")
	b.since, b.why, b.late, b.retry = time.Now(), err, nil, nil
	b.close()
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

func (b *book) close() {
	if b.j != nil && !b.since.IsZero() && len(b.late) > 0 {
		b.catchUp() // the last try
	}
	if b.j != nil {
		_ = b.j.Close() // everything that matters is on the disk
		b.j = nil
	}
}

// Resume goes on with a job whose driver has died: cfg.Journal is its journal, and whatever else cfg holds is what that
// driver was given, except that Size, Blame and Timeouts are taken from the journal, and RunID too. Its workers, which agents
// have kept, are taken over. Otherwise it is as Run. Besides, it returns journal.ErrLocked where the driver lives, ErrFinished
// where the job has ended, and other errors where the journal cannot be understood.
func Resume(ctx context.Context, cfg Config) error {
	if cfg.Replayed == nil {
		cfg.Replayed = func(Event) {}
	}
	var before recent
	p := &replay{acted: func(a action) {
		if e, ok := a.(emitEvent); ok {
			before.add(e.event)
			cfg.Replayed(e.event)
		}
	}}
	j, run, err := journal.Open(cfg.Journal, p.next)
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	l, err := takeOver(cfg, run, p)
	if err != nil {
		return errors.Join(err, j.Close())
	}
	l.book.j, l.book.path, l.recent = j, cfg.Journal, before
	if l.cfg.Output == nil {
		l.cfg.Output = &launch.Output{Stdout: os.Stdout, Stderr: os.Stderr}
		defer l.cfg.Output.Close()
	}
	return l.guarded(ctx)
}

// takeOver makes a loop around a machine that has been fed a journal.
func takeOver(cfg Config, run string, p *replay) (*loop, error) {
	switch {
	case p.job == nil:
		return nil, errors.New("driver: the journal holds nothing: its driver died before it began")
	case p.m.finished:
		return nil, ErrFinished
	}
	cfg.RunID, cfg.Size, cfg.Blame, cfg.Timeouts = run, p.job.Size, p.job.Blame, p.job.Timeouts
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	l := newLoop(cfg)
	l.after, l.clock = p.job, newClock(p.m.last)
	p.m.newID = l.book.newID
	l.m = p.m
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
	// Generation is that of the last world, Size its size, Workers how many processes live, as far as the journal knows.
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
	p := &replay{}
	job := Job{}
	if job.Running, err = journal.Locked(path); err != nil {
		return job, fmt.Errorf("driver: %w", err)
	}
	if job.RunID, _, err = journal.Read(f, p.next); err != nil {
		return job, fmt.Errorf("driver: %w", err)
	}
	if p.job == nil {
		return job, errors.New("driver: the journal holds nothing yet")
	}
	job.Begun, job.Last = time.Unix(0, p.job.Begun), p.m.last
	job.Finished, job.Result = p.m.finished, p.m.result
	job.Generation, job.Size, job.Workers = p.m.world.Generation, p.m.world.Size(), len(p.m.workers)
	return job, nil
}
