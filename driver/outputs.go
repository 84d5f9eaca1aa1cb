package driver

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/journal"
)

// outputsSize is from how many bytes on the file is written anew, with what counts in it.
const outputsSize = 1 << 20

// outputs is where it is written down how much of each worker's output has been passed on, so that another driver neither
// repeats nor leaves out a line. It is a journal beside the job's. The zero value keeps nothing. Its methods may be called by
// several goroutines.
type outputs struct {
	path, run string
	log       logrus.FieldLogger

	mu  sync.Mutex
	j   *journal.Journal
	at  map[string]outputNote // by worker
	old int64                 // size of the file when it was last written anew
}

// outputNote is a record: so many bytes of a worker's output have been passed on, save what its last lines, without their
// ends, hold.
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
		err := decode(b, &n)
		o.take(n)
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		o.j, err = journal.Create(o.path, o.run)
	case err != nil && !errors.Is(err, journal.ErrLocked):
		o.log.WithError(err).Warn("it cannot be read what output was passed on: some may be repeated")
		clear(o.at)
		if err = os.Remove(o.path); err == nil {
			o.j, err = journal.Create(o.path, o.run)
		}
	}
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	o.old = o.j.Size()
	return nil
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
	b, err := json.Marshal(n)
	if err == nil {
		err = o.j.Append(b)
	}
	n.Out, n.Err = append([]byte(nil), n.Out...), append([]byte(nil), n.Err...)
	o.take(n)
	if err == nil && o.j.Size() > 2*o.old+outputsSize {
		err = o.renew()
	}
	if err != nil {
		o.log.WithError(err).Warn("it cannot be written down what output was passed on: a driver that resumes the job may repeat some")
		o.shut()
	}
}

// renew writes the file anew; the lock is held.
func (o *outputs) renew() error {
	next := o.path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	j, err := journal.Create(next, o.run)
	if err != nil {
		return err
	}
	for _, n := range o.at {
		b, err := json.Marshal(n)
		if err == nil {
			err = j.Append(b)
		}
		if err != nil {
			return errors.Join(err, j.Close())
		}
	}
	o.shut()
	o.j, o.old = j, j.Size()
	return os.Rename(next, o.path)
}

func (o *outputs) shut() {
	_ = o.j.Close() // what was written is with the system
	o.j = nil
}

// close takes no notes any more, and forgets it all where the job has ended.
func (o *outputs) close(ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.j != nil {
		o.shut()
	}
	if ended {
		_ = os.Remove(o.path) // it may have been given up before
	}
}
