package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// gateSteps is the number of steps between two gates of the training.
const gateSteps = 8

// elasticJob is a job that asks a real Slurm for its nodes.
type elasticJob struct {
	*cluster
	*follow.Running
	t       *testing.T
	hvdrun  string
	started time.Time
}

// TestElasticJob runs examples/slurm on a real Slurm with two nodes, one of which another job has.
// The job begins with one node, grows when the other one is free, is preempted there by a job of
// higher priority, and gets the node again. Its driver is killed and resumed. It gives the node
// back, asks for it again, continues when its oldest allocation ends, and is done. The grace period
// of a preemption is ten minutes: a drain at its end would be too late for the test. It takes half
// a minute.
func TestElasticJob(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute with a real Slurm: make check-slurm")
	}
	c := startCluster(t, 2)
	const steps = 64
	high := c.allocate("--partition=high", "--exclusive", "--nodelist=n2")
	j := c.runElastic(steps, []string{"sh"}, "grown", "preempted", "back", "killed", "shrunk", "ended", "replaced")
	j.size(1, "world of 1, as another job has the other node")
	c.do("scancel", high)
	j.say("the other job has ended")
	j.size(2, "grown")
	j.open("grown")

	j.say("a job of higher priority comes")
	high = c.allocate("--partition=high", "--exclusive", "--nodelist="+j.youngest())
	j.say("the job of higher priority has the node")
	j.size(1, "preempted and drained")
	j.open("preempted")
	c.do("scancel", high)
	j.say("the job of higher priority has ended")
	j.size(2, "grown again")
	j.open("back")

	worlds := j.Count("world_published")
	j.killDriver()
	j.until("another driver goes on", func() bool { return j.Count("resumed") == 1 })
	j.say("another driver goes on")
	j.open("killed")
	j.until("steps under it", func() bool { return j.Step == 5*gateSteps })
	if n := j.Count("world_published"); n != worlds {
		t.Errorf("%d worlds, want %d: the workers have noticed the driver's end", n, worlds)
	}

	j.scale("1")
	j.size(1, "drained")
	j.open("shrunk")
	j.await("the node to be given back", func() bool { return len(j.jobs()) == 1 })
	j.say("given back")
	j.scale("2")
	j.size(2, "grown once more")
	oldest := j.jobs()[0]
	c.do("scancel", oldest)
	j.say("the oldest allocation is cancelled")
	j.open("ended")
	gone := func(slot follow.Slot) bool { return strings.HasSuffix(slot.Host, "-"+oldest) }
	j.world("another allocation is there in its place", func() bool {
		return j.World.Size == 2 && !slices.ContainsFunc(j.World.Slots, gone)
	})
	j.open("replaced")

	j.finish(steps)
}

// TestDriverInJob runs the same scripts by sbatch: the driver is itself in a job of one node, has
// an agent there, and asks for one more node, which it gives back and gets again.
func TestDriverInJob(t *testing.T) {
	if testing.Short() {
		t.Skip("some seconds with a real Slurm: make check-slurm")
	}
	c := startCluster(t, 2)
	const steps = 32
	j := c.runElastic(steps, []string{"sbatch", "--wait", "--partition=high", "--nodelist=n1", "--output=" + c.path("driver.out")},
		"both", "shrunk", "grown")
	driver := ""
	j.await("the driver's job", func() bool {
		driver = strings.TrimSpace(j.do("squeue", "--noheader", "--partition=high", "--format=%A"))
		return driver != ""
	})
	own := func(slot follow.Slot) bool { return slot.Host == "n1-"+driver }
	j.world("a world of 2, on the driver's node and another", func() bool {
		return j.World.Size == 2 && slices.ContainsFunc(j.World.Slots, own) && len(j.jobs()) == 1
	})
	j.open("both")
	j.scale("1")
	j.await("the other node to be given back", func() bool { return len(j.jobs()) == 0 })
	j.world("a world of 1, on the driver's node", func() bool { return j.World.Size == 1 && own(j.World.Slots[0]) })
	j.open("shrunk")
	j.scale("2")
	j.size(2, "grown again")
	j.open("grown")
	j.finish(steps)
	j.await("the driver's job to end", func() bool {
		return j.do("squeue", "--noheader", "--states=all", "--partition=high", "--format=%T") == "COMPLETED\n"
	})
}

// finish waits until the job is done and has given back all nodes, and checks its results.
func (j *elasticJob) finish(steps int) {
	t := j.t
	t.Helper()
	res, err := j.Wait()
	if err != nil || res.Status != 0 || res.Hung {
		t.Fatalf("status %d, %v\n%s", res.Status, err, res.Story())
	}
	j.say("done")
	j.await("all to be given back", func() bool { return len(j.jobs()) == 0 })
	j.say("all given back")
	if err := steplog.Check(res.Lines, steps, steplog.Size); err != nil {
		t.Errorf("%v\n%s", err, res.Story())
	}
	for _, e := range res.Events {
		switch e.Name {
		case "hosts_found", "worker_started", "worker_exited", "world_published", "resumed", "scaled", "job_done":
			t.Logf("%6.1f s  %v", e.Time.Sub(j.started).Seconds(), e)
		}
		if e.Name == "worker_exited" && e.Cause == "failed" {
			t.Errorf("a worker has failed: %v", e)
		}
	}
	if t.Failed() {
		t.Log(res.Story())
	}
}

