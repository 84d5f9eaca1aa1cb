package launch_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/launch"
)

const patience = 2 * time.Minute

// unmarked is a worker whose child has left the session, has no environment, and does not obey.
const unmarked = `exec 9>"$1"; (env -i /usr/bin/setsid /bin/sh -c 'trap "" TERM HUP; echo ready >&9; while :; do /bin/sleep 1; done' >/dev/null 2>&1 &)
	exec sleep 1000`

// guarded are workers of all sorts: plain, with a child, and with one that left the session and
// does not obey.
var guarded = []string{
	`exec 9>"$1"; echo ready >&9; exec sleep 1000`,
	`exec 9>"$1"; trap "" TERM; sh -c 'sleep 1000; true' & echo ready >&9; wait`,
	`exec 9>"$1"; setsid sh -c 'trap "" TERM HUP; echo ready >&9; while :; do sleep 1; done' & wait`,
}

func init() {
	if launch.HasCgroups() {
		guarded = append(guarded, unmarked)
	}
}

// playDriver is a driver that somebody will kill: it runs workers, and prints the guard's id.
func playDriver(mode string) {
	workers := guarded[:1]
	if mode == "guarded" {
		workers = guarded
		guard, err := launch.StartGuard(os.Getenv("LAUNCH_TEST_RUN"))
		if err != nil {
			panic(err)
		}
		defer guard.Close()
		fmt.Println(launch.GuardPID(guard))
	} else {
		fmt.Println(os.Getpid())
	}
	runWorkers(context.Background(), workers, os.Getenv("LAUNCH_TEST_RUN"), os.Getenv("LAUNCH_TEST_PIPE"))
}

func runWorkers(ctx context.Context, scripts []string, runID, pipe string) {
	var wg sync.WaitGroup
	for i, text := range scripts {
		wg.Go(func() {
			incarnation := fmt.Sprintf("%s-%d", runID, i)
			_ = launch.Local{}.Run(ctx, launch.Spec{
				Incarnation: incarnation,
				Command:     []string{"/bin/sh", "-c", text, "sh", pipe},
				Env:         []string{"PATH=" + os.Getenv("PATH"), "HVD_RUN_ID=" + runID, "HVD_INCARNATION=" + incarnation},
			}, nil)
		})
	}
	wg.Wait()
}

// heldPipe makes a named pipe; await reads n "ready" lines from it, gone waits until nobody holds
// it.
func heldPipe(t *testing.T) (path string, await func(n int), gone func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "held")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close(); ours.Close() })
	_ = pipe.SetReadDeadline(time.Now().Add(patience))
	await = func(n int) {
		t.Helper()
		if _, err := io.ReadFull(pipe, make([]byte, n*len("ready\n"))); err != nil {
			t.Fatalf("workers are not ready: %v", err)
		}
		ours.Close()
	}
	gone = func() {
		t.Helper()
		if rest, err := io.ReadAll(pipe); err != nil || len(rest) > 0 {
			t.Fatalf("somebody is left: %v (read %q)", err, rest)
		}
	}
	return path, await, gone
}

// startDriver starts this test binary as a driver and returns it with the id that it prints.
func startDriver(t *testing.T, mode, runID, pipe string) (*exec.Cmd, int) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LAUNCH_TEST_DRIVER="+mode, "LAUNCH_TEST_RUN="+runID, "LAUNCH_TEST_PIPE="+pipe)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return cmd, pid
}

func TestGuardAfterDriverIsKilled(t *testing.T) {
	pipe, await, gone := heldPipe(t)
	driver, guard := startDriver(t, "guarded", "run_"+rand.Text(), pipe)
	await(len(guarded))
	fd, err := unix.PidfdOpen(guard, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := driver.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(patience/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if n != 1 {
			t.Fatalf("the guard itself is left (%v)", err)
		}
		break
	}
}

// EXE-04: the parent is SIGKILLed while the child sleeps. Without a guard the kernel sees to the
// worker itself.
func TestEXE04_WorkerDiesWithDriver(t *testing.T) {
	pipe, await, gone := heldPipe(t)
	driver, _ := startDriver(t, "plain", "run_"+rand.Text(), pipe)
	await(1)
	if err := driver.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone()
}

func TestGuardCloseSweeps(t *testing.T) {
	pipe, await, gone := heldPipe(t)
	runID := "close_" + rand.Text()
	guard, err := launch.StartGuard(runID)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runWorkers(t.Context(), guarded, runID, pipe)
	}()
	await(len(guarded))
	for range 2 {
		if err := guard.Close(); err != nil {
			t.Fatal(err)
		}
	}
	gone()
	<-ended
}

// A run's id may be the beginning of another's.
func TestGuardSparesOthers(t *testing.T) {
	pipe, await, gone := heldPipe(t)
	runID := "spare_" + rand.Text()
	guard, err := launch.StartGuard(runID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	died := make(chan error, 1)
	const script = `exec 9>"$1"; trap 'exit 5' TERM; echo ready >&9; while :; do sleep 0.01; done`
	go func() {
		died <- launch.Local{}.Run(ctx, launch.Spec{
			Command: []string{"/bin/sh", "-c", script, "sh", pipe},
			Env:     []string{"PATH=" + os.Getenv("PATH"), "HVD_RUN_ID=" + runID + "0", "X=HVD_RUN_ID=" + runID},
			Grace:   patience,
		}, nil)
	}()
	await(1)
	if err := guard.Close(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-died; err == nil || err.Error() != "exited with code 5" {
		t.Fatalf("the other run's worker: %v", err)
	}
	gone()
}

func TestGuardRefusesBadIDs(t *testing.T) {
	for _, id := range []string{"", "a b", "a\n", "$(id)", "a.b", "é"} {
		if g, err := launch.StartGuard(id); err == nil {
			g.Close()
			t.Errorf("run id %q was accepted", id)
		} else if !strings.HasPrefix(err.Error(), "launch: ") {
			t.Errorf("run id %q: %v", id, err)
		}
	}
}

func BenchmarkGuardClose(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		guard, err := launch.StartGuard("bench_" + rand.Text())
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := guard.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
