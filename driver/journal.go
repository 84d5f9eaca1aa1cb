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
	"github.com/hvdrun/hvdrun/driver/launch"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

// clock is the machine's clock: the time of day at its start plus the elapsed monotonic time. It
// does not go back, and its times survive encoding in a journal.
type clock struct {
	start time.Time
	wall  int64
}

// newClock returns a clock that starts now, or at then if that is later.
func newClock(then time.Time) clock {
	now := time.Now()
	return clock{now, max(now.UnixNano(), then.UnixNano())}
}

func (c clock) now() time.Time { return time.Unix(0, c.wall+int64(time.Since(c.start))).UTC() }

// Mirror keeps a copy of the journal where other machines read it. Its methods are called by one
// goroutine, with the records in their order.
type Mirror interface {
	// Append adds a record, and Replace replaces all by these. SetBehind marks the copy as lacking
	// records, until Replace. They do not block, and keep nothing of their arguments that changes.
	Append(payload []byte)
	Replace(records [][]byte)
	SetBehind()
	// Sync blocks until the copy has all records. It does not return where another driver may have
	// taken over the job: this one must not act any more.
	Sync()
	// State says what keeps the copy from being complete; empty: nothing.
	State() string
}

// journalWriter writes the machine's inputs to the journal. The zero value writes nothing.
type journalWriter struct {
	j      *journal.Journal
	path   string
	mirror Mirror   // nil: there is none
	meter  *Meter   // nil: there is none
	ids    []string // of workers named since the last record
	log    logrus.FieldLogger

	// bound is the size from which on the journal is compacted: a snapshot replaces all records.
	bound int64
	// Records that could not be written are in the next snapshot. Until then the file is marked as
	// behind.
	since time.Time        // zero: everything is written
	why   error            // error of the last attempt; permanent if j is nil
	told  bool             // the log has reported it
	retry <-chan time.Time // time of the next attempt; nil: at once

	failures uint64 // times that it could not be written or compacted
}

const (
	// retryPause is the pause between two attempts to write a journal.
	retryPause = time.Second
	// journalSize is the smallest bound. growth is the ratio of the bound to the size of the last
	// snapshot.
	journalSize = 1 << 20
	growth      = 4
	// slack is room for the records that arrive before the loop has time for a snapshot.
	slack = 64 << 10
)

func (w *journalWriter) newID(plan.SlotID) string {
	id := randomID()
	w.ids = append(w.ids, id)
	return id
}

// begin creates the journal of a new job.
func (w *journalWriter) begin(cfg Config, job decide.JobRecord) error {
	j, err := journal.Create(cfg.Journal, cfg.RunID)
	if err != nil {
		return err
	}
	w.take(j, cfg.Journal)
	if w.mirror != nil {
		w.mirror.Replace(nil)
	}
	w.write(job, true)
	return nil
}

// take sets the journal and reserves disk space for it. A file system that cannot reserve space is
// not an error: the journal then depends on free space.
func (w *journalWriter) take(j *journal.Journal, path string) {
	w.j, w.path = j, path
	w.setBound()
}

// setBound sets the bound from the journal's size, which is little more than a snapshot's.
func (w *journalWriter) setBound() {
	w.bound = max(journalSize, growth*w.j.Size())
	if err := w.j.Reserve(w.bound + slack); err != nil {
		w.log.WithError(err).Debug("no disk space could be reserved: the job cannot be resumed if its driver dies while the disk is full")
		if room := w.j.Room() - slack; room > 2*w.j.Size() {
			w.bound = min(w.bound, room)
		}
	}
}

// note records the inputs of a step before its actions are performed. Before a world is published
// and before the job ends the records are synced to disk, because a host that crashes must not
// forget what workers and users have seen.
func (w *journalWriter) note(now time.Time, inputs []decide.Input, actions []decide.Action) {
	ids := w.ids
	w.ids = nil
	if w.j == nil {
		return
	}
	sync := false
	for _, a := range actions {
		switch a.(type) {
		case decide.PublishWorld, decide.FinishJob:
			sync = true
		}
	}
	for i, r := range decide.NewRecords(now, inputs, ids) {
		w.write(r, sync && i == len(inputs)-1)
	}
}

// write appends a record. If the journal cannot be written, for example because the disk is full,
// the job continues in memory.
func (w *journalWriter) write(record any, sync bool) {
	if !w.since.IsZero() {
		return // the next snapshot includes it
	}
	text, err := json.Marshal(record)
	if err != nil {
		w.giveUp(err)
		return
	}
	if err = w.j.Append(text); err == nil {
		err = w.copied(text, sync)
	}
	if err == nil {
		return
	}
	if w.mirror != nil {
		w.mirror.SetBehind()
	}
	w.failures++
	// The file is incomplete: no other driver may resume from it.
	if merr := w.j.SetBehind(); merr != nil {
		w.giveUp(errors.Join(err, merr))
		return
	}
	w.since, w.why, w.retry = time.Now(), err, nil
}

// copied adds a record to the mirror and, with sync, waits until all records are on disk and in the
// mirror.
func (w *journalWriter) copied(text []byte, sync bool) error {
	if w.mirror != nil {
		w.mirror.Append(text)
	}
	if !sync {
		return nil
	}
	err := w.synced()
	if w.mirror != nil {
		w.mirror.Sync()
	}
	return err
}

// due reports whether the journal has to be compacted or written again now. quiet: the loop has
// nothing else to do.
func (w *journalWriter) due(quiet bool) bool {
	switch {
	case w.j == nil:
		return false
	case !w.since.IsZero():
		return w.retry == nil
	case quiet:
		return w.j.Size() > w.bound/4*3
	}
	return w.j.Size() > w.bound
}