// runElastic starts the job by examples/slurm/train.sh, which the command run executes. The
// training stops at the gates.
func (c *cluster) runElastic(steps int, run []string, gates ...string) *elasticJob {
	t := c.t
	t.Helper()
	train, err := filepath.Abs("../../examples/slurm/train.sh")
	if err != nil {
		t.Fatal(err)
	}
	bin, home := c.path("bin"), c.path("home")
	for _, dir := range []string{bin, home, c.path("job")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	programs, err := follow.Build(t.Context(), bin)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", home)                                                  // the job's key is there
	script := fmt.Sprintf("#!/bin/sh\nshift\nexec sh '%s' \"$@\"\n", train) // hvdrun's path is in HVDRUN, not among the arguments
	if err := os.WriteFile(c.path("driver"), []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	trainer := []string{"-steps", fmt.Sprint(steps), "-step-time", "2ms"}
	for i, gate := range gates {
		trainer = append(trainer, "-gate", fmt.Sprintf("%d=%s", gateSteps*(i+1), gate))
	}
	j := &elasticJob{cluster: c, t: t, hvdrun: programs.Hvdrun, started: time.Now()}
	j.Running, err = programs.Start(follow.Job{
		Dir: c.path("job"), Wrap: append(run, c.path("driver")), Still: time.Until(sandbox.Limit()), Trainer: trainer,
		Flags: []string{
			"-np", "1", "--max-np", "2", "--log-level", "info", "--gossip-advertise", "127.0.0.1", "--slurm-args", "--partition=low --cpus-per-task=4",
			"--discovery-plugin", c.plugin(), "--discovery-config", "interval=500ms",
		},
		Env: []string{"HVDRUN=" + programs.Hvdrun, "SBATCH_OUTPUT=" + c.path("agent-%j.out")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the cluster is stopped
		if !j.Over() {
			j.Kill()
		}
		if t.Failed() {
			files, _ := filepath.Glob(c.path("home/.hvdrun-*/job/slurm/*.out"))
			more, _ := filepath.Glob(c.path("*-*.out"))
			files = append(append(files, more...), c.path("driver.out"))
			for _, f := range append(files, j.OutputPath(), j.EventsPath()) {
				text, _ := os.ReadFile(f)
				t.Logf("%s:\n%s", filepath.Base(f), text)
			}
			out, _ := exec.Command("squeue").Output()
			t.Logf("%s", out)
		}
	})
	j.say("submitted")
	return j
}

// say logs an event and the time since the start.
func (j *elasticJob) say(what string) {
	j.t.Logf("%6.1f s  %s", time.Since(j.started).Seconds(), what)
}

// size waits for a world of n workers.
func (j *elasticJob) size(n int, what string) {
	j.t.Helper()
	j.world(what, func() bool { return j.World.Size == n })
}

// world waits for a world, and logs when it was published.
func (j *elasticJob) world(what string, holds func() bool) {
	j.t.Helper()
	j.until(what, holds)
	j.t.Logf("%6.1f s  %s", j.World.Time.Sub(j.started).Seconds(), what)
}

func (j *elasticJob) until(what string, holds func() bool) {
	j.t.Helper()
	if err := j.Until(j.t.Context(), what, holds); err != nil {
		j.t.Fatal(err)
	}
}

// open lets the training pass a gate.
func (j *elasticJob) open(gate string) {
	j.t.Helper()
	if err := os.WriteFile(filepath.Join(j.Dir, gate), nil, 0o600); err != nil {
		j.t.Fatal(err)
	}
}

// scale sets the job's largest number of workers.
func (j *elasticJob) scale(most string) {
	j.t.Helper()
	if out, err := j.Subcommand(j.t.Context(), "scale", "--max-np", most, j.folder()).CombinedOutput(); err != nil {
		j.t.Fatalf("%v\n%s", err, out)
	}
	j.say("bound set to " + most)
}

// folder returns the job's folder, which train.sh has created.
func (j *elasticJob) folder() string {
	j.t.Helper()
	found, err := filepath.Glob(j.path("home/.hvdrun-*/job"))
	if err != nil || len(found) != 1 {
		j.t.Fatalf("the job's folders: %q, %v", found, err)
	}
	return found[0]
}

// killDriver kills hvdrun but not the script that runs it.
func (j *elasticJob) killDriver() {
	j.t.Helper()
	for _, pid := range j.Processes() {
		if strings.HasPrefix(follow.CommandLine(pid), j.hvdrun+" --slurm ") {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				j.t.Fatal(err)
			}
			j.say("the driver is killed")
			return
		}
	}
	j.t.Fatal("there is no driver")
}

// jobs returns the jobs of agents, oldest first.
func (j *elasticJob) jobs() []string {
	j.t.Helper()
	return strings.Fields(j.do("squeue", "--noheader", "--sort=i", "--partition=low", "--format=%A"))
}

// youngest returns the node of the youngest job.
func (j *elasticJob) youngest() string {
	j.t.Helper()
	nodes := strings.Fields(j.do("squeue", "--noheader", "--sort=i", "--partition=low", "--states=RUNNING", "--format=%N"))
	return nodes[len(nodes)-1]
}
