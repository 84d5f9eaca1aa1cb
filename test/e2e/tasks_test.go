package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// Tasks on the workers of a job.

// serveTasks starts a job whose workers run tasks, and waits until it has this number of workers.
func serveTasks(t *testing.T, workers int, hosts string, more ...string) *Running {
	t.Helper()
	t.Parallel()
	r := start(t, Job{
		Verb:    []string{"tasks", "serve"},
		Flags:   flags(append(more, "-np", strconv.Itoa(workers), "--min-np", "1", "-H", hosts, "--orphan-timeout", "10m")...),
		Command: []string{binaries.Tasker},
	})
	if !follow.Await(t, func() bool {
		out, _ := r.Subcommand(t.Context(), "tasks").Output()
		return strings.Count(string(out), "cpu=") >= workers
	}) {
		t.Fatalf("there are not %d workers", workers)
	}
	return r
}

// beginTasks calls serveTasks for one host and starts a program that submits tasks.
func beginTasks(t *testing.T, workers int, args ...string) (*Running, *submitter) {
	t.Helper()
	r := serveTasks(t, workers, on(hostA, workers))
	return r, submits(t, r, args...)
}

// killWorker kills one of the workers.
func killWorker(t *testing.T, r *Running) {
	t.Helper()
	pids := r.Processes()
	i := slices.IndexFunc(pids, func(pid int) bool { return follow.CommandLine(pid) == binaries.Tasker })
	if i < 0 {
		t.Fatal("no worker runs")
	}
	if err := syscall.Kill(pids[i], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// killDriver kills the driver, and the scheduler with it, and returns the resumed job.
func killDriver(t *testing.T, r *Running) *Running {
	t.Helper()
	r.KillDriver()
	next, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// submitter is a program that submits tasks. It must exit with status 0.
type submitter struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.Closer // its standard input
	out  *bufio.Scanner
	all  strings.Builder
	errs bytes.Buffer
}

func submits(t *testing.T, r *Running, args ...string) *submitter {
	t.Helper()
	return submitsBy(t, r, nil, args...)
}

// submitsBy is like submits, with flags for hvdrun tasks run.
func submitsBy(t *testing.T, r *Running, by []string, args ...string) *submitter {
	t.Helper()
	c := &submitter{t: t, cmd: r.Subcommand(t.Context(), slices.Concat([]string{"tasks", "run"}, by, []string{binaries.Tasker}, args)...)}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	c.cmd.Stderr = &c.errs
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	return c
}

// until blocks until the client has printed a line that contains the words.
func (c *submitter) until(words string) string {
	c.t.Helper()
	for c.out.Scan() {
		c.all.WriteString(c.out.Text() + "\n")
		if strings.Contains(c.out.Text(), words) {
			return c.out.Text()
		}
	}
	err := c.cmd.Wait()
	c.t.Fatalf("the client ended with %v, without %q:\n%s%s", err, words, c.all.String(), c.errs.String())
	return ""
}

func (c *submitter) ends() {
	c.t.Helper()
	for c.out.Scan() {
	}
	if err := c.cmd.Wait(); err != nil {
		c.t.Errorf("the client ended with %v: %s", err, c.errs.String())
	}
}

// stopJob ends the job.
func stopJob(t *testing.T, r *Running) {
	t.Helper()
	if out, err := r.Subcommand(t.Context(), "stop").CombinedOutput(); err != nil {
		t.Fatalf("hvdrun stop: %v: %s", err, out)
	}
	if res, err := r.Wait(); err != nil || res.Hung || len(res.Left) > 0 {
		t.Errorf("%v, left behind: %v", err, res.Left)
	}
}

// sized returns a number of tasks: brief with -short, and full without. Each is a multiple of 1000,
// because the client prints how many are left after each thousand.
func sized(full, brief int) int {
	if testing.Short() {
		return brief
	}
	return full
}

// TestTasksPoison: tasks that end their workers, in either way, exclude no slot, and other tasks
// run.
func TestTasksPoison(t *testing.T) {
	r, c := beginTasks(t, 2, "-poison", "2", "-submit", "100")
	c.until("100 right")
	c.ends()
	awaitOutput(t, r, func(text string) bool {
		return strings.Contains(text, "while it ran a task of kills/v1; the slot is not blamed")
	})
	stopJob(t, r)
	if text, err := os.ReadFile(r.OutputPath()); err != nil || strings.Contains(string(text), "is excluded") {
		t.Errorf("slots are blamed for tasks: %v\n%s", err, text)
	}
}

// TestTasksDeaf: workers whose functions ignore their contexts are ended without blame; other
// functions run meanwhile and afterwards.
func TestTasksDeaf(t *testing.T) {
	r := serveTasks(t, 2, on(hostA, 2), "--tasks-grace", "500ms")
	c := submits(t, r, "-deaf", "3", "-submit", "400", "-lasts", "10ms")
	c.until("400 right")
	c.ends()
	awaitOutput(t, r, func(text string) bool {
		return strings.Count(text, "is ended and started again, as a task does not end: task") >= 2 && !strings.Contains(text, "is excluded")
	})
	stopJob(t, r)
}

// TestTasksModel: tasks depend on each other, fail and are cancelled while a worker and the driver
// are killed.
func TestTasksModel(t *testing.T) {
	r, c := beginTasks(t, 3, "-model", "3000", "-lasts", "1ms")
	c.until("2000 left")
	killWorker(t, r)
	c.until("1000 left")
	r = killDriver(t, r)
	c.until("3000 right")
	c.ends()
	stopJob(t, r)
}

// TestTasksStored: large results and values are sent from worker to worker. They outlive a killed
// worker and a killed driver, and nothing of them remains at the end.
func TestTasksStored(t *testing.T) {
	r, c := beginTasks(t, 3, "-size", "20000000", "-rounds", "4")
	c.until("read after")
	killWorker(t, r)
	c.until("made after")
	r = killDriver(t, r)
	c.ends()
	stopJob(t, r)
}

// TestTasksHostKilled: an agent is killed, and its workers with it. The results that only their
// host stored are computed again, and so are the results that they depend on.
func TestTasksHostKilled(t *testing.T) {
	r := serveTasks(t, 3, on(hostA, 1)+","+on(hostB, 1)+","+on(hostC, 1))
	c := submits(t, r, "-across", strings.Join([]string{hostA, hostB, hostC}, ","), "-size", "5000000")
	c.until("stored on all hosts")
	var host Event
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		i := slices.IndexFunc(events, func(e Event) bool { return e.Name == "worker_started" && e.Host == hostB })
		if i >= 0 {
			host = events[i]
		}
		return i >= 0
	}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(parent(t, host.PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		return slices.ContainsFunc(events, func(e Event) bool { return e.Name == "task_worker_left" && e.Host == hostB })
	}); err != nil {
		t.Fatal(err)
	}
	if err := c.in.Close(); err != nil {
		t.Fatal(err)
	}
	c.until("all right")
	c.ends()
	stopJob(t, r)
}

// TestTasksClientKilled: tasks of a client that is killed together with the driver are not lost.
func TestTasksClientKilled(t *testing.T) {
	n := sized(5000, 3000)
	r, c := beginTasks(t, 2, "-submit", fmt.Sprint(n), "-lasts", "2ms")
	c.until(fmt.Sprintf("%d left", n-1000))
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
	r = killDriver(t, r)
	type status struct {
		Waiting, Ready, Running int
		Workers                 []struct{ Done int }
	}
	var s status
	if !follow.Await(t, func() bool {
		s = status{}
		out, err := r.Subcommand(t.Context(), "tasks", "--json").Output()
		return err == nil && json.Unmarshal(out, &s) == nil && len(s.Workers) > 0 && s.Waiting+s.Ready+s.Running == 0
	}) {
		t.Fatalf("tasks are left: %+v", s)
	}
	done := 0
	for _, w := range s.Workers {
		done += w.Done
	}
	if done == 0 { // at most a thousand ran before
		t.Error("no task has run since")
	}
	stopJob(t, r)
}

// TestTasksGateway: a program submits tasks with an invitation, as from another machine, while the
// scheduler is killed and the job resumed. The gateway ends with the job.
func TestTasksGateway(t *testing.T) {
	r := serveTasks(t, 2, on(hostA, 2))
	invitation := filepath.Join(t.TempDir(), "invitation")
	gateway := r.Subcommand(t.Context(), "tasks", "gateway", "--listen", "127.0.0.1:0", "--invitation", invitation)
	var said bytes.Buffer
	gateway.Stderr = &said
	if err := gateway.Start(); err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool {
		_, err := os.Stat(invitation)
		return err == nil
	}) {
		t.Fatal("there is no invitation")
	}
	n := sized(20_000, 3000)
	c := submitsBy(t, r, []string{"--invitation", invitation}, "-submit", fmt.Sprint(n), "-lasts", "200us")
	c.until(fmt.Sprintf("%d left", n-1000))
	next := killDriver(t, r)
	c.until(fmt.Sprintf("%d right", n))
	c.ends()
	stopJob(t, next)
	if err := gateway.Wait(); err != nil {
		t.Errorf("the gateway ended with %v: %s", err, said.String())
	}
}
