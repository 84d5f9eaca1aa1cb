package journal

import (
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	// growth is the ratio of the size at which a journal is compacted to that of its last snapshot.
	growth = 4
	// slack is room for the records that arrive until there is time for a snapshot.
	slack = 64 << 10
	// retryPause is the pause between two attempts to write a journal.
	retryPause = time.Second
)

// Rules configure how a Keeper writes its journal. They must not change after its first use.
type Rules struct {
	// Path is the path of the journal; empty: nothing is written. Run is its run id.
	Path, Run string
	// Least is the size in bytes below which the journal is not compacted.
	Least int64
	// Keep bounds the bytes of records that wait in memory while the journal cannot be written.
	// Beyond it all waiting records are dropped, and only a snapshot makes the journal complete
	// again. Zero: no record waits.
	Keep int
	// Reserve reserves disk space for the journal and its snapshot, if the file system can.
	Reserve bool
	// Strict marks a journal that lacks records, so that nobody reads it, and removes it if that
	// fails.
	Strict bool
	// Volatile permits a snapshot that survives the process's death but not the machine's.
	Volatile bool

	// Log receives the failures, and must not be nil. Name is the name of the journal in the log.
	// Follows describes the consequence of a journal that cannot be written, which is logged at
	// Level, and NoRoom that of disk space that cannot be reserved.
	Log                   logrus.FieldLogger
	Name, Follows, NoRoom string
	Level                 logrus.Level
}

// Keeper writes a journal, bounds its size by replacing records with snapshots, and retries what
// fails. It reads no clock and starts nothing: callers pass the time, call Compact when it is Due,
// and call again at the time that Next returns. It is not safe for concurrent use.
type Keeper struct {
	Rules

	upkeep
	j       *Journal // nil: not created yet, given up or closed
	gone    bool     // given up or closed
	waiting [][]byte // records that are not written, or kept until they are synced
	bytes   int      // size of waiting
	written int      // how many of waiting have been written since the last sync
}

// upkeep decides when a journal is compacted and when it is retried. It is pure.
type upkeep struct {
	bound    int64     // size above which a snapshot replaces the records
	lacking  bool      // records were dropped: only a snapshot completes the journal
	since    time.Time // time of the first of consecutive failures; zero: the last write succeeded
	why      error     // the last failure
	told     bool      // these failures have been logged
	next     time.Time // no attempt is made before
	failures uint64    // number of failures to write or compact
}

// due reports whether a snapshot is due. quiet: the caller has nothing else to do.
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

// failed records a failure. atOnce: the next attempt is of another kind, which may succeed at once.
// It returns whether to log the failure.
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

// complete records that the journal has all records. It returns whether to log that, and how long
// the journal was incomplete.
func (u *upkeep) complete(now time.Time) (tell bool, after time.Duration) {
	tell, after = u.told, now.Sub(u.since)
	u.lacking, u.since, u.why, u.told, u.next = false, time.Time{}, nil, false, time.Time{}
	return tell, after
}

// Create creates the journal, which otherwise the first record does.
func (k *Keeper) Create() error {
	j, err := Create(k.Path, k.Run)
	if err == nil {
		k.Take(j)
	}
	return err
}

// Take makes the keeper use and own a journal that was opened at Path.
func (k *Keeper) Take(j *Journal) {
	k.j = j
	k.setBound()
}

// setBound sets the bound from the size of the journal, which is little more than a snapshot.
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

// Append appends a record and takes ownership of it. An error says that the journal lacks records
// for now; the record waits, or the next snapshot must include it.
func (k *Keeper) Append(now time.Time, record []byte) error {
	if err := k.lacks(); err != nil {
		return err
	}
	k.waiting = append(k.waiting, record)
	k.bytes += len(record)
	return k.write(now)
}

// errDropped: records were dropped although no attempt has failed.
var errDropped = errors.New("journal: records were dropped")

// lacks returns the reason why records cannot be appended, or nil.
func (k *Keeper) lacks() error {
	switch {
	case !k.lacking && !k.gone:
		return nil
	case k.why != nil:
		return k.why
	}
	return errDropped
}

// write writes the waiting records.
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

// forget removes the waiting records.
func (k *Keeper) forget() {
	clear(k.waiting)
	k.waiting, k.bytes, k.written = k.waiting[:0], 0, 0
}

// fail handles a failure to write: it drops the waiting records if they exceed Keep, and otherwise
// prepares the journal for the next attempt.
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
		k.Log.WithError(safefile.Explain(cause)).Log(k.Level, k.Name+" cannot be written: "+k.Follows)
	}
	return err
}

// Drop drops the waiting records: the next snapshot must include them.
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

// GiveUp removes a journal from which the job can no longer be resumed, and closes the keeper.
func (k *Keeper) GiveUp(why error) {
	k.Log.WithError(safefile.Explain(errors.Join(why, Remove(k.Path)))).Error(k.Name + " is given up: the job continues but cannot be resumed")
	k.lacking, k.why = true, why
	k.Close()
}

// Sync writes the waiting records and blocks until all records are on disk. After an error some may
// not be.
func (k *Keeper) Sync(now time.Time) error {
	if err := k.write(now); err != nil {
		return err
	}
	if err := k.j.Sync(); err != nil {
		k.written = 0 // which of them are on disk is unknown
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

// Compact replaces all records by a snapshot, which must include those that wait or were dropped.
// It blocks until the snapshot is on disk, unless Volatile is set.
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
		k.Log.WithError(safefile.Explain(err)).Warn(k.Name + " cannot be compacted and grows")
		return err
	}
	k.drop(err) // the disk may have the old records or the new ones
	return k.fail(now, err)
}

// Next returns when the next attempt after failures is due; ok is false if none is.
func (k *Keeper) Next() (at time.Time, ok bool) {
	return k.next, !k.gone && (k.lacking || !k.since.IsZero())
}

// Hurry makes an attempt due at once.
func (k *Keeper) Hurry() { k.next = time.Time{} }

// Lacking reports whether records were dropped that no snapshot includes yet.
func (k *Keeper) Lacking() bool { return k.lacking }

// Waiting returns the bytes of records that wait in memory.
func (k *Keeper) Waiting() int { return k.bytes }

// Failures returns how many times the journal could not be written or compacted.
func (k *Keeper) Failures() uint64 { return k.failures }

// Err returns the reason why the journal lacks records; nil: it has all except those that wait.
func (k *Keeper) Err() error { return k.why }

// State describes why the journal is not complete; "": it is.
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

// Release frees the reserved space of a journal that receives no more records.
func (k *Keeper) Release() {
	if k.j != nil {
		_ = k.j.Release() // its records are synced; an error leaves only reserved space
	}
}

// Close closes the journal. Later calls have no effect.
func (k *Keeper) Close() {
	k.gone = true
	if k.j != nil {
		_ = k.j.Close() // everything that matters was synced
		k.j = nil
	}
}
