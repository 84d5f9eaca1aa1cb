package timeline

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	// driverProcess is the number of the driver's process in a trace; a rank's process has the
	// number of the rank.
	driverProcess = 1 << 20
	// mostWaiting is the largest number of marks and slices that wait for the disk; further ones
	// are dropped.
	mostWaiting = 4096
)

// Driver writes the activity of a job's driver as a separate process of the trace, beside those of
// the ranks: events as marks, and parts of resets as slices. It never waits for a disk. Times are
// from the driver's clock, which may differ from that of rank 0 on another host. Its methods are
// safe for concurrent use; a nil Driver drops everything.
type Driver struct {
	queue   chan func() error
	file    *rankFile
	cfg     Config
	writing sync.WaitGroup

	mu     sync.Mutex
	lost   int
	closed bool
	rows   map[string][]time.Time // by name, the end of the last slice in each of its rows
}

// DriverPath returns the name of the driver's file, and the name to which the file is moved when it
// has reached its limit.
func DriverPath(filename string) (path, old string) {
	stem := strings.TrimSuffix(filename, ".json") + ".driver"
	return stem + ".json", stem + ".old.json"
}

// OpenDriver opens the driver's file, as a Recorder opens that of a rank, and starts a goroutine
// that writes it. The caller closes the Driver.
func OpenDriver(cfg Config) (*Driver, error) {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultBytes
	}
	f := &rankFile{run: cfg.RunID, rank: driverProcess, name: "driver", limit: cfg.MaxBytes / 2, mode: safefile.Mode(cfg.Shared)}
	f.path, f.old = DriverPath(cfg.Filename)
	if err := f.begin(); err != nil {
		return nil, err
	}
	d := &Driver{queue: make(chan func() error, mostWaiting), file: f, cfg: cfg, rows: map[string][]time.Time{}}
	d.writing.Go(d.write)
	return d, nil
}

// write writes until the queue is closed. After an error it discards what is queued.
func (d *Driver) write() {
	var failed error
	for do := range d.queue {
		if failed != nil {
			continue
		}
		failed = do()
		if failed == nil && len(d.queue) == 0 {
			failed = d.file.flush()
		}
		if failed != nil && d.cfg.Log != nil {
			d.cfg.Log.WithError(safefile.Explain(failed)).Warn("the driver's timeline is no longer written; the job continues")
		}
	}
	_ = d.file.close() // unwritten events have been logged
}

// post queues do, or drops it if the queue is full.
func (d *Driver) post(do func() error) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	if n := d.lost; n > 0 && len(d.queue) < mostWaiting/2 {
		d.lost = 0
		d.queue <- func() error { d.file.lost(time.Now().UnixNano(), n); return nil }
	}
	select {
	case d.queue <- do:
	default:
		d.lost++
	}
}

// Mark queues an event without a duration. args is a JSON object or empty.
func (d *Driver) Mark(at time.Time, name string, args []byte) {
	args = bytes.TrimSpace(args)
	if !json.Valid(args) || len(args) < 2 || args[0] != '{' {
		args = []byte("{}")
	}
	d.post(func() error {
		d.file.mark(at.UnixNano(), name, string(args[1:len(args)-1]))
		return nil
	})
}

// Slice queues a part of a reset, in the row with the given name, or in a further row of that name
// if it overlaps with the last slice of the row.
func (d *Driver) Slice(row, name string, start, end time.Time, generation uint64) {
	if d == nil || end.Before(start) {
		return
	}
	d.mu.Lock()
	n := 0
	for n < len(d.rows[row]) && d.rows[row][n].After(start) {
		n++
	}
	if n == len(d.rows[row]) && n < maxRows {
		d.rows[row] = append(d.rows[row], end)
	} else if n < len(d.rows[row]) {
		d.rows[row][n] = end
	}
	d.mu.Unlock()
	for range n {
		row += "'"
	}
	d.post(func() error {
		return d.file.span(start.UnixNano(), &collective.Span{Name: name, Tensor: row, Generation: generation, Duration: end.Sub(start)})
	})
}

// Close writes the queued marks and slices, and closes the file.
func (d *Driver) Close() {
	if d == nil {
		return
	}
	d.mu.Lock()
	if !d.closed {
		d.closed = true
		close(d.queue)
	}
	d.mu.Unlock()
	d.writing.Wait()
}
