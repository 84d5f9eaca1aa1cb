package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestReap: an inherited process that ends is reaped; a child that this process started itself is
// left for its Wait.
func TestReap(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Reap(ctx, 0)
	}()
	ours := exec.Command("true")
	if err := StartSession(ours); err != nil {
		t.Fatal(err)
	}
	orphan := startOrphan(t)
	for limit := sandbox.Limit(); ; <-time.After(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", orphan)); err != nil {
			break
		}
		if time.Now().After(limit) {
			t.Fatal("an inherited process stays defunct")
		}
	}
	if err := WaitSession(ours); err != nil {
		t.Errorf("a process of our own: %v", err)
	}
	cancel()
	<-done
}

// TestReapAfterFork: an inherited process that ended during a fork, and could be the forked child,
// is reaped after the fork, although no signal announces it.
func TestReapAfterFork(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Reap(ctx, 0)
	}()
	defer func() { cancel(); <-done }()
	over, forked := make(chan struct{}), make(chan error)
	go func() {
		forked <- own.fork(false, func() (int, error) {
			<-over
			return 0, errors.New("there is no child")
		})
	}()
	for began := false; !began; runtime.Gosched() {
		own.mu.Lock()
		began = len(own.forking) > 0
		own.mu.Unlock()
	}
	orphan := startOrphan(t)
	await := func(what string, holds func(state byte, err error) bool) {
		t.Helper()
		for limit := sandbox.Limit(); ; <-time.After(time.Millisecond) {
			_, state, err := Born(orphan)
			if holds(state, err) {
				return
			}
			if time.Now().After(limit) {
				t.Fatalf("the orphan %d %s: state %q, %v", orphan, what, state, err)
			}
		}
	}
	await("does not end", func(state byte, err error) bool { return state == 'Z' || err != nil })
	<-time.After(20 * time.Millisecond) // Reap has most probably handled the signal of its end
	reapNow(nil, time.Time{})
	if _, _, err := Born(orphan); err != nil {
		t.Error("it is reaped although it may be a child of this process")
	}
	close(over)
	<-forked
	await("stays defunct", func(_ byte, err error) bool { return err != nil })
}

// startOrphan starts a process that ends when its parent, a shell, has ended and this process has
// inherited it: a shell that sees the end of a child reaps it itself.
func startOrphan(t *testing.T) (pid int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	// This package starts the shell too: otherwise Reap could take it for an inherited process.
	shell := exec.Command("sh", "-c", `cat <&3 >/dev/null 2>&1 & echo $!`)
	var out strings.Builder
	shell.Stdout, shell.ExtraFiles = &out, []*os.File{r}
	if err := errors.Join(StartSession(shell), WaitSession(shell)); err != nil {
		t.Fatal(err)
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(out.String())); err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestNoWorkerStarted(t *testing.T) {
	c := children{started: map[int]startedChild{1: {true, 100}, 2: {true, 200}, 3: {false, 5}}}
	for birth, want := range map[uint64]bool{99: true, 100: false, 250: false} {
		if c.noWorkerStarted(birth) != want {
			t.Errorf("born at %d: %v", birth, !want)
		}
	}
	c.reaped(1)
	if !c.noWorkerStarted(150) || c.noWorkerStarted(200) {
		t.Error("a process born between two workers is of the first")
	}
}
