package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// trial is a running case.
type trial struct {
	setup
	can
	place
	programs follow.Programs
	help     string // output of hvdrun help flags
	dir      string
	keep     bool // keep the case's files even if it does not fail
	dice     *rand.Rand
	jobs     []*job      // those that have been started
	failed   atomic.Bool // the case's files are kept
	notes    string      // notes in the case's line
	table    string      // printed after it
	findings
}

// note adds a note to the case's line.
func (t *trial) note(format string, args ...any) { t.notes += "; " + fmt.Sprintf(format, args...) }

// has reports whether hvdrun has a flag.
func (t *trial) has(flag string) bool { return strings.Contains(t.help, flag+" ") }

// try runs the case and returns its errors. It leaves only the files of a failed case behind.
func (t *trial) try(ctx context.Context, k kind) error {
	t.dice = rand.New(rand.NewPCG(t.Seed, 0x74727921))
	if err := os.Mkdir(t.dir, 0o777); err != nil {
		return err
	}
	err := k.play(ctx, t)
	if err != nil && ctx.Err() == nil {
		t.failed.Store(true)
		if n := len(t.jobs); n > 0 {
			t.jobs[n-1].Stacks()
		}
	}
	for _, j := range t.jobs {
		j.Kill()
	}
	if cerr := t.close(); cerr != nil && err == nil {
		err = fmt.Errorf("what the case had of the machine: %w", cerr)
	}
	if err == nil && !t.keep || ctx.Err() != nil {
		_ = os.RemoveAll(t.dir) // its parent directory is removed at the end
	}
	return err
}

// begin starts a job with additional flags and waits for its first steps.
func (t *trial) begin(ctx context.Context, flags ...string) (*job, error) {
	j, err := t.job()
	if err != nil {
		return nil, err
	}
	j.flag(flags...)
	return j, j.train(ctx, 3)
}

// stop ends an endless job by SIGINT.
func (j *job) stop(ctx context.Context) error {
	j.signal(syscall.SIGINT)
	return j.end(ctx, interrupted)
}

// full waits until the wanted number of workers train in a world after the generation.
func (j *job) full(ctx context.Context, generation uint64) error {
	return j.Until(ctx, fmt.Sprintf("a step of %d workers after generation %d", j.Workers, generation), func() bool {
		return slices.ContainsFunc(j.Lines, func(l steplog.Line) bool {
			return l.Generation > generation && l.Event == steplog.Step && l.Size == j.Workers
		})
	})
}

// kills kills n members of the newest world by SIGKILL, one after the other, and waits until the
// others continue. It always spares one that holds the state.
func (t *trial) kills(ctx context.Context, j *job, n int) error {
	for range n {
		err := j.Until(ctx, "a world of two that train", func() bool { return len(j.Holders()) > 1 && j.Generation == j.World.Generation })
		if err != nil {
			return err
		}
		members, generation := j.Holders(), j.Generation
		pid := members[t.dice.IntN(len(members))]
		if !j.strike(pid, syscall.SIGKILL) {
			continue // it has just ended
		}
		if err := j.gone(ctx, pid); err != nil {
			return err
		}
		if err := j.later(ctx, generation); err != nil {
			return err
		}
	}
	return nil
}

// strike sends a signal to a worker, identified by its own PID, which differs in a PID namespace.
// It reports whether the job has this process.
func (j *job) strike(pid int, s syscall.Signal) bool {
	for _, outer := range j.processes(j.trial.programs.Trainer) {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", outer)) // empty if it has ended
		_, rest, _ := strings.Cut(string(text), "NSpid:")
		line, _, _ := strings.Cut(rest, "\n")
		if all := strings.Fields(line); len(all) > 0 && all[len(all)-1] == strconv.Itoa(pid) {
			return syscall.Kill(outer, s) == nil
		}
	}
	return false
}

// processes returns the job's processes whose command line begins with a program and words.
func (j *job) processes(words ...string) []int {
	var pids []int
	for _, pid := range j.Processes() {
		if strings.HasPrefix(follow.CommandLine(pid)+" ", strings.Join(words, " ")+" ") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// driver returns hvdrun's process, also if it is wrapped.
func (j *job) driver() int {
	for _, pid := range j.processes(j.trial.programs.Hvdrun) {
		if !strings.HasPrefix(follow.CommandLine(pid), j.trial.programs.Hvdrun+" agent") {
			return pid
		}
	}
	return 0
}

// peak returns the peak memory of a process in bytes; 0 if it has ended.
func peak(pid int) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // empty if it has ended
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	number, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	kb, _ := strconv.ParseInt(number, 10, 64) // 0 if empty
	return kb << 10
}

// script writes a shell script for the case.
func (t *trial) script(name, text string) (string, error) {
	path := filepath.Join(t.dir, name)
	return path, sandbox.WriteProgram(path, []byte("#!/bin/sh\n"+text))
}
