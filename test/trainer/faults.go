package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// errLeave makes the worker leave with status 0.
var errLeave = errors.New("as scheduled")

// fault is an entry of the schedule, HOST:SLOT@POINT=N:HOW. The points are
//
//	start    before Init (N is 0)
//	init     between Init and Run (0)
//	step     between step N and the next one
//	save     in the middle of saving step N
//	sync     in the middle of this process's N-th sync
//	restore  in the middle of this process's N-th rollback
//	reset    in this process's N-th OnReset
//	end      after Run (0)
//
// and the process ends by
//
//	kill     SIGKILL
//	segv     SIGSEGV with its default action: a core dump if permitted
//	abrt     SIGABRT, likewise
//	oom      out of memory: killed by the kernel in -oom-cgroup, or failed by the runtime's limit
//	exitC    exit status C at once
//	fail     an error returned through elastic.Run, and exit status 1
//	leave    likewise, but exit status 0
//
// or does not end:
//
//	hang     it blocks forever
//	stop     SIGSTOP
//	mutex    it locks a mutex that it holds
//	spin     an endless loop without calls
//	sleep    it sleeps for hours
//	fifo     it opens a FIFO without a writer, in the kernel
//
// or reports something false and continues to train:
//
//	lie-…    see lies
//
// Each fault happens once in the job, in any incarnation of the slot; with a trailing "!", every
// time. Faults of the same point wait for each other, so that they happen simultaneously.
type fault struct {
	number int
	where  string
	point  string
	how    string
	always bool
}

// faults is the schedule, which is the same for all workers of the job.
type faults struct {
	all    []fault
	dir    string
	where  string
	cgroup string // a memory cgroup with a limit
	liar   liar
}

func (f *faults) String() string { return "" }

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

// have reports whether the schedule has a fault at the point.
func (f *faults) have(point string) bool {
	return slices.ContainsFunc(f.all, func(x fault) bool { return strings.HasPrefix(x.point, point+"=") })
}

// any reports whether there are faults.
func (f *faults) any() bool { return len(f.all) > 0 }

// arm sets this process's slot and the directory of marks.
func (f *faults) arm(dir, where string) { f.dir, f.where = dir, where }

// at performs the faults scheduled for this point and returns the first error.
func (f *faults) at(point string, n int) error {
	point += "=" + strconv.Itoa(n)
	for _, x := range f.all {
		if x.where != f.where || x.point != point {
			continue
		}
		if !x.always && !f.mark(x) {
			continue // it has already happened
		}
		for _, other := range f.all {
			for !x.always && other.point == point && !f.marked(other) {
				time.Sleep(time.Millisecond)
			}
		}
		if err := f.happen(x); err != nil {
			return err
		}
	}
	return nil
}

func (f *faults) path(x fault) string { return filepath.Join(f.dir, fmt.Sprintf("fault.%d", x.number)) }

// mark records the fault and reports whether it is its first time.
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
	case lies[x.how] != nil:
		return f.liar.lie(x.how)
	case x.how == "oom":
		return starve(f.cgroup)
	case x.how == "hang":
		select {}
	case hangs[x.how] != nil:
		return hangs[x.how](f.dir)
	case x.how == "stop":
		runtime.LockOSThread() // this thread takes the signal, so that it stops here
		defer runtime.UnlockOSThread()
		pid, thread := uintptr(os.Getpid()), uintptr(syscall.Gettid())
		_, _, failed := syscall.RawSyscall(syscall.SYS_TGKILL, pid, thread, uintptr(syscall.SIGSTOP)) // stop
		if failed != 0 {
			return failed
		}
		return nil
	case x.how == "fail":
		return errors.New("failing as scheduled")
	case x.how == "leave":
		return errLeave
	case isExit:
		if c, err := strconv.Atoi(code); err == nil {
			os.Exit(c)
		}
	}
	return fmt.Errorf("unknown fault %q", x.how)
}

// trap is a Part of the state without data. This process can die in its methods.
type trap struct {
	faults          *faults
	at              *progress
	strikes         *strikes
	syncs, restores int
}

// Save runs in the middle of every save.
func (t *trap) Save() error {
	t.strikes.saved.Store(true)
	return t.faults.at("save", t.at.Step)
}

// Restore runs in the middle of every rollback.
func (t *trap) Restore() error {
	t.restores++
	return t.faults.at("restore", t.restores)
}

// Sync runs in the middle of every sync.
func (t *trap) Sync(context.Context, *collective.Group, int) error {
	t.syncs++
	return t.faults.at("sync", t.syncs)
}
