package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// driverKiller kills and resumes hvdrun itself.
type driverKiller struct {
	left     int // remaining kills
	killed   int
	limit    time.Duration // longest time until a resumed driver controls the job; 0: no limit
	controls report.Spread
}

// turn reports whether hvdrun is killed next. The kills are spread over the job.
func (d *driverKiller) turn(k *killer) bool {
	if d.left == 0 || k.job.Step == 0 {
		return false
	}
	due := float64(k.job.Step) / float64(k.until) * float64(d.left+d.killed)
	return float64(d.killed) < due && k.dice.IntN(3) > 0
}

// killDriver kills and resumes hvdrun. It may kill a worker while no driver runs, and the next
// driver before it has control.
func (k *killer) killDriver(ctx context.Context) error {
	k.endDriver()
	before := len(k.kills)
	for {
		if err := follow.Sleep(ctx, time.Duration(k.dice.ExpFloat64()*float64(50*time.Millisecond))); err != nil {
			return err
		}
		if k.dice.IntN(4) == 0 {
			k.strike()
		}
		began := time.Now()
		next, err := k.job.Resume("")
		if err != nil {
			return err
		}
		k.job = next
		if k.drivers.left > 0 && k.dice.IntN(5) == 0 {
			if err := follow.Sleep(ctx, time.Duration(k.dice.ExpFloat64()*float64(10*time.Millisecond))); err != nil {
				return err
			}
			k.endDriver()
			continue
		}
		return k.awaitControl(ctx, began, k.kills[before:])
	}
}

func (k *killer) endDriver() {
	k.drivers.left--
	k.drivers.killed++
	k.job.KillDriver()
}

// awaitControl blocks until the resumed driver has reported that it controls the job, and has
// reported the workers that were killed while there was no driver.
func (k *killer) awaitControl(ctx context.Context, began time.Time, deaths []kill) error {
	missing := make(map[int]bool)
	for _, d := range deaths {
		missing[d.pid] = true
	}
	var control time.Time
	seen := 0
	err := k.job.Until(ctx, "control of the resumed driver", func() bool {
		for _, e := range k.job.Events[seen:] {
			resumed := e.Name == "resumed" && e.Time.After(began)
			if (resumed || e.Name == "worker_exited" && missing[e.PID]) && e.Time.After(control) {
				control = e.Time
			}
			if e.Name == "worker_exited" {
				delete(missing, e.PID)
			}
		}
		seen = len(k.job.Events)
		return k.job.Over() || control.After(began) && len(missing) == 0 // check evaluates the exit status
	})
	if err == nil && control.After(began) && len(missing) == 0 {
		k.drivers.controls = append(k.drivers.controls, control.Sub(began))
	}
	return err
}

// checkResumed checks that kills of hvdrun had no effect: all workers that ended before the job was
// done had been killed, and every resume was within the limit.
func (k *killer) checkResumed(res follow.Result) error {
	var errs []error
	started := make(map[int]int)
	member := make(map[int]bool)
	for _, e := range res.Events {
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
	for _, l := range res.Lines {
		ended[l.PID] = ended[l.PID] || l.Event == steplog.End
	}
	for pid, well := range ended {
		if !well && !k.struck[pid] {
			errs = append(errs, fmt.Errorf("worker %d was not killed but is missing at the end", pid))
		}
	}
	errs = append(errs, checkChatter(res.Output, k.drivers.killed))
	if c := k.drivers.controls.Quantile(1); k.drivers.limit > 0 && c > k.drivers.limit {
		errs = append(errs, fmt.Errorf("a driver had control only %v after it was resumed", c))
	}
	return errors.Join(errs...)
}

var chatter = regexp.MustCompile(`(?m)^\[\d+\]<stdout>:chatter of (\d+): line (\d+)$`)

// checkChatter checks that every line of every worker was forwarded exactly once, except for the
// last line before a kill, which the driver may not have recorded.
func checkChatter(output string, kills int) error {
	lines, repeated := make(map[string]int), make(map[string]int)
	for _, m := range chatter.FindAllStringSubmatch(output, -1) {
		var n int
		fmt.Sscan(m[2], &n)
		worker, had := m[1], lines[m[1]]
		switch {
		case n == had+1:
			lines[worker] = n
		case n != had:
			return fmt.Errorf("worker %s: line %d of its output comes after line %d", worker, n, had)
		default:
			if repeated[worker]++; repeated[worker] > kills {
				return fmt.Errorf("worker %s: %d lines of its output came twice, after %d kills of hvdrun", worker, repeated[worker], kills)
			}
		}
	}
	if len(lines) == 0 {
		return errors.New("no output of any worker was forwarded")
	}
	return nil
}
