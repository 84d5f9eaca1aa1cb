package yield

import (
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// policies returns how many threads of this process have which policy.
func policies(t *testing.T) map[uint32]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[uint32]int)
	for _, e := range threads {
		id, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if a, err := unix.SchedGetAttr(id, 0); err == nil {
			found[a.Policy]++
		}
	}
	return found
}

// TestYield: all threads give way while side work runs in a process that waits for a place, those
// too that begin meanwhile, and none does when it has one.
func TestYield(t *testing.T) {
	if !permitted() {
		t.Skip("this process may not go back from SCHED_IDLE")
	}
	all := func(where string, want uint32) {
		t.Helper()
		if found := policies(t); len(found) != 1 || found[want] == 0 {
			t.Errorf("%s: threads by policy: %v, want all of %d", where, found, want)
		}
	}
	While(func() { all("without waiting", unix.SCHED_NORMAL) })
	Wait()
	defer Placed()
	all("without work", unix.SCHED_NORMAL)
	While(func() {
		all("with work", unix.SCHED_IDLE)
		var threads sync.WaitGroup
		for range 8 {
			threads.Go(func() {
				runtime.LockOSThread() // and the thread ends with the goroutine
				if a, err := unix.SchedGetAttr(0, 0); err != nil || a.Policy != unix.SCHED_IDLE {
					t.Errorf("a new thread: policy %v, %v", a, err)
				}
			})
		}
		threads.Wait()
		Placed()
		all("with a place", unix.SCHED_NORMAL)
		Wait()
		all("waiting again", unix.SCHED_IDLE)
	})
	Placed()
	all("at the end", unix.SCHED_NORMAL)
}

// TestLinger: a pause between two pieces of work changes nothing, a longer one ends it.
func TestLinger(t *testing.T) {
	if !permitted() {
		t.Skip("this process may not go back from SCHED_IDLE")
	}
	synctest.Test(t, func(t *testing.T) {
		state.timer = nil // of this bubble
		defer func() { state.timer = nil }()
		Wait()
		defer Placed()
		While(func() {})
		<-time.After(linger / 2)
		While(func() {})
		<-time.After(linger - 1)
		synctest.Wait()
		if policies(t)[unix.SCHED_IDLE] == 0 {
			t.Error("it has ended too early")
		}
		<-time.After(1)
		synctest.Wait()
		if policies(t)[unix.SCHED_IDLE] > 0 {
			t.Error("it has not ended")
		}
	})
}
