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
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
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

// Mirror keeps a copy of the journal that other machines can read. Its methods are called one after
// another, with the records in order; only State may be called while Sync blocks.
type Mirror interface {
	// Append adds a record, and Replace replaces all records. SetBehind marks the copy as
	// incomplete until the next Replace. They do not block, and keep no argument that changes
	// later.
	Append(payload []byte)
	Replace(records [][]byte)
	SetBehind()
	// Sync blocks until the copy has all records. If another driver may have taken over the job, it
	// never returns, because this driver must not act any more.
	Sync()
	// State describes why the copy is incomplete; empty: it is complete.
	State() string
}

// journalWriter writes the machine's inputs to the journal, and their copy to the mirror. The zero
// value writes nothing.
type journalWriter struct {
	k      *journal.Keeper // nil: nothing is written
	mirror Mirror          // nil: no mirror
	meter  *Meter          // nil: nothing is measured
	asks   <-chan func()   // requests of other goroutines to the loop
	ids    []string        // of workers named since the last record
	log    logrus.FieldLogger
	retry  <-chan time.Time // when to retry the snapshot that has failed; nil: none has failed
}

// journalSize is the size in bytes up to which a journal is not compacted.
const journalSize = 1 << 20

func (w *journalWriter) newID(plan.SlotID) string {
	id := NewRunID()
	w.ids = append(w.ids, id)
	return id
}

// keep sets up w to write the journal.
func (w *journalWriter) keep(cfg Config) {
	w.k = &journal.Keeper{Rules: journal.Rules{
		Path: cfg.Journal, Run: cfg.RunID, Least: journalSize, Reserve: true, Strict: true,
		Log: w.log, Level: logrus.ErrorLevel, Name: "the journal",
		Follows: "the job continues but cannot be resumed until it can be written again",
		NoRoom:  "the job cannot be resumed if its driver dies while the disk is full",
	}}
}

// begin creates the journal of a new job.
func (w *journalWriter) begin(cfg Config, job decide.JobRecord) error {
	w.keep(cfg)
	if err := w.k.Create(); err != nil {
		w.k = nil
		return err
	}
	if w.mirror != nil {
		w.mirror.Replace(nil)
	}
	w.write(job, true)
	return nil
}

// take takes over the journal of the previous driver.
func (w *journalWriter) take(cfg Config, j *journal.Journal) {
	w.keep(cfg)
	w.k.Take(j)
}

// note records the inputs of a step before its actions are performed. It syncs the records to disk
// before a world is published, a command is answered, or the job ends, because a host that crashes
// must not forget what workers and users have seen. It reports whether it synced them.
func (w *journalWriter) note(now time.Time, inputs []decide.Input, actions []decide.Action) bool {
	ids := w.ids
	w.ids = nil
	if w.k == nil {
		return false
	}
	sync := false
	for _, a := range actions {
		switch a.(type) {
		case decide.PublishWorld, decide.FinishJob, decide.Answer:
			sync = true
		}
	}
	for i, r := range decide.NewRecords(now, inputs, ids) {
		w.write(r, sync && i == len(inputs)-1)
	}
	return sync && !w.k.Lacking()
}

// write appends a record, and with sync waits until all records are on disk and in the mirror. If
// the journal cannot be written, for example because the disk is full, the job continues in memory.
func (w *journalWriter) write(record any, sync bool) {
	if w.k.Lacking() {
		return // the next snapshot includes it
	}
	text, err := json.Marshal(record)
	if err != nil {
		w.giveUp(err)
		return
	}
	err = w.k.Append(time.Now(), text)
	if err == nil && w.mirror != nil {
		w.mirror.Append(text)
	}
	if err == nil && sync {
		if err = w.synced(); w.mirror != nil {
			w.awaitMirror()
		}
	}
	if err != nil && w.mirror != nil {
		w.mirror.SetBehind()
	}
}

// awaitMirror blocks until the mirror has all records. Meanwhile it answers requests of other
// goroutines to the loop, so that the status and the metrics show that a mirror cannot be written.
func (w *journalWriter) awaitMirror() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.mirror.Sync()
	}()
	for {
		select {
		case ask := <-w.asks:
			ask()
		case <-done:
			return
		}
	}
}

