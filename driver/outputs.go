package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/journal"
)

// outputsSize is the size in bytes up to which the file is not compacted.
const outputsSize = 1 << 20

// outputs records how much of each worker's output has been forwarded, so that another driver
// neither repeats nor omits a line. It is a journal beside the job's. The zero value records
// nothing. Its methods are safe for concurrent use.
type outputs struct {
	mu sync.Mutex
	k  *journal.Keeper
	at map[string]outputNote // by incarnation
}

// outputNote is a record: how many bytes of a worker's output have been forwarded. Out and Err are
// the incomplete last lines, which have not been forwarded.
type outputNote struct {
	Worker string `json:"worker"`
	Bytes  uint64 `json:"bytes,omitempty"`
	Out    []byte `json:"out,omitempty"`
	Err    []byte `json:"err,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
}

// open reads the notes of the previous driver, if any.
func (o *outputs) open(cfg Config) error {
	o.at = make(map[string]outputNote)
	o.k = &journal.Keeper{Rules: journal.Rules{
		Path: cfg.Journal + ".output", Run: cfg.RunID, Least: outputsSize, Reserve: true, Volatile: true,
		Log: cfg.Log, Level: logrus.WarnLevel, Name: "the record of forwarded output",
		Follows: "a driver that resumes the job may repeat some output",
		NoRoom:  "a driver that resumes the job may repeat output if the disk is full",
	}}
	j, _, err := journal.Open(o.k.Path, func(b []byte) error {
		var n outputNote
		err := json.Unmarshal(b, &n)
		o.take(n)
		return err
	})
	switch {
	case err == nil:
		o.k.Take(j)
	case errors.Is(err, fs.ErrNotExist):
		err = o.k.Create()
	case !errors.Is(err, journal.ErrLocked):
		cfg.Log.WithError(err).Warn("the record of forwarded output cannot be read: some output may be repeated")
		clear(o.at)
		if journal.Remove(o.k.Path) == nil { // otherwise the first error says why
			err = o.k.Create()
		}
	}
	if err != nil {
		o.k = nil
		return fmt.Errorf("driver: %w", err)
	}
	return nil
}

func (o *outputs) take(n outputNote) {
	if n.Ended {
		delete(o.at, n.Worker)
	} else {
		o.at[n.Worker] = n
	}
}

// of returns the last note of a worker, or the zero note if it has none.
func (o *outputs) of(worker string) outputNote {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[worker]
}

// note records n. It does not keep the slices of n.
func (o *outputs) note(n outputNote) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.k == nil {
		return
	}
	o.take(n.clone())
	now := time.Now()
	if b, err := json.Marshal(n); err == nil {
		_ = o.k.Append(now, b) // the keeper reports errors; the next snapshot has the note
	}
	if o.k.Due(now, false) {
		_ = o.k.Compact(now, o.all) // the keeper reports the error
	}
}

func (n outputNote) clone() outputNote {
	n.Out, n.Err = bytes.Clone(n.Out), bytes.Clone(n.Err)
	return n
}

// all yields the records of the current notes. The caller holds the lock.
func (o *outputs) all(yield func([]byte) bool) {
	for _, n := range o.at {
		b, err := json.Marshal(n)
		if err != nil {
			panic(fmt.Sprintf("driver: %v", err)) // numbers and bytes always marshal
		}
		if !yield(b) {
			return
		}
	}
}

// close closes the file, and removes it if the job has ended.
func (o *outputs) close(ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.k == nil {
		return
	}
	o.k.Close() // every record has been written already
	if ended {
		_ = journal.Remove(o.k.Path) // a leftover file is harmless
	}
	o.k = nil
}
