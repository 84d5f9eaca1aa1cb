package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// observation is a line of a job's output, an event, or an error of observing it.
type observation struct {
	line  string
	event *event
	err   error
}

// job is a running hvdrun.
type job struct {
	seen <-chan observation
	stop context.CancelFunc // asks the job to end
	done <-chan struct{}    // closed when the job has ended and everything was received from seen
	err  error              // result of the job, valid when done is closed
}

// startJob starts hvdrun and observes its output and, if eventsPath is not empty, its events file.
// The caller must receive from seen and call end.
func startJob(ctx context.Context, eventsPath, hvdrun string, args ...string) (*job, error) {
	ctx, stop := context.WithCancel(ctx)
	seen, done := make(chan observation), make(chan struct{})
	lines := &lineWriter{seen: seen, done: done}
	cmd := exec.CommandContext(ctx, hvdrun, args...)
	cmd.Stdout, cmd.Stderr = lines, lines
	// A separate process group makes Ctrl-C reach only the demo, which then ends hvdrun
	// gracefully, and hvdrun its workers.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		stop()
		return nil, fmt.Errorf("demo: %w", err)
	}
	j := &job{seen: seen, stop: stop, done: done}
	ended, followed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(followed)
		if eventsPath != "" {
			follow(eventsPath, ended, seen)
		}
	}()
	go func() {
		j.err = cmd.Wait()
		stop()
		close(ended)
		<-followed
		close(done)
	}()
	return j, nil
}

// end stops the job if it is running and waits for it.
func (j *job) end() {
	j.stop()
	for {
		select {
		case <-j.seen: // discards what is observed meanwhile
		case <-j.done:
			return
		}
	}
}

// follow sends the events of a growing file until ended is closed, and then the remaining ones.
func follow(path string, ended <-chan struct{}, seen chan<- observation) {
	t := &tail{path: path}
	defer t.close()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for last := false; ; {
		events, err := t.read()
		for i := range events {
			seen <- observation{event: &events[i]}
		}
		if err == nil && last && len(t.rest) > 0 {
			err = fmt.Errorf("demo: events file: %q: incomplete line", t.rest)
		}
		if err != nil {
			seen <- observation{err: err}
			return
		}
		if last {
			return
		}
		select {
		case <-ended:
			last = true
		case <-tick.C:
		}
	}
}

// lineWriter sends complete lines. It must be used by one goroutine.
type lineWriter struct {
	seen chan<- observation
	done <-chan struct{} // closed when nobody receives any more; an orphaned worker can still write to the pipe
	rest []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, after, whole := bytes.Cut(w.rest, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		w.rest = after
		select {
		case w.seen <- observation{line: string(line)}:
		case <-w.done:
		}
	}
}

// gone reports whether no process has that ID.
func gone(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