// due reports whether the journal must be compacted or rewritten now. quiet means that the loop has
// nothing else to do.
func (w *journalWriter) due(quiet bool) bool { return w.k != nil && w.k.Due(time.Now(), quiet) }

// renew replaces the journal's records by a snapshot, which includes records that could not be
// written.
func (w *journalWriter) renew(records [][]byte) {
	w.retry = nil
	now := time.Now()
	if err := w.k.Compact(now, slices.Values(records)); err == nil && w.mirror != nil {
		w.mirror.Replace(records)
	}
	if at, failing := w.k.Next(); failing {
		w.retry = time.After(at.Sub(now))
	}
}

// giveUp removes a journal that is no longer useful.
func (w *journalWriter) giveUp(err error) {
	w.k.GiveUp(err)
	if w.mirror != nil {
		w.mirror.SetBehind()
	}
}

// state describes the journal's error for a status; empty without an error.
func (w *journalWriter) state() string {
	if w.k != nil && w.k.Err() != nil {
		return w.k.State(time.Now())
	}
	if w.mirror != nil {
		return w.mirror.State()
	}
	return ""
}

// tidy compacts the journal if it is due.
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
	return l.m.Records(l.job, l.recent, mark)
}

// closeJournal closes the journal after a last attempt to write what is missing, and releases the
// reserved disk space if the job has ended.
func (l *loop) closeJournal() {
	k := l.writer.k
	if k == nil {
		return
	}
	if k.Lacking() {
		k.Hurry()
		l.tidy()
	}
	if finished(l.m) {
		k.Release()
	}
	k.Close()
}

// Resume continues a job whose driver has died. cfg.Journal is its journal. The rest of cfg must be
// as for that driver, except that RunID, Size, Blame and Timeouts are taken from the journal.
// Resume takes over the workers that agents have kept, and otherwise works like Run. It also
// returns job.ErrDriven if the driver is alive, job.ErrFinished if the job has ended, and an error
// if the journal cannot be read.
func Resume(ctx context.Context, cfg Config) error {
	p := &decide.Replay{Told: cfg.Replayed, Marked: cfg.Marked}
	var records [][]byte // for the mirror
	j, run, err := journal.Open(cfg.Journal, func(payload []byte) error {
		if cfg.Mirror != nil {
			records = append(records, slices.Clone(payload))
		}
		return p.Next(payload)
	})
	if errors.Is(err, journal.ErrLocked) {
		return job.ErrDriven
	}
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	l, err := takeOver(cfg, run, p)
	if err != nil {
		return errors.Join(err, j.Close())
	}
	if n := j.Lost(); n > 0 {
		cfg.Log.Warnf("the machine died before the last %d bytes of the journal were on its disk: what happened since the last world "+
			"or command is not known", n)
	}
	l.writer.take(l.cfg, j)
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
		return nil, job.ErrFinished
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
	// Running: a driver runs the job.
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
func Inspect(path string) (found Job, err error) {
	if found.Running, err = journal.Locked(path); err != nil {
		return found, fmt.Errorf("driver: %w", err)
	}
	p := &decide.Replay{}
	if found.RunID, err = inspect(path, p); err != nil {
		return found, err
	}
	found.Begun, found.Last = time.Unix(0, p.Job.Begun), p.Machine.Last()
	found.Finished, found.Result = p.Machine.Finished()
	found.Generation, found.Size, found.Workers = p.Machine.World().Generation, p.Machine.World().Size(), len(p.Machine.Incarnations())
	return found, nil
}

// inspect feeds the journal at path to p, and returns the run id. It returns an error if the
// journal has no record.
func inspect(path string, p *decide.Replay) (run string, err error) {
	f, err := safefile.Read(path)
	if err != nil {
		return "", fmt.Errorf("driver: %w", err)
	}
	defer f.Close()
	run, _, err = journal.Read(f, p.Next)
	switch {
	case err != nil:
		return run, fmt.Errorf("driver: %w", err)
	case p.Job == nil:
		return run, errors.New("driver: the journal is still empty")
	}
	return run, nil
}
