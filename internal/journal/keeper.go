package journal

import (
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/sirupsen/logrus"
)

const (
	// growth is the ratio of the size at which a journal is compacted to that of its last snapshot.
	growth = 4
	// slack is room for the records that arrive before there is time for a snapshot.
	slack = 64 << 10
	// retryPause is the pause between two attempts to write a journal.
	retryPause = time.Second
)

// Rules say how a Keeper writes its journal. They do not change after its first use.
type Rules struct {
	// Path is where the journal is; empty: nothing is written. Run is its run id.
	Path, Run string
	// Least is the size in bytes up to which the journal is not compacted.
	Least int64
	// Keep is how many bytes of records wait in memory while they cannot be written. Beyond it they
	// are dropped, and only a snapshot makes the journal complete. Zero: none waits.
	Keep int
	// Reserve reserves disk space for the journal and its snapshot, where the file system can.
	Reserve bool
	// Strict marks a journal that lacks records as one that nobody may read, and removes it where
	// that fails.
	Strict bool
	// Volatile permits a snapshot that survives the process's death but not the machine's.
	Volatile bool

	// Log is told of failures, and must not be nil. Name names the journal there, Follows says what
	// follows while it cannot be written, which is told at Level. NoRoom says what follows where no
	// disk space can be reserved.
	Log                   logrus.FieldLogger
	Name, Follows, NoRoom string
	Level                 logrus.Level
}

// Keeper writes a journal, keeps its size within a bound by snapshots of what its records say, and
// tries again what fails. It reads no clock and starts nothing: callers pass the time, call Compact
// when it is Due, and come back at the time that Next returns. It is not safe for concurrent use.
type Keeper struct {
	Rules

	upkeep
	j       *Journal // nil: not created yet, given up or closed
	gone    bool     // given up or closed
	waiting [][]byte // records that are not written, or not synced and kept until then
	bytes   int      // of those
	written int      // how many of those have been written since the last sync
}

// upkeep is when a journal is compacted, and when it is tried again. It is pure.
type upkeep struct {
	bound    int64     // the size from which on a snapshot replaces the records
	lacking  bool      // records were dropped: only a snapshot helps
	since    time.Time // of the first failure in a row; zero: the last write succeeded
	why      error     // the last failure
	told     bool      // the log has the row of failures
	next     time.Time // nothing is tried before
	failures uint64    // times that it could not be written or compacted
}

// due reports whether a snapshot is due. quiet: there is nothing else to do.
func (u *upkeep) due(now time.Time, size int64, quiet bool) bool {
	switch {
	case u.lacking:
		return !now.Before(u.next)
	case !u.since.IsZero():
		return false // a journal that cannot be written cannot be compacted either
	case quiet:
		return size > u.bound/4*3
	}
	return size > u.bound
}

// failed notes a failure. atOnce: the next attempt is another one, which may help at once. It
// returns whether the failure is to be told.
func (u *upkeep) failed(now time.Time, err error, atOnce bool) (tell bool) {
	u.failures++
	if u.since.IsZero() {
		u.since = now
	}
	if u.why = err; atOnce {
		u.next = now
		return false
	}
	u.next = now.Add(retryPause)
	tell, u.told = !u.told, true
	return tell
}

// complete notes that the journal has all records, and returns whether that is to be told, and how
// long it was not so.
func (u *upkeep) complete(now time.Time) (tell bool, after time.Duration) {
	tell, after = u.told, now.Sub(u.since)
	u.lacking, u.since, u.why, u.told, u.next = false, time.Time{}, nil, false, time.Time{}
	return tell, after
}

// Create creates the journal, which would otherwise be created with the first record.
func (k *Keeper) Create() error {
	j, err := Create(k.Path, k.Run)
	if err == nil {
		k.Take(j)
	}
	return err
}

// Take sets the journal to one that was opened at Path, and takes it over.
func (k *Keeper) Take(j *Journal) {
	k.j = j
	k.setBound()
}

// setBound sets the bound from the journal's size, which is little more than a snapshot's.
func (k *Keeper) setBound() {
	k.bound = max(k.Least, growth*k.j.Size())
	if !k.Reserve {
		return
	}
	if err := k.j.Reserve(k.bound + slack); err != nil {
		k.Log.WithError(err).Debug("no disk space could be reserved: " + k.NoRoom)
		if room := k.j.Room() - slack; room > 2*k.j.Size() {
			k.bound = min(k.bound, room)
		}
	}
}

// Append adds a record, which it keeps. An error says that the journal lacks records as yet; the
// record waits, or the next snapshot has to include it.
func (k *Keeper) Append(now time.Time, record []byte) error {
	if err := k.lacks(); err != nil {
		return err
	}
	k.waiting = append(k.waiting, record)
	k.bytes += len(record)
	return k.write(now)
}

// errDropped: records were dropped, and no attempt has failed.
var errDropped = errors.New("journal: records were dropped")

// lacks returns why records cannot be appended; nil: they can.
func (k *Keeper) lacks() error {
	switch {
	case !k.lacking && !k.gone:
		return nil
	case k.why != nil:
		return k.why
	}
	return errDropped
}

