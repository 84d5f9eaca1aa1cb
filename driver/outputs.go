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

	"github.com/hvdrun/hvdrun/driver/journal"
)

// outputsSize is from how many bytes on the file is written anew, with what counts in it.
const outputsSize = 1 << 20

// outputs is where it is written down how much of each worker's output has been passed on, so that
// another driver neither repeats nor leaves out a line. It is a journal beside the job's. The zero
// value keeps nothing. Its methods may be called by several goroutines.
type outputs struct {
	path, run string
	log       logrus.FieldLogger

	mu     sync.Mutex
	j      *journal.Journal
	at     map[string]outputNote // by worker
	bound  int64                 // size from which on the file is written anew
	failed time.Time             // when it could last not be written; zero: it holds everything
}

// outputNote is a record: so many bytes of a worker's output have been passed on, save what its
// last lines, without their ends, hold.
type outputNote struct {
	Worker string `json:"worker"`
	Bytes  uint64 `json:"bytes,omitempty"`
	Out    []byte `json:"out,omitempty"`
	Err    []byte `json:"err,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
}

// open reads what a driver before has written down, where there was one.
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
		o.log.WithError(err).Warn("it cannot be read what output was passed on: some may be repeated")
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

// setBound goes by what counts, which is hardly less than the file holds now.
func (o *outputs) setBound() {
	o.bound = outputsSize + 2*o.j.Size()
	if err := o.j.Reserve(o.bound + slack); err != nil {
		o.log.WithError(err).Debug("output may be repeated by a driver that resumes the job, if the disk is full")
	}
}

func (o *outputs) take(n outputNote) {
	if n.Ended {
		delete(o.at, n.Worker)
	} else {
		o.at[n.Worker] = n
	}
}

// of returns what is known of a worker; the zero note where nothing is.
func (o *outputs) of(worker string) outputNote {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[worker]
}

// note writes down what there is to know now. Its slices are the caller's again when it returns.
func (o *outputs) note(n outputNote) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.j == nil {
		return
	}
	o.take(n.clone())
	if !o.failed.IsZero() {
		if time.Since(o.failed) >= rewrite {
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

// renew writes the file anew, with what counts; the lock is held.
func (o *outputs) renew() {
	err := o.j.Replace(func(yield func([]byte) bool) {
		for _, n := range o.at {
			b, err := json.Marshal(n)
			if err != nil {
				panic(fmt.Sprintf("driver: %v", err)) // numbers and bytes can be written
			}
			if !yield(b) {
				return
			}
		}
	}, false)
	switch {
	case err == nil && !o.failed.IsZero():
		o.log.Info("it is written down again what output was passed on")
		fallthrough
	case err == nil:
		o.failed = time.Time{}
		o.setBound()
	case o.failed.IsZero():
		o.log.WithError(err).Warn("it cannot be written down what output was passed on: a driver that resumes the job may repeat some")
		fallthrough
	default:
		o.failed = time.Now()
	}
}

// close takes no notes any more, and forgets it all where the job has ended.
func (o *outputs) close(ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.j == nil {
		return
	}
	_ = o.j.Close() // what was written is with the system
	o.j = nil
	if ended {
		_ = journal.Remove(o.path) // nobody needs it
	}
}
