package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/hvdrun/hvdrun/internal/e2e"
	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// driverKiller kills hvdrun itself, and resumes it.
type driverKiller struct {
	left     int // kills to come
	killed   int
	limit    time.Duration // how soon a driver that is resumed must have the job; 0: whenever it may be
	controls e2e.Spread
}

// turn tells whether it is hvdrun's. The kills are spread over the job.
func (d *driverKiller) turn(k *killer) bool {
	if d.left == 0 || k.step == 0 {
		return false
	}
	due := float64(k.step) / float64(k.until) * float64(d.left+d.killed)
	return float64(d.killed) < due && k.dice.IntN(3) > 0
}

// killDriver kills hvdrun, perhaps a worker while there is none, and perhaps the next one before it
// has control.
func (k *killer) killDriver(ctx context.Context) error {
	k.endDriver()
	before := len(k.kills)
	for {
		if err := k.sleep(ctx, time.Duration(k.dice.ExpFloat64()*float64(50*time.Millisecond))); err != nil {
			return err
		}
		if k.dice.IntN(4) == 0 {
			k.strike()
		}
		began := time.Now()
		next, err := k.job.Resume()
		if err != nil {
			return err
		}
		k.job = next
		if k.drivers.left > 0 && k.dice.IntN(5) == 0 {
			if err := k.sleep(ctx, time.Duration(k.dice.ExpFloat64()*float64(10*time.Millisecond))); err != nil {
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

func (k *killer) sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// awaitControl blocks until the driver that was resumed then has said so, and has heard of the
// workers that were killed while there was none.
func (k *killer) awaitControl(ctx context.Context, began time.Time, deaths []kill) error {
	follower := diary.Follow[e2e.Event](k.job.EventsPath())
	missing := make(map[int]bool)
	for _, d := range deaths {
		missing[d.pid] = true
	}
	var control time.Time
	for {
		events, err := follower.Next()
		if err != nil {
			return err
		}
		for _, e := range events {
			switch {
			case e.Name == "worker_exited" && missing[e.PID]:
				delete(missing, e.PID)
			case e.Name == "resumed" && e.Time.After(began):
			default:
				continue
			}
			if e.Time.After(control) {
				control = e.Time
			}
		}
		if control.After(began) && len(missing) == 0 {
			k.drivers.controls = append(k.drivers.controls, control.Sub(began))
			return nil
		}
		select {
		case <-k.job.Ended():
			return nil // its exit status tells
		default:
		}
		if err := k.sleep(ctx, 2*time.Millisecond); err != nil {
			return err
		}
	}
}

// checkResumed checks that nobody has paid for the kills of hvdrun: all workers that ended before
// the job was done were killed, and every resume was as fast as is asked.
func (k *killer) checkResumed(res e2e.Result) error {
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
			// It came when the others had finished, or when its slot was not wanted any more.
		case e.Name == "worker_exited" && (e.Cause == "failed" || e.Cause == "left") && !k.seen[e.PID]:
			errs = append(errs, fmt.Errorf("nobody killed worker %d of %s: %s", e.PID, e.Host, e))
		}
	}
	ended := make(map[int]bool)
	for _, l := range res.Lines {
		ended[l.PID] = ended[l.PID] || l.Event == diary.End
	}
	for pid, well := range ended {
		if !well && !k.seen[pid] {
			errs = append(errs, fmt.Errorf("worker %d was in good health, and is missing in the end", pid))
		}
	}
	errs = append(errs, checkChatter(res.Output, k.drivers.killed))
	if c := k.drivers.controls.Quantile(1); k.drivers.limit > 0 && c > k.drivers.limit {
		errs = append(errs, fmt.Errorf("a driver had control only %v after it was resumed", c))
	}
	return errors.Join(errs...)
}

var chatter = regexp.MustCompile(`(?m)^\[\d+\]<stdout>:chatter of (\d+): line (\d+)$`)

// checkChatter checks that every line of every worker was passed on, and once, but for the last one
// before a kill, which the driver was about to note.
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
		return errors.New("no output of any worker was passed on")
	}
	return nil
}
