package probe

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/stacks"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

//go:noinline
func deeper(n int, c chan int) {
	if n > 0 {
		deeper(n-1, c)
		return
	}
	<-c
}

// TestOwn: equal stacks are reported once, a loop without calls is reported, and a stack that is
// deeper than a cheap look reads includes its outermost frames.
func TestOwn(t *testing.T) {
	c := make(chan int)
	var ended sync.WaitGroup
	var stop syncFlag
	for range 50 {
		ended.Go(func() { deeper(3, c) })
	}
	ended.Go(func() { deeper(60, c) })
	ended.Go(func() { stop.spin() })
	defer func() { close(c); stop.Store(true); ended.Wait() }()
	var text string
	for range 1000 {
		all := own()
		found, depth := 0, 0
		text = ""
		for _, g := range all {
			text += stacks.Text(g.Frames) + "\n"
			for _, f := range g.Frames {
				if strings.HasSuffix(f.Func, "probe.own") {
					t.Fatal("the caller is among them")
				}
				if strings.HasSuffix(f.Func, "probe.deeper") {
					depth = max(depth, len(g.Frames))
					found = max(found, g.Count)
				}
			}
		}
		if found >= 50 && depth > 60 {
			break
		}
		runtime.Gosched()
	}
	all := own()
	if len(all) == 0 || len(all) > stacks.MaxGroups {
		t.Fatalf("%d groups:\n%s", len(all), text)
	}
	deepest, spins := 0, false
	for _, g := range all {
		deepest = max(deepest, len(g.Frames))
		for _, f := range g.Frames {
			spins = spins || strings.HasSuffix(f.Func, ".spin")
		}
	}
	if deepest < 60 || !spins {
		t.Errorf("%d frames at most, the loop is told: %v", deepest, spins)
	}
	if text := OwnText(2000); len(text) > 2000 || !json.Valid(text) {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}

// syncFlag ends a loop without calls.
type syncFlag struct{ atomic.Bool }

func (s *syncFlag) spin() {
	for !s.Load() {
		continue
	}
}

// TestProbe: a process and those that it has started are reported, with the system call and its
// file.
func TestProbe(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "data")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	keep, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	cmd := exec.Command("sh", "-c", "cat "+fifo+"; :")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	var w stacks.Worker
	follow.Await(t, func() bool {
		w.Processes, err = Probe(cmd.Process.Pid)
		return err != nil || strings.Contains(w.Text(), "read of "+fifo)
	})
	if len(w.Processes) != 2 || !strings.HasPrefix(w.Text(), "cat (pid ") || !strings.Contains(w.Text(), ") sleeps in read of "+fifo) {
		t.Errorf("%s: %+v", w.Text(), w.Processes)
	}
	if err := syscall.Kill(w.Processes[1].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := Probe(1 << 30); err == nil {
		t.Error("of no process")
	}
	own, err := Probe(os.Getpid())
	if err != nil || len(own[0].Threads) < 2 || own[0].Threads[0].TID != os.Getpid() {
		t.Errorf("%+v, %v", own, err)
	}
	for _, line := range []string{"", "running", "x 1", "-1 0x1 0x2", "0", "999999 0x0", "0 zzz", "0 0xffffffffffffffff"} {
		if name, of := syscallOf("/proc/self", line); of != "" && name == "" {
			t.Errorf("%q: %s of %s", line, name, of)
		}
	}
}

// BenchmarkOwn measures a look at 10,000 goroutines.
func BenchmarkOwn(b *testing.B) {
	c := make(chan int)
	for range 10_000 {
		go deeper(10, c)
	}
	defer close(c)
	for b.Loop() {
		own()
	}
}