// renew replaces the journal's records by a snapshot, which includes those that could not be
// written.
func (w *journalWriter) renew(records [][]byte) {
	w.retry = nil
	err := w.j.Replace(slices.Values(records), true)
	if err != nil {
		w.failures++
	}
	if err == nil && w.mirror != nil {
		w.mirror.Replace(records)
	}
	switch {
	case err == nil:
		if w.told {
			w.log.Warnf("the journal is complete again, after %v", time.Since(w.since).Round(time.Millisecond))
		}
		w.since, w.why, w.told = time.Time{}, nil, false
		w.setBound()
	case w.since.IsZero():
		w.bound = 2 * w.j.Size()
		w.log.WithError(err).Warn("the journal cannot be compacted and grows")
	default:
		if !w.told {
			w.log.WithError(w.why).Error("the journal cannot be written: the job continues but cannot be resumed until it can be written again")
		}
		w.told, w.why, w.retry = true, err, time.After(retryPause)
	}
}

// giveUp removes a journal that is of no further use.
func (w *journalWriter) giveUp(err error) {
	w.log.WithError(errors.Join(err, journal.Remove(w.path))).
		Error("the journal is given up: the job continues but cannot be resumed")
	if w.mirror != nil {
		w.mirror.SetBehind()
	}
	w.since, w.why, w.retry = time.Now(), err, nil
	_ = w.j.Close() // removed: its contents do not matter
	w.j = nil
}

// state describes the journal's error for a status; empty if there is none.
func (w *journalWriter) state() string {
	switch {
	case w.why == nil && w.mirror != nil:
		return w.mirror.State()
	case w.why == nil:
		return ""
	case w.j == nil:
		return fmt.Sprintf("given up: %v", w.why)
	}
	return fmt.Sprintf("not written for %v: %v", time.Since(w.since).Round(time.Second), w.why)
}

// close closes the journal. If the job has ended it releases the reserved disk space.
func (w *journalWriter) close(ended bool) {
	if w.j == nil {
		return
	}
	if ended {
		_ = w.j.Release() // the last record is synced
	}
	_ = w.j.Close()
	w.j = nil
}

// tidy compacts the journal if that is due.
func (l *loop) tidy() {
	if !l.writer.due(len(l.events) == 0 && !l.m.Resetting()) {
		return
	}
	if records, err := l.records(); err != nil {
		l.writer.giveUp(err)
	} else {
		l.writer.renew(records)
	}
}

// records returns the records of a compacted journal.
func (l *loop) records() ([][]byte, error) {
	var mark json.RawMessage
	if l.cfg.Mark != nil {
		mark = l.cfg.Mark()
	}
	first := l.job
	first.Listen = l.listen.String()
	return l.m.Records(first, l.recent, mark)
}

// closeJournal closes the journal after a last attempt to write what is missing.
func (l *loop) closeJournal() {
	if l.writer.j != nil && !l.writer.since.IsZero() {
		l.writer.retry = nil
		l.tidy()
	}
	l.writer.close(finished(l.m))
}

// Resume continues a job whose driver has died. cfg.Journal is its journal; the rest of cfg must be
// as for that driver, except that RunID, Size, Blame and Timeouts are taken from the journal.
// Workers that agents have kept are taken over. Otherwise Resume works like Run. It also returns
// journal.ErrLocked if the driver is alive, ErrFinished if the job has ended, and an error if the
// journal cannot be read.
func Resume(ctx context.Context, cfg Config) error {
	p := &decide.Replay{Told: cfg.Replayed, Marked: cfg.Marked}
	var records [][]byte // for the mirror
	j, run, err := journal.Open(cfg.Journal, func(payload []byte) error {
		if cfg.Mirror != nil {
			records = append(records, slices.Clone(payload))
		}
		return p.Next(payload)
	})
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	l, err := takeOver(cfg, run, p)
	if err != nil {
		return errors.Join(err, j.Close())
	}
	l.writer.take(j, cfg.Journal)
	if cfg.Mirror != nil {
		cfg.Mirror.Replace(records)
		cfg.Mirror.Sync()
	}
	if l.cfg.Output == nil {
		l.cfg.Output = &launch.Output{Stdout: os.Stdout, Stderr: os.Stderr}
		defer l.cfg.Output.Close()
	}
	return l.guarded(ctx)
}

// takeOver returns a loop for a machine that has replayed a journal.
func takeOver(cfg Config, run string, p *decide.Replay) (*loop, error) {
	switch {
	case p.Job == nil:
		return nil, errors.New("driver: the journal is empty: its driver died before the job began")
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
	p.Machine.NameBy(l.writer.newID)
	l.m = p.Machine
	return l, nil
}

// Job is a job as recorded in a journal.
type Job struct {
	RunID string
	// Begun is when the job began; Last is the time of its last event.
	Begun, Last time.Time
	// Running: a driver runs.
	Running bool
	// Finished: the job has ended, with Result (nil: success).
	Finished bool
	Result   error
	// Generation is the generation of the last world and Size its size. Workers is the number of
	// live processes as far as the journal knows.
	Generation    uint64
	Size, Workers int
}

// Inspect reads the journal of a job, also while its driver runs. It changes nothing.
func Inspect(path string) (Job, error) {
	f, err := safefile.Read(path)
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
		return job, errors.New("driver: the journal is still empty")
	}
	job.Begun, job.Last = time.Unix(0, p.Job.Begun), p.Machine.Last()
	job.Finished, job.Result = p.Machine.Finished()
	job.Generation, job.Size, job.Workers = p.Machine.World().Generation, p.Machine.World().Size(), len(p.Machine.Incarnations())
	return job, nil
}
