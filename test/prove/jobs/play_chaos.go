package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// playChaos kills workers of a job at random moments, asks some to leave, and kills hvdrun. The job
// must end like an undisturbed one.
func playChaos(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	j.flag("--commit-replicas", "1", "--log-level", "debug")
	j.worker("-chatter")
	var calm ending
	if t.Microbatches > 0 {
		j.worker(fmt.Sprintf("-balance=%t", t.dice.IntN(2) == 0))
		if calm, err = j.undisturbed(ctx); err != nil {
			return err
		}
	} else {
		j.worker("-local", "-commit-every", strconv.Itoa(1+t.dice.IntN(3)))
	}
	if err := j.start(); err != nil {
		return err
	}
	k := killer{job: j, until: t.Steps * 85 / 100, left: t.Drivers, struck: make(map[int]bool)}
	if err := k.run(ctx); err != nil {
		return err
	}
	if err := errors.Join(j.end(ctx), checkResets(j.Events), j.checkEnds(calm)); err != nil {
		return err
	}
	k.tell()
	if t.Drivers == 0 {
		return nil
	}
	return errors.Join(k.checkResumed(), j.checkChatter(k.killed))
}

// ending is a worker's final state.
type ending struct{ chain, digest string }

// undisturbed trains in a single process without hvdrun and returns its final state.
func (j *job) undisturbed(ctx context.Context) (ending, error) {
	path := filepath.Join(j.plan.Dir, "undisturbed")
	cmd := exec.CommandContext(ctx, j.trial.programs.Trainer, append(slices.Clone(j.plan.Trainer), "-log", path, "-step-time", "0")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return ending{}, fmt.Errorf("the undisturbed run: %w\n%s", err, out)
	}
	lines, err := steplog.Follow[steplog.Line](path).Next()
	if err != nil || len(lines) == 0 || lines[len(lines)-1].Event != steplog.End {
		return ending{}, fmt.Errorf("the undisturbed run did not finish: %w", err)
	}
	last := lines[len(lines)-1]
	return ending{last.Chain, last.Digest}, nil
}

// checkEnds checks that all workers of the last world have finished, with the given state unless
// that is empty.
func (j *job) checkEnds(with ending) error {
	ends, size := 0, 0
	for _, l := range j.Lines {
		if l.Event != steplog.End {
			continue
		}
		ends, size = ends+1, l.Size
		if got := (ending{l.Chain, l.Digest}); with.chain != "" && got != with {
			return fmt.Errorf("rank %d ended with %v, the undisturbed run with %v", l.Rank, got, with)
		}
	}
	if ends == 0 || ends != size {
		return fmt.Errorf("%d of the last world's %d workers finished", ends, size)
	}
	return nil
}

// checkResets checks that every reset leads to one world and has a cause: the end of a worker or a
// change of hosts.
func checkResets(events []follow.Event) error {
	resets, worlds, cause := 0, 0, false
	for _, e := range events {
		switch e.Name {
		case "reset":
			resets++
		case "worker_exited", "worker_dying", "hosts_updated":
			cause = true
		case "world_published":
			if worlds++; worlds != resets+1 {
				return fmt.Errorf("generation %d comes after %d resets", e.Generation, resets)
			}
			if worlds > 1 && !cause {
				return fmt.Errorf("generation %d comes without a cause", e.Generation)
			}
			cause = false
		}
	}
	return nil
}

// kill is a kill of a worker.
type kill struct {
	at         time.Time
	pid        int
	rank       int // -1: not in a world yet
	generation uint64
}

// killer kills workers of a running job, but always spares one with the job's state.
type killer struct {
	*job
	until  int          // the step after which nothing is killed
	struck map[int]bool // all processes killed or asked to leave so far
	kills  []kill
	asked  int
	// The number of kills of hvdrun that remain, the number so far, and the times until the next
	// driver had control of the job.
	left, killed int
	controls     report.Spread
}

// run kills until step until, or until the job has ended.
func (k *killer) run(ctx context.Context) error {
	dice := k.trial.dice
	for {
		pause := k.Pause
		if dice.IntN(3) == 0 {
			pause = 10 * time.Millisecond // the kill hits the recovery from the previous one
		}
		if more, err := k.wait(ctx, time.Duration(dice.ExpFloat64()*float64(pause))); !more {
			return err
		}
		// The kills of hvdrun are spread over the job.
		due := float64(k.Step) / float64(k.until) * float64(k.Drivers)
		if k.left > 0 && k.Step > 0 && float64(k.killed) < due && dice.IntN(3) > 0 {
			if err := k.killDriver(ctx); err != nil {
				return err
			}
			continue
		}
		k.hit()
		if dice.IntN(4) == 0 {
			k.hit()
		}
	}
}

// wait pauses, and reports whether the killing continues after that: it ends at step until.
func (k *killer) wait(ctx context.Context, pause time.Duration) (more bool, err error) {
	if err := follow.Sleep(ctx, pause); err != nil {
		return false, err
	}
	err = k.Look()
	return err == nil && !k.Over() && k.Step < k.until, err
}

// spare returns the processes that have not been killed.
func (k *killer) spare(pids []int) []int {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return k.struck[pid] })
}

