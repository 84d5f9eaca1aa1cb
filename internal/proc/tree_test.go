package proc

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// stuck returns a process that does not end, and dumps its core as long as its status file says so.
func stuck(t *testing.T, dumps bool) *Tree {
	t.Helper()
	path := filepath.Join(t.TempDir(), "status")
	text := "State:\tR (running)\nCoreDumping:\t0\n"
	if dumps {
		text = "State:\tD (disk sleep)\nCoreDumping:\t1\n"
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	status, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { status.Close() })
	const nobody = 1 << 30 // no process has this number
	c := newChild()
	c.PID = nobody
	return &Tree{
		Child: c, descendants: newDescendants("", 0),
		dump: &dumpWatch{pid: nobody, pause: dumpLook, status: status, buf: make([]byte, 4<<10)},
	}
}

// TestUnkillable: a process that SIGKILL does not end is waited for only for the given time.
func TestUnkillable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := stuck(t, false)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		if !p.await(ctx, Stop{Grace: time.Second}) || p.hasEnded() {
			t.Error("it counts as ended")
		}
		if took := time.Since(begin); took != time.Second+KillPatience {
			t.Errorf("it was waited for %v", took)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		p := stuck(t, false)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begin, more := time.Now(), make(chan struct{})
		go func() {
			for range 3 { // the grace begins again each time
				<-time.After(50 * time.Second)
				more <- struct{}{}
			}
		}()
		p.await(ctx, Stop{Grace: time.Minute, More: more})
		if took := time.Since(begin); took != 210*time.Second+KillPatience {
			t.Errorf("with more time it was waited for %v", took)
		}
	})
}

// TestDumping: a worker that dumps its core is reported once, at the first look, long before its
// process ends. A stop leaves it a bounded time to write.
func TestDumping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := stuck(t, true)
		begin, told := time.Now(), 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		p.await(ctx, Stop{Grace: time.Second, Dying: func(string, syscall.Signal) {
			told++
			if took := time.Since(begin); took != dumpLook {
				t.Errorf("it was told of after %v", took)
			}
		}})
		if told != 1 {
			t.Errorf("it was told of %d times", told)
		}
		if took := time.Since(begin); took < dumpBound || took > dumpBound+KillPatience+3*time.Second {
			t.Errorf("it was waited for %v", took)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		p := stuck(t, true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		hurry := make(chan struct{})
		close(hurry)
		begin := time.Now()
		p.await(ctx, Stop{Grace: time.Hour, Hurry: hurry})
		if took := time.Since(begin); took != KillPatience {
			t.Errorf("with a hurry it was waited for %v", took)
		}
	})
}

// TestDumpWatch: the kernel's information about a dump, and the signal that causes it, are parsed.
func TestDumpWatch(t *testing.T) {
	w := watchDump(os.Getpid(), UnlimitedCore)
	defer w.close()
	if w.dumping() || w.pause != dumpLook || w.what() != "dumps its core" {
		t.Errorf("dumping %v, pause %v, %q", w.dumping(), w.pause, w.what())
	}
}

// TestReapByItself: Reap reaps a child that has ended without the thread that waits for it, which
// may not run for a while.
func TestReapByItself(t *testing.T) {
	pid, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", "exit 7"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := newChild()
	c.PID = pid
	if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	close(c.ended)
	if status, err := c.Reap(); err != nil || status.ExitStatus() != 7 {
		t.Errorf("%v, %v", status, err)
	}
}
