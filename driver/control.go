package driver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/job"
)

// serveControl serves the job's control socket until ctx ends; the returned function removes the
// socket. A job without a socket continues.
func (l *loop) serveControl(ctx context.Context) func() {
	if l.cfg.Control == "" {
		return func() {}
	}
	ln, err := control.Listen(l.cfg.Control)
	if err != nil {
		l.cfg.Log.WithError(err).Warn("the job takes no commands and reports no status")
		return func() {}
	}
	l.wg.Go(func() {
		if err := control.Serve(ctx, ln, (*controlled)(l), l.cfg.Audit.Add); err != nil && ctx.Err() == nil {
			l.cfg.Log.WithError(err).Warn("the job no longer takes commands")
		}
	})
	return func() { _ = os.Remove(l.cfg.Control) } // a stale socket is harmless: Listen replaces it
}

// controlled is the control.Handler of a loop. Its methods run outside the loop's goroutine.
type controlled loop

var errEnded = &job.RefusedError{Reason: "the job has ended"}

// Status asks the loop for the status, which the loop takes between two events.
func (l *controlled) Status(ctx context.Context) ([]byte, error) {
	var s job.Status
	var fault error
	err := (*loop)(l).ask(ctx, func() {
		now := l.clock.now()
		s = l.m.Status(now, l.stalls.shows(now))
		s.Journal = l.writer.state()
		s.Events, fault = l.recent.Texts()
	})
	if err = cmp.Or(err, fault); err != nil {
		return nil, err
	}
	if l.cfg.TasksStatus != nil {
		s.Tasks = l.cfg.TasksStatus()
	}
	s.Job, s.Driver, s.Begun = l.cfg.RunID, os.Getpid(), time.Unix(0, l.job.Begun).UTC()
	return json.Marshal(s)
}

// Command posts the command as an event. It returns once the event is in the journal.
func (l *controlled) Command(ctx context.Context, c job.Command) (string, error) {
	if c.Verb == job.Stop {
		return l.stopJob(c)
	}
	answer := make(chan decide.Answer, 1)
	select {
	case l.events <- posted{input: decide.Commanded{Command: c}, answer: answer}:
	case <-l.ended:
		return "", errEnded
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	select {
	case a := <-answer:
		return a.Done, a.Refused
	case <-l.ended:
	}
	select {
	case a := <-answer: // the loop answered just before it ended
		return a.Done, a.Refused
	default:
		return "", errEnded
	}
}

// stopJob records the command before it takes effect, because the loop may end at once.
func (l *controlled) stopJob(c job.Command) (string, error) {
	if l.cfg.Stop == nil {
		err := &job.RefusedError{Reason: "the program that runs the job does not stop it on command"}
		l.cfg.Audit.Add(c.Record(audit.Refused(err)))
		return "", err
	}
	l.cfg.Audit.Add(c.Record(audit.Done))
	l.stoppedBy.CompareAndSwap(nil, &c.By)
	l.cfg.Stop(c.Now)
	if c.Now {
		return "the workers are killed", nil
	}
	return fmt.Sprintf("the workers are being stopped, within %v, or as long as the last checkpoint grows", l.cfg.Timeouts.Drain), nil
}

// InspectStatus returns the last status of a job without a driver, from its journal. The time since
// then counts in its goodput, as it does for the next driver. Inspect reports whether a driver
// runs.
func InspectStatus(path string) (job.Status, error) {
	p := &decide.Replay{}
	run, err := inspect(path, p)
	if err != nil {
		return job.Status{}, err
	}
	s := p.Machine.Status(p.Machine.Last(), nil)
	s.Job, s.Begun, s.Goodput = run, time.Unix(0, p.Job.Begun).UTC(), p.Machine.Goodput(time.Now())
	s.Events, err = p.Recent.Texts()
	return s, err
}

// InspectEvents returns the events in the journal of a job, oldest first, as in an events file: all
// events since the journal was last compacted, and the last few before. It may be called while the
// job's driver runs, and changes nothing.
func InspectEvents(path string) ([]json.RawMessage, error) {
	var told []json.RawMessage
	p := &decide.Replay{Told: func(e job.Event) {
		if text, err := json.Marshal(e); err == nil {
			told = append(told, text)
		}
	}}
	if _, err := inspect(path, p); err != nil {
		return nil, err
	}
	last, err := p.Recent.Texts()
	if err != nil || len(last) == 0 {
		return told, err
	}
	if i := slices.IndexFunc(told, func(e json.RawMessage) bool { return bytes.Equal(e, last[0]) }); i >= 0 {
		return told, nil
	}
	// The oldest of the recent events precedes the last compaction. The first entries of told may
	// be missing among the recent events, which omit audit records.
	before := len(last)
	for _, e := range told {
		if i := slices.IndexFunc(last, func(l json.RawMessage) bool { return bytes.Equal(l, e) }); i >= 0 {
			before = i
			break
		}
	}
	return append(last[:before:before], told...), nil
}
