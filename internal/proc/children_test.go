package proc

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// An inherited process that ends is reaped; one that this process has started itself is left to be
// waited for.
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
	// The shell is started by this package too: else Reap could take it for an inherited process.
	shell := exec.Command("sh", "-c", `sleep 0 >/dev/null 2>&1 & echo $!`)
	var out strings.Builder
	shell.Stdout = &out
	if err := StartSession(shell); err != nil {
		t.Fatal(err)
	}
	if err := WaitSession(shell); err != nil {
		t.Fatal(err)
	}
	orphan, err := strconv.Atoi(strings.TrimSpace(out.String()))
	if err != nil {
		t.Fatal(err)
	}
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
