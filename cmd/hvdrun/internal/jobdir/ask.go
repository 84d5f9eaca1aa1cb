package jobdir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/job"
)

// WhichJob is the help of the commands' first argument.
const WhichJob = `JOB is the job's run id, the beginning of it, its name (--name), or the path of its folder. It may be left out if exactly one job runs.`

// TheJob returns the job with the given name (see Find). If name is empty, it returns the only
// running job, or if no job runs, the only job whose driver is gone and that can be resumed, or
// else the only other job whose driver is gone.
func TheJob(env []string, name string) (*Dir, error) {
	if name != "" {
		return Find(env, name)
	}
	all, _, err := List(env)
	if err != nil {
		return nil, err
	}
	var running, left, dead []*Dir
	for _, d := range all {
		switch is, err := journal.Locked(d.Journal()); {
		case err != nil && !errors.Is(err, fs.ErrNotExist) || d.About.Ended != nil:
		case is:
			running = append(running, d)
		case d.KeyLost() == nil:
			left = append(left, d)
		default:
			dead = append(dead, d)
		}
	}
	switch {
	case len(running) > 0:
		left = running
	case len(left) == 0 && len(dead) == 1: // its status says more than an error that no job runs
		left = dead
	}
	switch len(left) {
	case 0:
		return nil, errors.New("no job runs; `hvdrun jobs` lists earlier ones")
	case 1:
		return left[0], nil
	}
	var which strings.Builder
	for _, d := range left {
		fmt.Fprintf(&which, "\n  %s  begun %s  %s", d.About.RunID, d.About.Begun.Local().Format(time.DateTime), show.ShortCommand(d.About.Command))
	}
	return nil, fmt.Errorf("which of the jobs?%s", which.String())
}

// NoDriverError reports that a job exists but has no driver.
type NoDriverError struct {
	job   string
	Ended bool
}

func (e *NoDriverError) Error() string {
	if e.Ended {
		return fmt.Sprintf("job %s has ended", e.job)
	}
	return fmt.Sprintf("job %s has no driver: hvdrun resume %s", e.job, e.job)
}

// NoDriver returns the error of a job that has no driver.
func (d *Dir) NoDriver() error { return &NoDriverError{d.About.RunID, d.About.Ended != nil} }

// Stopped returns an error if the job's driver is a stopped process (SIGSTOP), which answers no
// calls.
func (d *Dir) Stopped(ctx context.Context) error {
	driver, err := wire.LocalServer(ctx, d.ControlPath())
	if err != nil {
		return nil // the caller's own call reports a better error
	}
	if !proc.Stopped(driver.PID) {
		return nil
	}
	return fmt.Errorf("job %s does not answer: its hvdrun, process %d, is stopped (SIGSTOP, or Ctrl-Z in its terminal); kill -CONT %[2]d continues it",
		d.About.RunID, driver.PID)
}

// Ask calls the job's driver, and returns its answer. It retries for a moment while the driver is
// starting. It returns a *NoDriverError if the job has no driver.
func Ask[T any](ctx context.Context, d *Dir, call func(*control.Client) (T, error)) (answer T, err error) {
	const moment, pause = 3 * time.Second, 20 * time.Millisecond
	client, err := control.Dial(d.ControlPath())
	if err != nil {
		return answer, err
	}
	defer client.Close()
	if err := d.Stopped(ctx); err != nil {
		return answer, err
	}
	for begin := time.Now(); ; {
		running, unread := journal.Locked(d.Journal())
		if unread == nil && !running {
			job, err := d.Inspect()
			return answer, &NoDriverError{d.About.RunID, d.About.Ended != nil || err == nil && job.Finished}
		}
		answer, err = call(client)
		switch {
		case !errors.Is(err, control.ErrNoDriver):
			return answer, err
		case unread != nil: // the driver may have stopped writing its journal, or something else has its name
			return answer, d.NoDriver()
		case time.Since(begin) > moment:
			return answer, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return answer, context.Cause(ctx)
		}
	}
}

// Command makes the job's driver carry out a command, and returns what it has done. Its errors are
// those of Ask.
func (d *Dir) Command(ctx context.Context, c job.Command) (done string, err error) {
	return Ask(ctx, d, func(driver *control.Client) (string, error) { return driver.Command(ctx, c) })
}

// A child process that a driver had just forked when it was killed holds the driver's lock until it
// executes its program, so a caller tries the lock LockTries times, with a pause of LockPause.
const (
	LockTries = 20
	LockPause = 50 * time.Millisecond
)

// withoutDriver is the message of a job that has ended although its journal does not record the
// end.
const withoutDriver = "stopped without its driver"

// driverLeaves is the pause between two checks whether the driver of an ended job has exited.
const driverLeaves = 20 * time.Millisecond

// Status returns the status that the driver reports or, if the job has no driver, the status in the
// journal. A driver refuses only if its job has just ended; Status then waits until the driver has
// exited and reads the complete journal.
func (d *Dir) Status(ctx context.Context) (s job.Status, err error) {
	for {
		s, err = Ask(ctx, d, func(driver *control.Client) (job.Status, error) { return driver.Status(ctx) })
		if _, none := errors.AsType[*NoDriverError](err); none {
			s, err = driver.InspectStatus(d.Journal())
			if err == nil && d.About.Ended != nil && !s.State.Ended() {
				s.State, s.Stopped, s.Message = job.Failed, true, withoutDriver
				s.Size, s.Hosts, s.Waits = 0, nil, nil
			}
			return s, err
		}
		if _, refused := errors.AsType[*job.RefusedError](err); !refused {
			return s, err
		}
		pause := time.NewTimer(driverLeaves)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return s, context.Cause(ctx)
		}
	}
}
