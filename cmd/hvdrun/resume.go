package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/journal"
)

func (p *program) resumeCommand() *cobra.Command {
	var flags resumeFlags
	cmd := &cobra.Command{
		Use:   "resume [JOB]",
		Short: "Go on with a job whose driver has died",
		Long: `resume takes over a job whose hvdrun has died, by whatever way: its workers have gone on training meanwhile, kept by
their agents for the time of --orphan-timeout, and none of them is started again. All settings are those of the job, and so
are the environment and the working directory; what workers print goes to where resume was started. JOB is the job's run id,
the beginning of it, or the path of its folder; hvdrun jobs lists them. It may be left out where one job can be resumed.

With --journal the job is one that was begun with the same --journal and --journal-key-file, on any machine: this one needs the
job's working directory, its sources of hosts and a way to its hosts. With --standby it waits for the end of the job's driver.`,
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.check(); err != nil {
				return err
			}
			if flags.journal.url != "" {
				return p.resumeFromCopy(cmd.Context(), flags, strings.Join(args, ""))
			}
			find := resumableJob
			if len(args) > 0 {
				find = func(env []string) (*jobDir, error) { return findJob(env, args[0]) }
			}
			d, err := find(p.env)
			if err != nil {
				return err
			}
			return p.resumeJob(cmd.Context(), d)
		},
	}
	flags.add(cmd)
	return cmd
}

// resumableJob returns the only job that can be resumed.
func resumableJob(env []string) (*jobDir, error) {
	all, _, err := listJobs(env)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(d *jobDir) bool { return d.about.Ended != nil || d.line().State != jobResumable })
	switch len(all) {
	case 0:
		return nil, errors.New("no job can be resumed; `hvdrun jobs` lists those there are")
	case 1:
		return all[0], nil
	}
	names := make([]string, len(all))
	for i, d := range all {
		names[i] = d.about.RunID
	}
	return nil, fmt.Errorf("which of the jobs? %s", strings.Join(names, " "))
}

// resumeJob goes on with a job, as it was begun.
func (p *program) resumeJob(ctx context.Context, d *jobDir) error {
	if d.about.Ended != nil {
		return workFailed(fmt.Errorf("job %s: %w, at %s", d.about.RunID, job.ErrFinished, d.about.Ended.Format(time.DateTime)))
	}
	if running, err := isDriven(ctx, d); err != nil {
		return workFailed(fmt.Errorf("job %s cannot be resumed: %w", d.about.RunID, err))
	} else if running {
		return workFailed(fmt.Errorf("job %s needs no other driver: its own is running", d.about.RunID))
	}
	return p.resumeClaimed(ctx, d, nil)
}

// A process that a driver was starting when it was killed has its lock until it runs its program.
const (
	lockTries = 20
	lockPause = 50 * time.Millisecond
)

// isDriven reports whether a job has a driver on this machine.
func isDriven(ctx context.Context, d *jobDir) (running bool, err error) {
	for range lockTries {
		if running, err = journal.Locked(d.journal()); err != nil || !running {
			return running, err
		}
		select {
		case <-time.After(lockPause):
		case <-ctx.Done():
			return running, ctx.Err()
		}
	}
	return running, nil
}

// resumeClaimed goes on with a job that no other driver of this machine has. c is the claim to a
// job that was taken from its copy; nil: from its folder.
func (p *program) resumeClaimed(ctx context.Context, d *jobDir, c *claimed) error {
	if err := os.Chdir(d.about.Dir); err != nil {
		return workFailed(fmt.Errorf("the job's working directory: %w", err))
	}
	fs := pflag.NewFlagSet("hvdrun", pflag.ContinueOnError)
	fs.SetInterspersed(false)
	fs.SetOutput(io.Discard)
	addFlags(fs, false)
	j := jobRun{command: d.about.Command, dir: d, resumed: true}
	var err error
	if j.authority, j.known, err = d.open(p.env); err != nil {
		return workFailed(fmt.Errorf("job %s cannot be resumed: %w", d.about.RunID, err))
	}
	if err := d.moved(); err != nil {
		p.logger(&settings{outputSettings: outputSettings{logLevel: logrus.WarnLevel}}).WithError(err).Warn("job.json is not in order")
	}
	launch := d.secrets.launch
	if err := fs.Parse(launch.Args); err != nil {
		return err
	}
	again := *p
	again.args, again.env = launch.Args, launch.Env
	s, err := loadAgain(fs, again.env, launch.Config)
	if err != nil {
		return err
	}
	s.runID = d.about.RunID
	if j.fixed, err = s.fixedHosts(); err != nil {
		return err
	}
	if s.cluster.members, err = d.knownMembers(); err != nil {
		return workFailed(fmt.Errorf("job %s cannot be resumed: %w", d.about.RunID, err))
	}
	if c != nil {
		err = c.keep(d, j.known)
	} else if s.journal.url != "" {
		c, err = again.resumeCopy(ctx, &s, d, j.known, p.logger(&s))
	}
	if err != nil {
		return workFailed(fmt.Errorf("job %s cannot be resumed: %w", d.about.RunID, err))
	}
	j.copy = c
	err = again.drive(ctx, &s, j)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return workFailed(fmt.Errorf("job %s needs no other driver: its own is running", d.about.RunID))
	case errors.Is(err, journal.ErrBehind):
		return workFailed(fmt.Errorf("job %s cannot be resumed: its hvdrun died while it could not write to %s; "+
			"`hvdrun stop %[1]s` ends its workers", d.about.RunID, d.journal()))

	}
	return err
}
