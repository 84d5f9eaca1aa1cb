package jobrun

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// writeEvents writes the events file, if one is requested. A driver that takes over a job first
// appends the events that the previous driver did not write. stop writes the queued events, and
// gives up once the file has accepted nothing for the patience.
func writeEvents(_ context.Context, r *run) (stop func(), err error) {
	file, err := openEvents(r.settings, r.log)
	if err != nil || file == nil {
		return nil, err
	}
	r.events = append(r.events, file.write)
	if r.dir != nil {
		r.cfg.Mark = file.mark
	}
	if r.resumed {
		marked, replayed := file.replay(r.dir.About.EventsFrom)
		r.cfg.Marked, r.replayed = marked, append(r.replayed, replayed)
	}
	return func() {
		if err := file.close(r.program.FlushPatience()); err != nil {
			r.log.WithError(err).Error("the events file may lack events")
		}
	}, nil
}

// eventFile writes the events of a job, one JSON object per line.
type eventFile struct {
	file   io.WriteCloser
	log    logrus.FieldLogger
	lines  cli.Queue
	failed atomic.Bool
	told   int64 // bytes of events since the job began; owned by the driver's goroutine

	mu     sync.Mutex
	missed *missedEvents // nil: no event is missing, or behind holds the missing ones
	behind []byte        // missing events that are not written yet
}

// openEvents returns nil if the settings request no file.
func openEvents(s *settings.Settings, log logrus.FieldLogger) (*eventFile, error) {
	if s.EventsFile == "" {
		return nil, nil
	}
	// The file may be in a folder in which other users may create files, such as /tmp.
	f, err := safefile.Append(s.EventsFile, os.O_WRONLY, safefile.Mode(s.Tuning.ShareOutput))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Origin("events-file"), err)
	}
	return newEventFile(f, log), nil
}

func newEventFile(file io.WriteCloser, log logrus.FieldLogger) *eventFile {
	f := &eventFile{file: file, log: log}
	f.lines = cli.Queue{To: (*eventWriter)(f), Most: cli.MaxEvents, Failed: f.fail}
	return f
}

// write queues the event, in the order of the calls, and does not wait for the file. Failed writes
// are retried.
func (f *eventFile) write(e job.Event) {
	line, err := json.Marshal(e)
	if err != nil {
		f.fail(err)
		return
	}
	f.told += int64(len(line) + 1)
	_, _ = f.lines.Write(append(line, '\n')) // never fails
}

// fail logs the first failure. The job continues.
func (f *eventFile) fail(err error) {
	if !f.failed.Swap(true) {
		f.log.WithError(safefile.Explain(err)).Error("the events file lacks events; the job continues")
	}
}

// eventWriter is an eventFile for its queue.
type eventWriter eventFile

// Write appends the events that an earlier driver did not write, and then text.
func (f *eventWriter) Write(text []byte) (int, error) {
	f.mu.Lock()
	m := f.missed
	f.mu.Unlock()
	if m != nil {
		behind := m.take(f.log)
		f.mu.Lock()
		f.missed, f.behind = nil, behind
		f.mu.Unlock()
	}
	for len(f.behind) > 0 { // only this goroutine changes it
		n, err := f.file.Write(f.behind)
		f.mu.Lock()
		f.behind = f.behind[n:]
		f.mu.Unlock()
		if err != nil {
			return 0, err
		}
	}
	n, err := f.file.Write(text)
	if err == nil && f.failed.Swap(false) {
		f.log.Info("the events file is written again")
	}
	return n, err
}

// close blocks until all events are written, or until the file has accepted nothing for the
// patience.
func (f *eventFile) close(patience time.Duration) error {
	if err := f.lines.Flush(patience); err != nil {
		return err // a write may still be in progress; the kernel closes the file at exit
	}
	return f.file.Close()
}
