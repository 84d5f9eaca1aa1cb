package proc

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Ref is a process of this machine that another process may have started. It holds the process id
// and the time of birth, which tells the process from a later one with the same id.
type Ref struct {
	pid   int
	birth uint64          // in ticks after boot; 0: unknown
	ended <-chan struct{} // closed when this child has ended; nil: not a child of this process
}

// RefOf returns a Ref of a child of this process; ended is closed when the child has ended.
func RefOf(pid int, ended <-chan struct{}) *Ref { return &Ref{pid: pid, ended: ended} }

// Find returns a Ref of a process that is not a child of this one and was started with the
// arguments. If no such process has the id, the Ref is of one that has ended.
func Find(pid int, args ...string) *Ref {
	r := &Ref{pid: pid}
	line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err == nil && bytes.Contains(line, []byte("\x00"+strings.Join(args, "\x00"))) {
		r.birth, _, _ = Born(pid)
	}
	return r
}

// PID returns the process id.
func (r *Ref) PID() int { return r.pid }

// Ended returns an error once the process has ended.
func (r *Ref) Ended() error {
	if r.ended != nil {
		select {
		case <-r.ended:
			return errors.New("its process has ended")
		default:
			return nil
		}
	}
	if birth, state, err := Born(r.pid); err != nil || state == 'Z' || state == 'X' || birth != r.birth {
		return errors.New("its process has ended")
	}
	return nil
}

// Await blocks until the process has ended, or returns the cause of ctx's end.
func (r *Ref) Await(ctx context.Context) error {
	for r.Ended() == nil {
		select {
		case <-r.ended:
		case <-time.After(2 * time.Millisecond): // the kernel notifies only the parent of a process that ends
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Stopped returns whether a signal or a debugger has stopped the process.
func (r *Ref) Stopped() bool {
	return Stopped(r.pid) && r.Ended() == nil
}

// Signal sends a signal to a process that has not ended.
func (r *Ref) Signal(sig syscall.Signal) {
	if r.Ended() == nil {
		_ = syscall.Kill(r.pid, sig) // fails if it has just ended
	}
}
