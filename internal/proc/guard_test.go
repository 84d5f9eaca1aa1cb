package proc_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/launch/launchtest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// unmarked is a worker whose child has left the session, has no environment, and ignores SIGTERM.
const unmarked = `exec 9>"$1"; (env -i /usr/bin/setsid /bin/sh -c 'trap "" TERM HUP; echo ready >&9; while :; do /bin/sleep 1; done' >/dev/null 2>&1 &)
	exec sleep 1000`

// guarded are workers of several kinds: a plain one, one with a child, and one whose child has left
// the session and ignores SIGTERM.
var guarded = []string{
	`exec 9>"$1"; echo ready >&9; exec sleep 1000`,
	`exec 9>"$1"; trap "" TERM; sh -c 'sleep 1000; true' & echo ready >&9; wait`,
	`exec 9>"$1"; setsid sh -c 'trap "" TERM HUP; echo ready >&9; while :; do sleep 1; done' & wait`,
}

func init() {
	if proc.HasCgroups() {
		guarded = append(guarded, unmarked)
	}
}

// playDriver is a driver that the test kills: it runs workers, and prints the guard's id.
func playDriver(mode string) {
	workers := guarded[:1]
	if mode == "without shell" {
		proc.WithoutShell()
	}
	if mode != "plain" {
		workers = guarded
		guard, err := proc.StartGuard(plan.EnvRunID, os.Getenv("PROC_TEST_RUN"))
		if err != nil {
			panic(err)
		}
		defer guard.Close()
		fmt.Println(proc.GuardPID(guard))
	} else {
		fmt.Println(os.Getpid())
	}
	runWorkers(context.Background(), workers, os.Getenv("PROC_TEST_RUN"), os.Getenv("PROC_TEST_PIPE"))
}

func runWorkers(ctx context.Context, scripts []string, runID, pipe string) {
	var wg sync.WaitGroup
	for i, text := range scripts {
		wg.Go(func() {
			incarnation := fmt.Sprintf("%s-%d", runID, i)
			_ = launch.Local{}.Run(ctx, &launch.Spec{
				Incarnation: incarnation,
				Command:     []string{"/bin/sh", "-c", text, "sh", pipe},
				Env:         []string{"PATH=" + os.Getenv("PATH"), "HVD_RUN_ID=" + runID, "HVD_INCARNATION=" + incarnation},
			}, nil)
		})
	}
	wg.Wait()
}

// startDriver starts this test binary as a driver, and returns it with the process id that it
// prints.
func startDriver(t *testing.T, mode, runID, pipe string) (*exec.Cmd, int) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "PROC_TEST_DRIVER="+mode, "PROC_TEST_RUN="+runID, "PROC_TEST_PIPE="+pipe)
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
	for _, mode := range []string{"guarded", "without shell"} {
		t.Run(mode, func(t *testing.T) { guardOfKilled(t, mode) })
	}
}

func guardOfKilled(t *testing.T, mode string) {
	pipe, await, gone := launchtest.HeldPipe(t)
	driver, guard := startDriver(t, mode, "run_"+rand.Text(), pipe)
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
		n, err := unix.Poll(fds, int(time.Until(sandbox.Limit()).Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if n != 1 {
			t.Fatalf("the guard itself is left (%v)", err)
		}
		break
	}
}

// TestEXE04_WorkerDiesWithDriver: the parent is SIGKILLed while the child sleeps. Without a guard
// the kernel kills the worker itself.
func TestEXE04_WorkerDiesWithDriver(t *testing.T) {
	pipe, await, gone := launchtest.HeldPipe(t)
	driver, _ := startDriver(t, "plain", "run_"+rand.Text(), pipe)
	await(1)
	if err := driver.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone()
}

func TestGuardCloseSweeps(t *testing.T) {
	pipe, await, gone := launchtest.HeldPipe(t)
	runID := "close_" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, runID)
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

// TestGuardSparesOthers: the guard spares the workers of a run whose id begins with that of its own
// run.
func TestGuardSparesOthers(t *testing.T) {
	pipe, await, gone := launchtest.HeldPipe(t)
	runID := "spare_" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, runID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	died := make(chan error, 1)
	const script = `exec 9>"$1"; trap 'exit 5' TERM; echo ready >&9; while :; do sleep 0.01; done`
	go func() {
		died <- launch.Local{}.Run(ctx, &launch.Spec{
			Command: []string{"/bin/sh", "-c", script, "sh", pipe},
			Env:     []string{"PATH=" + os.Getenv("PATH"), "HVD_RUN_ID=" + runID + "0", "X=HVD_RUN_ID=" + runID},
			Grace:   time.Hour,
		}, nil)
	}()
	await(1)
	if err := guard.Close(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-died; err == nil || !strings.HasPrefix(err.Error(), "exited with code 5") {
		t.Fatalf("the other run's worker: %v", err)
	}
	gone()
}

func TestGuardRefusesBadIDs(t *testing.T) {
	for _, id := range []string{"", "a b", "a\n", "$(id)", "a.b", "é"} {
		if g, err := proc.StartGuard(plan.EnvRunID, id); err == nil {
			g.Close()
			t.Errorf("run id %q was accepted", id)
		} else if !strings.HasPrefix(err.Error(), "proc: ") {
			t.Errorf("run id %q: %v", id, err)
		}
	}
}

// TestOrphanBesideAnOlderWorker: processes that a worker leaves behind end with it, even if nothing
// shows to which worker they belong.
func TestOrphanBesideAnOlderWorker(t *testing.T) {
	if !proc.HasCgroups() {
		t.Skip("cgroups of version 2 cannot be made here")
	}
	pipe, await, gone := launchtest.HeldPipe(t)
	ctx, cancel := context.WithCancel(t.Context())
	var older sync.WaitGroup
	older.Go(func() { runWorkers(ctx, []string{`exec sleep 1000`}, "run_"+rand.Text(), pipe) })
	runWorkers(t.Context(), []string{`exec 9>"$1"
		trap 'exit 3' USR1
		(env -i W=$$ /usr/bin/setsid /bin/sh -c 'echo ready >&9; kill -USR1 "$W"; exec /bin/sleep 1000' >/dev/null 2>&1 &)
		while :; do sleep 0.01; done`}, "run_"+rand.Text(), pipe)
	await(1)
	gone()
	cancel()
	older.Wait()
	if left, err := proc.Cgroups(); err != nil || len(left) > 0 {
		t.Errorf("cgroups are left: %q, %v", left, err)
	}
}

func BenchmarkGuardClose(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		guard, err := proc.StartGuard(plan.EnvRunID, "bench_"+rand.Text())
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := guard.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
