package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// calmSteps is the largest number of steps over which the pace of an undisturbed job is measured.
const calmSteps = 300

// playPace trains with elastic.Steps while, at a fixed rate, workers are killed, asked to leave, or
// stopped by SIGSTOP for a moment, and, in a cluster, hosts are cut off for a moment. It measures
// the fraction of an undisturbed job's pace that is left; the weights at the end must be those of
// an undisturbed process.
func playPace(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	var on *cluster // nil: this machine alone
	if t.How == "faults" {
		if on, err = j.cluster(ctx); err != nil {
			return err
		}
		on.have(j)
	}
	usual, err := t.calmPace(ctx, on)
	if err != nil {
		return err
	}
	calm, err := j.undisturbed(ctx)
	if err != nil {
		return err
	}
	if err := j.train(ctx, 1); err != nil {
		return err
	}
	if err := j.full(ctx, 0); err != nil {
		return err
	}
	k := killer{job: j, until: t.Steps * 95 / 100, struck: make(map[int]bool)}
	if err := k.disturb(ctx, on); err != nil {
		return err
	}
	if err := errors.Join(j.endOn(ctx, on), j.checkEnds(calm)); err != nil {
		return err
	}
	k.tell()
	step, steps, took := pace(j.Lines)
	t.timed("A step", report.Row{Name: "undisturbed", Spread: report.Spread{usual}}, report.Row{Name: "disturbed", Spread: report.Spread{step}})
	t.note("%d steps in %v, %.1f %% of the undisturbed pace, the same weights", steps, took.Round(time.Millisecond), 100*float64(usual)/float64(step))
	return nil
}

// calmPace returns the mean time of a step of an undisturbed job.
func (t *trial) calmPace(ctx context.Context, on *cluster) (time.Duration, error) {
	j, err := t.job()
	if err != nil {
		return 0, err
	}
	if on != nil {
		on.have(j)
	}
	if err := j.apart("calm"); err != nil {
		return 0, err
	}
	j.setup.Steps = min(t.Steps, calmSteps)
	j.worker("-steps", fmt.Sprint(j.setup.Steps))
	if err := j.start(); err != nil {
		return 0, err
	}
	if err := j.endOn(ctx, on); err != nil {
		return 0, err
	}
	step, _, _ := pace(j.Lines)
	return step, nil
}

// endOn waits for the end of a job on a cluster, or on this machine alone.
func (j *job) endOn(ctx context.Context, on *cluster) error {
	if on != nil {
		return j.endAmong(ctx, 0)
	}
	return j.end(ctx)
}

// pace returns the mean time from one step to the next, from the first to the last that any worker
// has applied, their number, and the total time.
func pace(lines []steplog.Line) (step time.Duration, steps int, all time.Duration) {
	first := make(map[int]int64) // when a step was first applied
	from, to := int64(0), int64(0)
	for _, l := range lines {
		if l.Event != steplog.Step {
			continue
		}
		if at, known := first[l.Step]; !known || l.Time < at {
			first[l.Step] = l.Time
		}
	}
	for _, at := range first {
		if from == 0 || at < from {
			from = at
		}
		to = max(to, at)
	}
	all = time.Duration(to - from)
	return all / time.Duration(max(1, len(first)-1)), len(first), all
}

// disturb disturbs a worker, or a host of the cluster, after each pause, until step until or the
// end of the job.
func (k *killer) disturb(ctx context.Context, on *cluster) error {
	ways := map[string][]func() error{
		"kill": {k.strikeOne}, "mix": {k.strikeOne, k.stopOne(ctx)}, "stop": {k.stopOne(ctx)},
		"faults": {k.strikeOne, k.stopOne(ctx), k.cutOne(ctx, on)},
	}[k.How]
	for next := time.Now().Add(k.Pause); ; next = next.Add(k.Pause) {
		if more, err := k.wait(ctx, time.Until(next)); !more {
			return err
		}
		if err := ways[k.trial.dice.IntN(len(ways))](); err != nil {
			return err
		}
	}
}

func (k *killer) strikeOne() error { k.hit(); return nil }

// stopOne stops a member for at most a second. The job may have given it up by then.
func (k *killer) stopOne(ctx context.Context) func() error {
	return func() error {
		holders := k.Holders()
		if len(holders) == 0 {
			return nil
		}
		pid := holders[k.trial.dice.IntN(len(holders))]
		if syscall.Kill(pid, syscall.SIGSTOP) != nil {
			return nil // it has just ended
		}
		k.trial.count("stopped for a moment", 1)
		err := follow.Sleep(ctx, min(time.Second, k.Pause/2))
		_ = syscall.Kill(pid, syscall.SIGCONT)
		return err
	}
}

// cutOne disconnects a host for longer than the others need to notice.
func (k *killer) cutOne(ctx context.Context, on *cluster) func() error {
	return func() error {
		host := on.hosts[k.trial.dice.IntN(k.setup.Hosts)]
		k.trial.count("hosts cut off", 1)
		return errors.Join(on.cable(host, "down"), follow.Sleep(ctx, 5*time.Second), on.cable(host, "up"))
	}
}