// hit kills a worker or asks it to leave.
func (k *killer) hit() {
	dice, holders := k.trial.dice, k.spare(k.Holders())
	if k.Step == 0 || len(holders) == 0 {
		return
	}
	spared := holders[dice.IntN(len(holders))]
	victims := slices.DeleteFunc(k.spare(k.Alive), func(pid int) bool { return pid == spared })
	if len(victims) == 0 {
		return
	}
	pid := victims[dice.IntN(len(victims))]
	rank, ok := k.Ranks[pid]
	if !ok {
		rank = -1
	}
	how := syscall.SIGKILL
	if dice.Float64() < k.Ask {
		how = syscall.SIGTERM
	}
	at := time.Now()
	if syscall.Kill(pid, how) != nil {
		return // it has just ended
	}
	if k.struck[pid] = true; how == syscall.SIGTERM {
		k.asked++
		return
	}
	k.kills = append(k.kills, kill{at, pid, rank, k.Generation})
}

// tell adds the disturbances, and how long the job took to recover, to the case's findings.
func (k *killer) tell() {
	t := k.trial
	t.count("workers killed", len(k.kills))
	var recoveries report.Spread
	for i, x := range k.kills {
		switch {
		case x.rank == 0:
			t.count("of rank 0", 1)
		case x.rank < 0:
			t.count("newcomers", 1)
		}
		if i > 0 && x.at.Sub(k.kills[i-1].at) < 20*time.Millisecond {
			t.count("within 20 ms of another", 1)
		}
		at, first := x.at.UnixNano(), int64(0)
		for _, l := range k.Lines {
			if l.Event == steplog.Step && l.Generation > x.generation && l.Time > at && (first == 0 || l.Time < first) {
				first = l.Time
			}
		}
		if x.rank >= 0 && first > 0 {
			recoveries = append(recoveries, time.Duration(first-at))
		}
	}
	t.count("asked to leave", k.asked)
	t.count("resets", k.Count("reset"))
	t.count("kills of hvdrun", k.killed)
	t.timed("From a member's death to the next completed step in a later world, further deaths in between included:",
		report.Row{Name: "recovery", Spread: recoveries})
	if k.killed > 0 {
		t.timed("From the start of hvdrun resume to control of the job:", report.Row{Name: "resume", Spread: k.controls})
	}
}

// killDriver kills and resumes hvdrun. It can kill a worker while no driver runs, and the next
// driver before it has control.
func (k *killer) killDriver(ctx context.Context) error {
	dice, before := k.trial.dice, len(k.kills)
	k.endDriver()
	for {
		if err := follow.Sleep(ctx, time.Duration(dice.ExpFloat64()*float64(50*time.Millisecond))); err != nil {
			return err
		}
		if dice.IntN(4) == 0 {
			k.hit()
		}
		began := time.Now()
		next, err := k.Resume("")
		if err != nil {
			return err
		}
		k.Running = next
		if k.left == 0 || dice.IntN(5) > 0 {
			return k.awaitControl(ctx, began, k.kills[before:])
		}
		if err := follow.Sleep(ctx, time.Duration(dice.ExpFloat64()*float64(10*time.Millisecond))); err != nil {
			return err
		}
		k.endDriver()
	}
}

func (k *killer) endDriver() {
	k.left--
	k.killed++
	k.KillDriver()
}

// awaitControl blocks until the resumed driver has reported that it controls the job, and has
// reported the workers that were killed without a driver.
func (k *killer) awaitControl(ctx context.Context, began time.Time, deaths []kill) error {
	missing := make(map[int]bool)
	for _, d := range deaths {
		missing[d.pid] = true
	}
	var control time.Time
	seen := 0
	has := func() bool { return control.After(began) && len(missing) == 0 }
	err := k.Until(ctx, "control of the resumed driver", func() bool {
		for _, e := range k.Events[seen:] {
			resumed := e.Name == "resumed" && e.Time.After(began)
			if (resumed || e.Name == "worker_exited" && missing[e.PID]) && e.Time.After(control) {
				control = e.Time
			}
			if e.Name == "worker_exited" {
				delete(missing, e.PID)
			}
		}
		seen = len(k.Events)
		return k.Over() || has() // the end of the job is checked later
	})
	if err == nil && has() {
		k.controls = append(k.controls, control.Sub(began))
	}
	return err
}

// checkResumed checks that kills of hvdrun had no effect: all workers that ended before the job was
// done had been killed.
func (k *killer) checkResumed() error {
	var errs []error
	started := make(map[int]int)
	member := make(map[int]bool)
	for _, e := range k.Events {
		for _, slot := range e.Slots {
			member[slot.PID] = true
		}
		switch {
		case e.Name == "worker_started":
			if started[e.PID]++; started[e.PID] > 1 {
				errs = append(errs, fmt.Errorf("worker %d was started twice", e.PID))
			}
		case e.Name == "worker_exited" && e.Cause == "left" && e.Code == 0 && !member[e.PID]:
			// It started when the others had finished, or when its slot was no longer wanted.
		case e.Name == "worker_exited" && (e.Cause == "failed" || e.Cause == "left") && !k.struck[e.PID]:
			errs = append(errs, fmt.Errorf("worker %d of %s ended but was not killed: %s", e.PID, e.Host, e))
		}
	}
	ended := make(map[int]bool)
	for _, l := range k.Lines {
		ended[l.PID] = ended[l.PID] || l.Event == steplog.End
	}
	for pid, well := range ended {
		if !well && !k.struck[pid] {
			errs = append(errs, fmt.Errorf("worker %d was not killed but is missing at the end", pid))
		}
	}
	return errors.Join(errs...)
}

// checkChatter checks that every line of every worker was forwarded exactly once, except for the
// last line before a kill of hvdrun, which hvdrun may not have recorded.
func (j *job) checkChatter(kills int) error {
	f, err := os.Open(j.OutputPath())
	if err != nil {
		return err
	}
	defer f.Close()
	lines, err := countLines(f, "chatter", kills, func(int) {})
	if err == nil && len(lines) == 0 {
		err = errors.New("no output of any worker was forwarded")
	}
	return err
}
