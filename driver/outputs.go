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

// outputsSize is the size from which on the file is compacted, beyond twice its compacted size.
const outputsSize = 1 << 20

// outputs records how much of each worker's output has been forwarded, so that another driver
// neither repeats nor omits a line. It is a journal beside the job's. The zero value records
// nothing. Its methods are safe for concurrent use.
type outputs struct {
	path, run string
	log       logrus.FieldLogger

	mu     sync.Mutex
	j      *journal.Journal
	at     map[string]outputNote // by incarnation
	bound  int64                 // size from which on the file is compacted
	failed time.Time             // last failed attempt to write; zero: the file is complete
}

// outputNote is a record: how many bytes of a worker's output have been forwarded, except for the
// incomplete last lines in Out and Err.
type outputNote struct {
	Worker string `json:"worker"`
	Bytes  uint64 `json:"bytes,omitempty"`
	Out    []byte `json:"out,omitempty"`
	Err    []byte `json:"err,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
}

// open reads the notes of the previous driver, if any.
func (o *outputs) open(cfg Config) error {
	o.path, o.run, o.log = cfg.Journal+".output", cfg.RunID, cfg.Log
	o.at = make(map[string]outputNote)
	var err error
	o.j, _, err = journal.Open(o.path, func(b []byte) error {
		var n outputNote
		err := json.Unmarshal(b, &n)
		o.take(n)
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		o.j, err = journal.Create(o.path, o.run)
	case err != nil && !errors.Is(err, journal.ErrLocked):
		o.log.WithError(err).Warn("the record of forwarded output cannot be read: some output may be repeated")
		clear(o.at)
		if err = journal.Remove(o.path); err == nil {
			o.j, err = journal.Create(o.path, o.run)
		}
	}
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	o.setBound()
	return nil
}

// setBound sets the bound from the size of the compacted file.
func (o *outputs) setBound() {
	o.bound = outputsSize + 2*o.j.Size()
	if err := o.j.Reserve(o.bound + slack); err != nil {
		o.log.WithError(err).Debug("no disk space could be reserved: a driver that resumes the job may repeat output if the disk is full")
	}
}

func (o *outputs) take(n outputNote) {
	if n.Ended {
		delete(o.at, n.Worker)
	} else {
		o.at[n.Worker] = n
	}
}

// of returns the last note of a worker, or the zero note.
func (o *outputs) of(worker string) outputNote {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[worker]
}

// note records a note. It does not keep the note's slices.
func (o *outputs) note(n outputNote) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.j == nil {
		return
	}
	o.take(n.clone())
	if !o.failed.IsZero() {
		if time.Since(o.failed) >= retryPause {
			o.renew()
		}
		return
	}
	b, err := json.Marshal(n)
	if err == nil {
		err = o.j.Append(b)
	}
	if err != nil || o.j.Size() > o.bound {
		o.renew()
	}
}

func (n outputNote) clone() outputNote {
	n.Out, n.Err = bytes.Clone(n.Out), bytes.Clone(n.Err)
	return n
}

// renew compacts the file to the current notes. The caller holds the lock.
func (o *outputs) renew() {
	err := o.j.Replace(func(yield func([]byte) bool) {
		for _, n := range o.at {
			b, err := json.Marshal(n)
			if err != nil {
				panic(fmt.Sprintf("driver: %v", err)) // numbers and bytes always marshal
			}
			if !yield(b) {
				return
			}
		}
	}, false)
	switch {
	case err == nil && !o.failed.IsZero():
		o.log.Info("the record of forwarded output is complete again")
		fallthrough
	case err == nil:
		o.failed = time.Time{}
		o.setBound()
	case o.failed.IsZero():
		o.log.WithError(err).Warn("the record of forwarded output cannot be written: a driver that resumes the job may repeat some output")
		fallthrough
	default:
		o.failed = time.Now()
	}
}

// close closes the file, and removes it if the job has ended.
func (o *outputs) close(ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.j == nil {
		return
	}
	_ = o.j.Close() // every record has been written already
	o.j = nil
	if ended {
		_ = journal.Remove(o.path) // harmless if it stays
	}
}
