package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// memoryOfDriver bounds hvdrun's memory in bytes, whatever the amount of output and the length of
// lists.
const memoryOfDriver = 200 << 20

// playPrint makes workers print much output and counts it.
func playPrint(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	j.plan.Output = w
	err = j.start()
	w.Close()
	if err != nil {
		return err
	}
	counted := make(chan error, 1)
	var lines map[string]int
	go func() {
		var err error
		lines, err = countLines(r, "print", 0, func(n int) { j.counted.Add(int64(n)) })
		counted <- err
	}()
	most := int64(0)
	err = j.Until(ctx, "the end", func() bool {
		most = max(most, peak(j.PID))
		return j.Over()
	})
	if err != nil {
		return err
	}
	if err := errors.Join(<-counted, j.end(ctx)); err != nil {
		return err
	}
	want := t.Print * 1000 / t.Steps * t.Steps
	for worker, n := range lines {
		if n != want {
			return fmt.Errorf("worker %s printed %d lines, and %d were passed on", worker, want, n)
		}
	}
	if len(lines) != t.Workers {
		return fmt.Errorf("lines of %d workers were passed on, not of %d", len(lines), t.Workers)
	}
	if most > memoryOfDriver {
		return fmt.Errorf("hvdrun took %d MiB of memory, more than %d", most>>20, memoryOfDriver>>20)
	}
	t.note("%d MB passed on, hvdrun took %d MiB", t.Print*t.Workers, most>>20)
	return nil
}

// countLines returns the number of numbered lines of this kind that each worker printed, and calls
// read with the number of bytes of each line that it reads. The lines must be in order, except that
// up to twice of them may be repeated.
func countLines(r io.Reader, what string, twice int, read func(int)) (lines map[string]int, err error) {
	lines = make(map[string]int)
	repeated := make(map[string]int)
	for s := bufio.NewScanner(r); s.Scan(); {
		read(len(s.Bytes()))
		_, rest, ok := bytes.Cut(s.Bytes(), []byte("<stdout>:"+what+" of "))
		worker, rest, whole := bytes.Cut(rest, []byte(": line "))
		if !ok || !whole { // a line of another program, or of a worker that was killed while it printed
			continue
		}
		number, _, _ := bytes.Cut(rest, []byte(" "))
		n, nerr := strconv.Atoi(string(number))
		switch id, had := string(worker), lines[string(worker)]; {
		case nerr == nil && n == had+1:
			lines[id] = n
		case nerr == nil && n == had && repeated[id] < twice:
			repeated[id]++
		case err == nil:
			err = fmt.Errorf("worker %s: line %q comes after line %d", worker, number, had)
		}
	}
	return lines, err
}

