package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/internal/testbed/follow"
)

// Tasks on the workers of a job.

// startTasker starts a job whose workers run tasks.
func startTasker(t *testing.T, workers int) *Running {
	t.Helper()
	return start(t, Job{
		Flags: flags("-np", strconv.Itoa(workers), "--min-np", "1", "-H", on(hostA, workers), "--orphan-timeout", "10m",
			"--tasks-only"),
		Command: []string{binaries.Tasker},
	})
}

// submitter is a program that submits tasks. It must end well.
type submitter struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  *bufio.Scanner
	all  strings.Builder
	errs bytes.Buffer
}

func submits(t *testing.T, r *Running, args ...string) *submitter {
	t.Helper()
	c := &submitter{t: t, cmd: r.Subcommand(t.Context(), append([]string{"tasks", "run", binaries.Tasker}, args...)...)}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
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

// awaitWorkers blocks until so many workers of the job run tasks.
func awaitWorkers(t *testing.T, r *Running, n int) {
	t.Helper()
	if !follow.Poll(func() bool {
		out, _ := r.Subcommand(t.Context(), "tasks").Output()
		return strings.Count(string(out), "cpu=") >= n
	}) {
		t.Fatalf("there are not %d workers", n)
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

// TestTasksWorkerKilled: one of four workers is killed with thousands of tasks out.
func TestTasksWorkerKilled(t *testing.T) {
	r := startTasker(t, 4)
	awaitWorkers(t, r, 4)
	c := submits(t, r, "-submit", "10000", "-lasts", "500us")
	c.until("7000 left")
	pids := r.Processes()
	i := slices.IndexFunc(pids, func(pid int) bool { return follow.CommandLine(pid) == binaries.Tasker })
	if i < 0 {
		t.Fatal("no worker runs")
	}
	if err := syscall.Kill(pids[i], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.until("10000 right")
	c.ends()
	stopJob(t, r)
}

// TestTasksDriverKilled: the scheduler is killed with the driver, and another goes on.
func TestTasksDriverKilled(t *testing.T) {
	r := startTasker(t, 2)
	awaitWorkers(t, r, 2)
	c := submits(t, r, "-submit", "10000", "-lasts", "500us")
	c.until("7000 left")
	r.KillDriver()
	r, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	c.until("10000 right")
	c.ends()
	stopJob(t, r)
}

// TestTasksStored: large results and values go from worker to worker, outlive a worker that is
// killed and the driver, and leave nothing behind.
func TestTasksStored(t *testing.T) {
	r := startTasker(t, 3)
	awaitWorkers(t, r, 3)
	c := submits(t, r, "-size", "20000000", "-rounds", "4")
	c.until("read after")
	pids := r.Processes()
	i := slices.IndexFunc(pids, func(pid int) bool { return follow.CommandLine(pid) == binaries.Tasker })
	if i < 0 {
		t.Fatal("no worker runs")
	}
	if err := syscall.Kill(pids[i], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.until("made after")
	r.KillDriver()
	r, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	c.ends()
	stopJob(t, r)
}

// TestTasksClientKilled: tasks of a client that is killed with the driver are not lost.
func TestTasksClientKilled(t *testing.T) {
	r := startTasker(t, 2)
	awaitWorkers(t, r, 2)
	c := submits(t, r, "-submit", "5000", "-lasts", "2ms")
	c.until("4000 left")
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
	r.KillDriver()
	r, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	type status struct {
		Waiting, Ready, Running int
		Workers                 []struct{ Done int }
	}
	var s status
	if !follow.Poll(func() bool {
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
	if done < 3000 { // some ran before
		t.Errorf("%d tasks have run since", done)
	}
	stopJob(t, r)
}