// write writes the records that wait.
func (k *Keeper) write(now time.Time) error {
	if err := k.lacks(); err != nil {
		return err
	}
	if now.Before(k.next) {
		if k.bytes > k.Keep {
			k.drop(k.why)
		}
		return k.why
	}
	err := k.open()
	for err == nil && k.written < len(k.waiting) {
		if err = k.j.Append(k.waiting[k.written]); err == nil {
			k.written++
		}
	}
	if err != nil {
		return k.fail(now, err)
	}
	if k.Keep == 0 {
		k.forget()
	}
	return nil
}

func (k *Keeper) open() error {
	if k.j != nil {
		return nil
	}
	return k.Create()
}

// forget forgets the records that wait.
func (k *Keeper) forget() {
	clear(k.waiting)
	k.waiting, k.bytes, k.written = k.waiting[:0], 0, 0
}

// fail notes that writing has failed, and prepares the next attempt.
func (k *Keeper) fail(now time.Time, err error) error {
	had := k.lacking
	if k.bytes > k.Keep || k.Keep == 0 {
		k.drop(err)
	} else if k.j != nil {
		err = errors.Join(err, k.j.Mend())
	}
	if k.gone {
		return k.why
	}
	cause := k.why
	if k.failed(now, err, k.lacking && !had) {
		if cause == nil {
			cause = err
		}
		k.Log.WithError(cause).Log(k.Level, k.Name+" cannot be written: "+k.Follows)
	}
	return err
}

// Drop drops the records that wait: the next snapshot includes them.
func (k *Keeper) Drop() { k.drop(errDropped) }

func (k *Keeper) drop(why error) {
	k.forget()
	if k.lacking || k.gone {
		return
	}
	k.lacking = true
	if k.Strict && k.j != nil {
		if err := k.j.SetBehind(); err != nil {
			k.GiveUp(errors.Join(why, err))
		}
	}
}

// GiveUp removes a journal that is of no further use.
func (k *Keeper) GiveUp(why error) {
	k.Log.WithError(errors.Join(why, Remove(k.Path))).Error(k.Name + " is given up: the job continues but cannot be resumed")
	k.lacking, k.why = true, why
	k.Close()
}

// Sync writes what waits and blocks until the disk has all records. An error says that it has not.
func (k *Keeper) Sync(now time.Time) error {
	if err := k.write(now); err != nil {
		return err
	}
	if err := k.j.Sync(); err != nil {
		k.written = 0 // what the disk has of them is not known
		return k.fail(now, err)
	}
	k.forget()
	k.succeeded(now)
	return nil
}

func (k *Keeper) succeeded(now time.Time) {
	if tell, after := k.complete(now); tell {
		k.Log.Warnf("%s is complete again, after %v", k.Name, after.Round(time.Millisecond))
	}
}

// Due reports whether Compact is due. quiet: the caller has nothing else to do.
func (k *Keeper) Due(now time.Time, quiet bool) bool {
	return k.Path != "" && !k.gone && k.due(now, k.Size(), quiet)
}

// Compact replaces all records by a snapshot, which includes those that wait or were dropped. It
// blocks until the disk has them, unless the rules permit less.
func (k *Keeper) Compact(now time.Time, snapshot iter.Seq[[]byte]) error {
	if k.gone {
		return k.why
	}
	err := k.open()
	if err == nil {
		err = k.j.Replace(snapshot, !k.Volatile)
	}
	switch {
	case err == nil:
		k.forget()
		k.succeeded(now)
		k.setBound()
		return nil
	case !k.lacking && k.j != nil && k.j.broken == nil:
		k.failures++
		k.bound = 2 * k.j.Size()
		k.Log.WithError(err).Warn(k.Name + " cannot be compacted and grows")
		return err
	}
	k.drop(err) // the disk may have the old records or the new ones
	return k.fail(now, err)
}

// Next returns when an attempt is due after failures; ok is false if no attempt is due.
func (k *Keeper) Next() (at time.Time, ok bool) {
	return k.next, !k.gone && (k.lacking || !k.since.IsZero())
}

// Hurry makes an attempt due at once.
func (k *Keeper) Hurry() { k.next = time.Time{} }

// Lacking reports whether records were dropped that no snapshot includes yet.
func (k *Keeper) Lacking() bool { return k.lacking }

// Waiting is how many bytes of records the keeper has in memory.
func (k *Keeper) Waiting() int { return k.bytes }

// Failures is how often the journal could not be written or compacted.
func (k *Keeper) Failures() uint64 { return k.failures }

// Err returns why the journal lacks records; nil: it has all, but those that wait.
func (k *Keeper) Err() error { return k.why }

// State describes what keeps the journal from being complete; empty: nothing.
func (k *Keeper) State(now time.Time) string {
	switch {
	case k.why == nil:
		return ""
	case k.gone:
		return fmt.Sprintf("given up: %v", k.why)
	}
	return fmt.Sprintf("not written for %v: %v", now.Sub(k.since).Round(time.Second), k.why)
}

// Size returns the size of the journal in bytes, without reserved space; 0: no journal.
func (k *Keeper) Size() int64 {
	if k.j == nil {
		return 0
	}
	return k.j.Size()
}

// Release frees the reserved space of a journal that gets no more records.
func (k *Keeper) Release() {
	if k.j != nil {
		_ = k.j.Release() // its records are synced; space that stays reserved is the file's
	}
}

// Close closes the journal. Later calls change nothing.
func (k *Keeper) Close() {
	k.gone = true
	if k.j != nil {
		_ = k.j.Close() // what counts was synced
		k.j = nil
	}
}