// playReader gives hvdrun a pipe for its output that is full from the start and never read.
func playReader(ctx context.Context, t *trial) error {
	t.Steps = 0
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	if err := fillPipe(w); err != nil {
		return err
	}
	j, err := t.job()
	if err != nil {
		return err
	}
	j.flag("--drain-timeout", "2s")
	j.plan.Output = w
	if err := j.train(ctx, 3); err != nil {
		return err
	}
	if err := t.kills(ctx, j, 2); err != nil {
		return err
	}
	if _, err := j.must(ctx, "status"); err != nil {
		return err
	}
	if t.How == "stop" {
		if _, err := j.must(ctx, "stop", "--now"); err != nil {
			return err
		}
		if err := follow.Sleep(ctx, 3*time.Second); err != nil {
			return err
		}
	}
	for range 2 {
		j.signal(syscall.SIGINT)
		if err := follow.Sleep(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	return j.end(ctx, interrupted, terminated, killed)
}

// fillPipe writes until the pipe is full.
func fillPipe(w *os.File) error {
	fd := int(w.Fd())
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	for n := 4096; n > 0; {
		if _, err := unix.Write(fd, make([]byte, n)); errors.Is(err, unix.EAGAIN) {
			n /= 2
		} else if err != nil {
			return err
		}
	}
	return unix.SetNonblock(fd, false)
}

// playCheckpoint stops a job and starts another one that resumes from its checkpoints.
func playCheckpoint(ctx context.Context, t *trial) error {
	t.Steps = 0
	folder := filepath.Join(t.dir, "checkpoints")
	j, err := t.job()
	if err != nil {
		return err
	}
	j.worker("-checkpoints", folder)
	if err := j.train(ctx, 1); err != nil {
		return err
	}
	if err := follow.Sleep(ctx, t.After); err != nil {
		return err
	}
	if t.How == "SIGTERM to all" { // new workers replace them
		if err := j.Look(); err != nil {
			return err
		}
		generation := j.Generation
		for _, pid := range j.Holders() {
			j.strike(pid, syscall.SIGTERM)
		}
		if err := j.later(ctx, generation); err != nil {
			return err
		}
	}
	switch t.How {
	case "SIGTERM":
		j.signal(syscall.SIGTERM)
	case "stop":
		if _, err := j.must(ctx, "stop"); err != nil {
			return err
		}
	default:
		j.signal(syscall.SIGINT)
	}
	if err := j.end(ctx, interrupted, terminated); err != nil {
		return err
	}
	return t.goesOn(ctx, j, folder)
}

// goesOn checks that another job with the same checkpoints continues where this job ended.
func (t *trial) goesOn(ctx context.Context, before *job, folder string) error {
	t.Steps = before.Step + 10
	next, err := t.job()
	if err != nil {
		return err
	}
	next.again(2)
	next.worker("-checkpoints", folder)
	// The steplogs of both jobs are checked as one: a step committed in the first must not be
	// repeated in the second.
	next.before = before.Lines
	if err := next.start(); err != nil {
		return err
	}
	return next.end(ctx)
}

// playDisk fills one of the job's file systems while workers die.
func playDisk(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	path, bytes, checkpoints := filepath.Join(t.dir, "full"), int64(1<<20), strings.HasPrefix(t.How, "checkpoints")
	switch {
	case strings.HasPrefix(t.How, "job"):
		if j.plan.State = path; t.How == "job" {
			bytes = 8 << 20 // enough for the journal to reserve space
		}
	case t.How == "events":
		j.plan.EventsFile = filepath.Join(path, "events")
	case t.How == "output":
		j.flag("--output-filename", path)
		j.worker("-chatter")
	case checkpoints:
		bytes = 16*t.State + 1<<20
		j.worker("-checkpoints", path, "-checkpoint-interval", "50ms")
	}
	d, err := t.disk(path, bytes, t.failed.Load)
	if err != nil {
		return err
	}
	if err := j.train(ctx, 3); err != nil {
		return err
	}
	if err := d.fill(); err != nil {
		return err
	}
	if err := t.dieAndTell(ctx, j, t.Times); err != nil {
		return fmt.Errorf("while the disk is full: %w", err)
	}
	if t.How == "job" {
		if err := errors.Join(j.resume(ctx, 0), t.dieAndTell(ctx, j, 1)); err != nil {
			return fmt.Errorf("hvdrun was killed while the disk is full: %w", err)
		}
	}
	status := terminated
	if t.How == "checkpoints to the end" {
		status = 7
	} else {
		d.free()
		if err := t.room(ctx, j); err != nil {
			return fmt.Errorf("after there was room again: %w", err)
		}
	}
	if _, err := j.must(ctx, "stop"); err != nil {
		return err
	}
	if err := j.end(ctx, status); err != nil || t.How != "checkpoints" {
		return err
	}
	return t.goesOn(ctx, j, path)
}

// room checks that the job continues once there is space again.
func (t *trial) room(ctx context.Context, j *job) error {
	if err := t.dieAndTell(ctx, j, 1); err != nil || !strings.HasPrefix(t.How, "job") || t.Seed%2 != 0 {
		return err
	}
	if err := follow.Sleep(ctx, 3*time.Second); err != nil { // the journal is rewritten
		return err
	}
	return j.resume(ctx, 0)
}

// dieAndTell kills workers and asks for the job's status.
func (t *trial) dieAndTell(ctx context.Context, j *job, n int) error {
	if err := t.killsUnseen(ctx, j, n); err != nil {
		return err
	}
	_, err := j.must(ctx, "status")
	return err
}

// killsUnseen is like kills, for jobs whose events file can be incomplete: it relies on the
// steplog.
func (t *trial) killsUnseen(ctx context.Context, j *job, n int) error {
	for range n {
		trains := func(l steplog.Line) bool {
			return l.Generation == j.Generation && l.Event == steplog.Step && l.Size > 1
		}
		err := j.Until(ctx, "a world of two that train", func() bool {
			return len(j.Lines) > 0 && trains(j.Lines[len(j.Lines)-1]) && len(j.Ranks) > 1
		})
		if err != nil {
			return err
		}
		generation := j.Generation
		for pid, rank := range j.Ranks {
			if rank == 1 {
				j.strike(pid, syscall.SIGKILL) // it may have ended
			}
		}
		if err := j.later(ctx, generation); err != nil {
			return err
		}
	}
	return nil
}

// resume kills hvdrun, waits, and resumes the job.
func (j *job) resume(ctx context.Context, pause time.Duration) error {
	j.KillDriver()
	if err := follow.Sleep(ctx, pause); err != nil {
		return err
	}
	resumed := j.Count("resumed")
	next, err := j.Resume("")
	if err != nil {
		return err
	}
	j.Running = next
	if err := j.Until(ctx, "the word of the driver that resumes", func() bool { return j.Count("resumed") > resumed }); err != nil {
		return err
	}
	return j.trained(ctx, 3)
}
