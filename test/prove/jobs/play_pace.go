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

// calmSteps is the number of steps by which the pace of an undisturbed job is measured, at most.
const calmSteps = 300

// playPace trains by elastic.Steps while, at a fixed rate, workers are killed, asked to leave, or
// stopped by SIGSTOP for a moment. It measures which share of the pace of an undisturbed job is
// left; the weights at the end must be those of an undisturbed process.
func playPace(ctx context.Context, t *trial) error {
	usual, err := t.calmPace(ctx)
	if err != nil {
		return err
	}
	j, err := t.job()
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
	stops, err := k.disturb(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(j.end(ctx), j.checkEnds(calm)); err != nil {
		return err
	}
	k.tell()
	t.count("stopped for a moment", stops)
	step, steps, took := pace(j.Lines)
	t.timed("A step", report.Row{Name: "undisturbed", Spread: report.Spread{usual}}, report.Row{Name: "disturbed", Spread: report.Spread{step}})
	t.note("%d steps in %v, %.1f %% of the undisturbed pace, the same weights", steps, took.Round(time.Millisecond), 100*float64(usual)/float64(step))
	return nil
}

// calmPace returns the mean time of a step of a job to which nothing happens.
func (t *trial) calmPace(ctx context.Context) (time.Duration, error) {
	j, err := t.job()
	if err != nil {
		return 0, err
	}
	if err := j.apart("calm"); err != nil {
		return 0, err
	}
	j.setup.Steps = min(t.Steps, calmSteps)
	j.worker("-steps", fmt.Sprint(j.setup.Steps))
	if err := j.start(); err != nil {
		return 0, err
	}
	if err := j.end(ctx); err != nil {
		return 0, err
	}
	step, _, _ := pace(j.Lines)
	return step, nil
}

// pace returns the mean time from one step to the next, from the first that any worker has applied
// to the last, their number and the time of all.
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

// disturb does something to a worker after each pause, until step until, or until the job has
// ended. It returns how often it has stopped one.
func (k *killer) disturb(ctx context.Context) (stops int, err error) {
	dice := k.trial.dice
	for next := time.Now().Add(k.Pause); ; next = next.Add(k.Pause) {
		if more, err := k.wait(ctx, time.Until(next)); !more {
			return stops, err
		}
		holders := k.Holders()
		if k.How != "stop" && (k.How != "mix" || dice.IntN(2) == 0) || len(holders) == 0 {
			k.hit()
			continue
		}
		pid := holders[dice.IntN(len(holders))]
		if syscall.Kill(pid, syscall.SIGSTOP) != nil {
			continue // it has just ended
		}
		stops++
		err := follow.Sleep(ctx, min(time.Second, k.Pause/2))
		_ = syscall.Kill(pid, syscall.SIGCONT) // it may have been given up meanwhile
		if err != nil {
			return stops, err
		}
	}
}
