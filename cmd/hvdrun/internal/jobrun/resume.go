package jobrun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/job"
)

// Commands returns hvdrun resume and the hidden command that runs a worker of a job with
// --restart-workers. The command hvdrun itself calls Run.
func Commands(p *cli.Program) []*cobra.Command {
	return []*cobra.Command{jobdir.CompletesJobs(p, resumeCommand(p)), restartWorkerCommand(p)}
}

func resumeCommand(p *cli.Program) *cobra.Command {
	var flags resumeFlags
	cmd := &cobra.Command{
		Use:   "resume [JOB]",
		Short: "Take over a job whose driver has died",
		Long: `resume takes over a job whose hvdrun has died. Its agents have kept the workers for the time of --orphan-timeout; they continue
to train, and none of them is restarted. The settings, the environment and the working directory are those of the job; the
output of the workers goes to this terminal. JOB is the job's run id, the beginning of it, or the path of its folder; hvdrun
jobs lists them. Leave it out if only one job can be resumed.

With --journal it takes over a job that was begun with the same --journal and --journal-key-file, on any machine: this one
needs the job's working directory, its sources of hosts and a way to its hosts. With --standby it waits until the job's
driver has ended.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.check(); err != nil {
				return err
			}
			if flags.journal.URL != "" {
				return resumeFromCopy(cmd.Context(), p, flags, strings.Join(args, ""))
			}
			find := resumableJob
			if len(args) > 0 {
				find = func(env []string) (*jobdir.Dir, error) { return jobdir.Find(env, args[0]) }
			}
			d, err := find(p.Env)
			if err != nil {
				return err
			}
			return resumeJob(cmd.Context(), p, d)
		},
	}
	flags.add(cmd)
	return cmd
}

// resumableJob returns the only job that can be resumed.
func resumableJob(env []string) (*jobdir.Dir, error) {
	all, _, err := jobdir.List(env)
	if err != nil {
		return nil, err
	}
	var broken []string // reasons why others cannot be resumed
	all = slices.DeleteFunc(all, func(d *jobdir.Dir) bool {
		if d.About.Ended != nil {
			return true
		}
		l := d.Line()
		if l.State == jobdir.Broken {
			broken = append(broken, fmt.Sprintf("job %s cannot be resumed: %s", l.Job, l.Message))
		}
		return l.State != jobdir.Resumable
	})
	switch len(all) {
	case 0:
		if len(broken) > 0 {
			return nil, cli.Failed(errors.New(strings.Join(broken, "; ")))
		}
		return nil, errors.New("no job can be resumed; `hvdrun jobs` lists the existing ones")
	case 1:
		return all[0], nil
	}
	names := make([]string, len(all))
	for i, d := range all {
		names[i] = d.About.RunID
	}
	return nil, fmt.Errorf("which of the jobs? %s", strings.Join(names, " "))
}

// resumeJob resumes a job with the arguments and the environment with which it was started.
func resumeJob(ctx context.Context, p *cli.Program, d *jobdir.Dir) error {
	if d.About.Ended != nil {
		return cli.Failed(fmt.Errorf("job %s: %w, at %s", d.About.RunID, job.ErrFinished, d.About.Ended.Format(time.DateTime)))
	}
	if running, err := isDriven(ctx, d); err != nil {
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w", d.About.RunID, err))
	} else if running {
		if err := d.Stopped(ctx); err != nil {
			return cli.Failed(err)
		}
		return cli.Failed(fmt.Errorf("job %s needs no other driver: its own is running", d.About.RunID))
	}
	return ResumeClaimed(ctx, p, d, nil)
}

// isDriven reports whether the job has a driver on this machine.
func isDriven(ctx context.Context, d *jobdir.Dir) (running bool, err error) {
	for range jobdir.LockTries {
		if running, err = journal.Locked(d.Journal()); err != nil || !running {
			return running, err
		}
		select {
		case <-time.After(jobdir.LockPause):
		case <-ctx.Done():
			return running, ctx.Err()
		}
	}
	return running, nil
}

// ResumeClaimed resumes a job that has no driver on this machine. c is the claim on a job that is
// resumed from its copy; nil: the job is resumed from its folder.
func ResumeClaimed(ctx context.Context, p *cli.Program, d *jobdir.Dir, c *Claimed) error {
	if err := os.Chdir(d.About.Dir); err != nil {
		return cli.Failed(fmt.Errorf("the job's working directory: %w", err))
	}
	j := Spec{Command: d.About.Command, dir: d, resumed: true}
	var err error
	if j.Authority, j.known, err = d.Open(p.Env); err != nil {
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w", d.About.RunID, err))
	}
	if err := d.Moved(); err != nil {
		settings.LoggerAt(p, logrus.WarnLevel).WithError(err).Warn("job.json is not in order")
	}
	launch := d.Secrets.Launch
	again := *p
	again.Args, again.Env = launch.Args, launch.Env
	s, _, err := settings.OfArgs(launch.Args, launch.Env, launch.Config)
	if err != nil {
		return err
	}
	s.RunID, s.HostsText = d.About.RunID, launch.Hosts
	if j.Fixed, err = hostsource.Fixed(&s); err != nil {
		return err
	}
	if s.Cluster.Members, err = d.KnownMembers(); err != nil {
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w", d.About.RunID, err))
	}
	if c != nil {
		err = c.keep(d, j.known)
	} else if s.Journal.URL != "" {
		c, err = resumeCopy(ctx, &again, &s, d, j.known, settings.Logger(p, &s))
	}
	if err != nil {
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w", d.About.RunID, err))
	}
	j.copy = c
	err = Drive(ctx, &again, &s, j)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return cli.Failed(fmt.Errorf("job %s needs no other driver: its own is running", d.About.RunID))
	case errors.Is(err, journal.ErrBehind):
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: its hvdrun died while it could not write to %s; "+
			"`hvdrun stop %[1]s` ends its workers", d.About.RunID, d.Journal()))
	}
	if _, damaged := errors.AsType[*journal.CorruptError](err); damaged {
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w: %s is left as it is. Its workers train on for --orphan-timeout; "+
			"`hvdrun stop %[1]s` ends them, and a new job goes on from their last checkpoint", d.About.RunID, err, d.Journal()))
	}
	return err
}
