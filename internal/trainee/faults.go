package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// errLeave ends the worker in good order.
var errLeave = errors.New("as scheduled")

// fault is one entry of the schedule, HOST:SLOT@POINT=N:HOW. The points are
//
//	start    before Init (N is 0)
//	init     between Init and Run (0)
//	step     after step N, before anything of the next
//	save     in the middle of saving step N
//	sync     in the middle of this process's N-th sync
//	restore  in the middle of this process's N-th roll back
//	reset    in this process's N-th OnReset
//	end      after Run (0)
//
// and it ends by
//
//	kill     SIGKILL
//	segv     SIGSEGV, with its default action: a core dump where one is allowed
//	abrt     SIGABRT, the same
//	oom      lack of memory: the kernel's killer in the cgroup of -oom-cgroup, or else the runtime's end at a limit
//	exitC    exit status C at once
//	fail     an error that goes through elastic.Run and makes the process exit with 1
//	leave    the same, but the process exits with 0
//
// or it does not end:
//
//	hang     nothing more happens there
//	stop     SIGSTOP
//
// Each fault happens once in the life of the job, whichever process it meets; with "!" at its end,
// every time. Faults of the same point wait for each other, so that they happen at the same time.
type fault struct {
	number int
	where  string
	point  string
	how    string
	always bool
}

// faults is the schedule; all workers of the job have the same.
type faults struct {
	all    []fault
	dir    string
	where  string
	cgroup string // of memory, with a limit
}

func (f *faults) String() string { return "" }

// Set adds an entry.
func (f *faults) Set(text string) error {
	where, rest, ok1 := strings.Cut(text, "@")
	point, how, ok2 := strings.Cut(rest, ":")
	if !ok1 || !ok2 || !strings.Contains(point, "=") {
		return fmt.Errorf("%q is not HOST:SLOT@POINT=N:HOW", text)
	}
	how, always := strings.CutSuffix(how, "!")
	f.all = append(f.all, fault{number: len(f.all), where: where, point: point, how: how, always: always})
	return nil
}

// have tells whether any is at the point, for whatever number.
func (f *faults) have(point string) bool {
	return slices.ContainsFunc(f.all, func(x fault) bool { return strings.HasPrefix(x.point, point+"=") })
}

// arm says who this process is, and where the marks are.
func (f *faults) arm(dir, where string) { f.dir, f.where = dir, where }

// at makes happen what is scheduled for this point, and returns the error of a fault that is one.
func (f *faults) at(point string, n int) error {
	point += "=" + strconv.Itoa(n)
	for _, x := range f.all {
		if x.where != f.where || x.point != point {
			continue
		}
		if !x.always && !f.mark(x) {
			continue // it has happened
		}
		for _, other := range f.all {
			for !x.always && other.point == point && !f.marked(other) {
				time.Sleep(waitPause)
			}
		}
		if err := f.happen(x); err != nil {
			return err
		}
	}
	return nil
}

func (f *faults) path(x fault) string { return filepath.Join(f.dir, fmt.Sprintf("fault.%d", x.number)) }

// mark notes that the fault happens, and tells whether it is the first time.
func (f *faults) mark(x fault) bool {
	file, err := os.OpenFile(f.path(x), os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return false
	}
	return file.Close() == nil
}

func (f *faults) marked(x fault) bool {
	_, err := os.Stat(f.path(x))
	return err == nil
}

func (f *faults) happen(x fault) error {
	code, isExit := strings.CutPrefix(x.how, "exit")
	by, isDeath := deaths[x.how]
	switch {
	case isDeath:
		return die(by)
	case x.how == "oom":
		return starve(f.cgroup)
	case x.how == "hang":
		select {}
	case x.how == "stop":
		return syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case x.how == "fail":
		return errors.New("failing as scheduled")
	case x.how == "leave":
		return errLeave
	case isExit:
		if c, err := strconv.Atoi(code); err == nil {
			os.Exit(c)
		}
	}
	return fmt.Errorf("nobody can end by %q", x.how)
}

// trap is a Part of the state that holds nothing, and in whose methods this process can die.
type trap struct {
	faults          *faults
	at              *progress
	strikes         *strikes
	syncs, restores int
}

// Save is the middle of every save.
func (t *trap) Save() error {
	t.strikes.saved.Store(true)
	return t.faults.at("save", t.at.Step)
}

// Restore is the middle of every roll back.
func (t *trap) Restore() error {
	t.restores++
	return t.faults.at("restore", t.restores)
}

// Sync is the middle of every sync.
func (t *trap) Sync(context.Context, *collective.Group, int) error {
	t.syncs++
	return t.faults.at("sync", t.syncs)
}
