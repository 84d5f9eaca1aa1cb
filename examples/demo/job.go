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

// observation is one thing seen of a running job: a line of its output, an event, or that it cannot
// be watched.
type observation struct {
	line  string
	event *event
	err   error
}

// job is a running hvdrun.
type job struct {
	seen <-chan observation
	stop context.CancelFunc // asks it to end
	done <-chan struct{}    // closed when it has ended and all has been received from seen
	err  error              // how it ended, once done is closed
}

// startJob starts hvdrun and watches its output and, unless the path is "", its events file. Its
// caller receives from seen and, at last, calls end.
func startJob(ctx context.Context, eventsPath, hvdrun string, args ...string) (*job, error) {
	ctx, stop := context.WithCancel(ctx)
	seen, done := make(chan observation), make(chan struct{})
	lines := &lineWriter{seen: seen, done: done}
	cmd := exec.CommandContext(ctx, hvdrun, args...)
	cmd.Stdout, cmd.Stderr = lines, lines
	// A group of its own: Ctrl-C reaches the demo alone, which ends hvdrun in an orderly way, which
	// ends its workers.
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

// end stops the job, if it runs still, and waits for it.
func (j *job) end() {
	j.stop()
	for {
		select {
		case <-j.seen: // what it says while it goes is of no interest
		case <-j.done:
			return
		}
	}
}

// follow sends the events of a growing file until ended is closed, and then those that are left.
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
			err = fmt.Errorf("demo: events file: %q: the line has no end", t.rest)
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

// lineWriter sends whole lines. It is written to by one goroutine.
type lineWriter struct {
	seen chan<- observation
	done <-chan struct{} // nobody receives any more: a worker that outlived hvdrun may still hold the pipe
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

// gone tells whether no process has that id any more.
func gone(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
