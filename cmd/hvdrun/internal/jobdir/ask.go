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
const WhichJob = `JOB is the job's run id, the beginning of it, its name (--name), or the path of its folder, and may be left out where exactly one job runs.`

// TheJob returns the job that a person means, which is the only one that runs where nothing is
// said; where none runs, the only one whose driver is gone, if possible one that can be resumed.
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
	case len(left) == 0 && len(dead) == 1: // what can be told of it is more than that no job runs
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

// NoDriverError reports that a job is there, and no driver of it.
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

// Stopped returns an error where its driver is a process that is stopped, and so answers nobody.
func (d *Dir) Stopped(ctx context.Context) error {
	driver, err := wire.LocalServer(ctx, d.ControlPath())
	if err != nil {
		return nil // what is asked of it says more
	}
	if _, state, err := proc.Born(driver.PID); err != nil || state != 'T' && state != 't' {
		return nil
	}
	return fmt.Errorf("job %s does not answer: its hvdrun, process %d, is stopped (SIGSTOP, or Ctrl-Z in its terminal); kill -CONT %[2]d lets it go on",
		d.About.RunID, driver.PID)
}

// Ask calls its driver. One that has just begun gets a moment until it answers.
func (d *Dir) Ask(ctx context.Context, call func(*control.Client) error) error {
	const moment, pause = 3 * time.Second, 20 * time.Millisecond
	client, err := control.Dial(d.ControlPath())
	if err != nil {
		return err
	}
	defer client.Close()
	if err := d.Stopped(ctx); err != nil {
		return err
	}
	for begin := time.Now(); ; {
		switch running, err := journal.Locked(d.Journal()); {
		case errors.Is(err, fs.ErrNotExist): // its driver may have given it up
			if err := call(client); !errors.Is(err, control.ErrNoDriver) {
				return err
			}
			return d.NoDriver()
		case err != nil:
			return err
		case !running:
			job, err := d.Inspect()
			return &NoDriverError{d.About.RunID, d.About.Ended != nil || err == nil && job.Finished}
		}
		err := call(client)
		if !errors.Is(err, control.ErrNoDriver) || time.Since(begin) > moment {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// A process that a driver was starting when it was killed has its lock until it runs its program.
const (
	LockTries = 20
	LockPause = 50 * time.Millisecond
)

// withoutDriver is how a job has ended whose journal does not have the end.
const withoutDriver = "stopped without its driver"

// driverLeaves is the pause between looks whether a driver whose job has ended is gone.
const driverLeaves = 20 * time.Millisecond

// Status asks the driver, or, without a driver, the journal. A driver refuses only when its job has
// just ended; then it is gone in a moment, and the journal has it all.
func (d *Dir) Status(ctx context.Context) (s job.Status, err error) {
	for {
		err = d.Ask(ctx, func(driver *control.Client) (err error) {
			s, err = driver.Status(ctx)
			return err
		})
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
