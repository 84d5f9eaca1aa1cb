package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/journal"
)

// whichJob is the help of the commands' first argument.
const whichJob = `JOB is the job's run id, the beginning of it, or the path of its folder, and may be left out where exactly one job runs.`

func (d *jobDir) controlPath() string { return filepath.Join(d.path, control.SocketName) }

// controlCommands are those that ask something of the driver of a job that runs, and those that
// show what jobs have left.
func (p *program) controlCommands() []*cobra.Command {
	all := []*cobra.Command{p.statusCommand(), p.stopCommand(), p.scaleCommand(), p.stacksCommand()}
	for _, c := range all {
		p.completesJobs(c)
	}
	for _, c := range []*cobra.Command{p.drainCommand(), p.excludeCommand(), p.readmitCommand()} {
		all = append(all, p.completesPlaces(c))
	}
	return append(all, p.jobsCommand(), p.inspectCommand(), p.timelineCommand())
}

func (p *program) stopCommand() *cobra.Command {
	var now bool
	cmd := &cobra.Command{
		Use:   "stop [JOB] [--now]",
		Short: "Stop a job",
		Long: `stop does what SIGTERM to the job's hvdrun does: workers in training leave at a step boundary, all others get SIGTERM,
and those that are there still after --drain-timeout, and do not write the last checkpoint, are killed. That hvdrun exits
with 143; stop does not wait for it.

Where the job's hvdrun is gone, or its journal is damaged, stop has the agents that the job has started end the workers and
themselves, waits for that and says how many there were. Such a job cannot be resumed any more.

` + whichJob,
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.stopJob(cmd.Context(), strings.Join(args, ""), now)
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "kill the workers at once")
	return cmd
}

func (p *program) drainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "drain [JOB] HOST[:SLOT]",
		Short: "Have the workers of a host, or of one slot, leave without loss",
		Long: `drain has the workers of a host, or the one of a slot, leave at the next commit, when training goes on without them; no
step is lost. No worker is started there until hvdrun readmit, or until the host has left the list of hosts and come back.
It is refused where fewer than --min-np slots would be left.

` + whichJob,
		Example:               "  hvdrun drain 3f2a node7:3",
		Args:                  cobra.RangeArgs(1, 2),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.placeCommand(cmd.Context(), args, job.Command{Verb: job.Drain})
		},
	}
}

func (p *program) excludeCommand() *cobra.Command {
	var howLong string
	cmd := &cobra.Command{
		Use:   "exclude [JOB] HOST[:SLOT] [--for D]",
		Short: "Stop the workers of a host, or of one slot, at once, and start none there",
		Long: `exclude stops the workers of a host, or the one of a slot, at once: the others go back to their last commit and go on.
No worker is started there for the time of --for, or until hvdrun readmit. drain is the gentle way.

` + whichJob,
		Example:               "  hvdrun exclude 3f2a node7 --for 30m",
		Args:                  cobra.RangeArgs(1, 2),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			c := job.Command{Verb: job.Exclude}
			if cmd.Flags().Changed("for") {
				if c.For, err = parseDuration(howLong); err != nil {
					return fmt.Errorf("--for: %w", err)
				}
			}
			return p.placeCommand(cmd.Context(), args, c)
		},
	}
	cmd.Flags().StringVar(&howLong, "for", "", "until it may be used again (default: until it is readmitted)")
	return cmd
}

func (p *program) readmitCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "readmit [JOB] HOST[:SLOT]",
		Short: "Use a host or slot again that was drained or excluded",
		Long: `readmit lets workers be started again on a host, or in a slot, that was drained or excluded by a person, or excluded
because workers had failed there; those failures are forgotten.

` + whichJob,
		Example:               "  hvdrun readmit 3f2a node7:3",
		Args:                  cobra.RangeArgs(1, 2),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.placeCommand(cmd.Context(), args, job.Command{Verb: job.Readmit})
		},
	}
}

func (p *program) scaleCommand() *cobra.Command {
	var least, most string
	cmd := &cobra.Command{
		Use:   "scale [JOB] [--min-np N] [--max-np N]",
		Short: "Change the bounds of the number of workers",
		Long: `scale changes --min-np and --max-np of a job that runs. With more workers than the new maximum the youngest leave at the
next commit; where there are slots for more, workers are started at once. --max-np none is no bound.

` + whichJob,
		Example:               "  hvdrun scale 3f2a --max-np 16",
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := job.Command{Verb: job.Scale}
			if cmd.Flags().Changed("min-np") {
				n, err := parseCount(least, 1)
				if err != nil {
					return fmt.Errorf("--min-np: %w", err)
				}
				c.MinNP = &n
			}
			if cmd.Flags().Changed("max-np") {
				n := 0
				if most != "none" {
					var err error
					if n, err = parseCount(most, 1); err != nil {
						return fmt.Errorf("--max-np: %w", err)
					}
				}
				c.MaxNP = &n
			}
			if c.MinNP == nil && c.MaxNP == nil {
				return errors.New("scale needs --min-np, --max-np, or both")
			}
			return p.order(cmd.Context(), strings.Join(args, ""), c)
		},
	}
	cmd.Flags().StringVar(&least, "min-np", "", "fewest workers with which training goes on")
	cmd.Flags().StringVar(&most, "max-np", "", "most workers")
	return cmd
}

// placeCommand gives a command about HOST[:SLOT], which is the last word; JOB is before it.
func (p *program) placeCommand(ctx context.Context, args []string, c job.Command) (err error) {
	job := ""
	if len(args) == 2 {
		job = args[0]
	}
	if c.Host, c.Slot, err = parsePlace(args[len(args)-1]); err != nil {
		return err
	}
	return p.order(ctx, job, c)
}

// parsePlace reads HOST, HOST:SLOT, or such with an IPv6 address, which has brackets where a slot
// follows.
func parsePlace(text string) (host string, slot *int, err error) {
	wrong := fmt.Errorf("%q is neither HOST nor HOST:SLOT", text)
	host = text
	rest, found := "", false
	if inner, ok := strings.CutPrefix(text, "["); ok {
		host, rest, found = strings.Cut(inner, "]")
		if !found || rest != "" && rest[0] != ':' {
			return "", nil, wrong
		}
		rest, found = strings.CutPrefix(rest, ":")
	} else if _, v6 := netip.ParseAddr(text); v6 != nil || !strings.Contains(text, ":") {
		host, rest, found = strings.Cut(text, ":")
	}
	if found {
		n, err := strconv.ParseUint(rest, 10, 16)
		if err != nil {
			return "", nil, wrong
		}
		slot = new(int(n))
	}
	if host == "" {
		return "", nil, wrong
	}
	return host, slot, nil
}

// order has the job's driver carry out a command, and prints what was done.
func (p *program) order(ctx context.Context, job string, c job.Command) error {
	d, err := theJob(p.env, job)
	if err != nil {
		return err
	}
	return p.orderOf(ctx, d, c)
}

// orderOf is order, of a job that has been found.
func (p *program) orderOf(ctx context.Context, d *jobDir, c job.Command) error {
	var done string
	err := d.ask(ctx, func(driver *control.Client) (err error) {
		done, err = driver.Command(ctx, c)
		return err
	})
	if err != nil {
		return workFailed(err)
	}
	fmt.Fprintf(p.stdout, "job %s: %s\n", escapeCell(d.about.RunID), escapeLines(done))
	return nil
}

// theJob returns the job that a person means, which is the only one that runs where nothing is
// said; where none runs, the only one whose driver is gone, if possible one that can be resumed.
func theJob(env []string, name string) (*jobDir, error) {
	if name != "" {
		return findJob(env, name)
	}
	all, _, err := listJobs(env)
	if err != nil {
		return nil, err
	}
	var running, left, dead []*jobDir
	for _, d := range all {
		switch is, err := journal.Locked(d.journal()); {
		case err != nil && !errors.Is(err, fs.ErrNotExist) || d.about.Ended != nil:
		case is:
			running = append(running, d)
		case d.keyLost() == nil:
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
		return nil, errors.New("no job runs; `hvdrun jobs` lists those there were")
	case 1:
		return left[0], nil
	}
	var which strings.Builder
	for _, d := range left {
		fmt.Fprintf(&which, "\n  %s  begun %s  %s", d.about.RunID, d.about.Begun.Local().Format(time.DateTime), shortCommand(d.about.Command))
	}
	return nil, fmt.Errorf("which of the jobs?%s", which.String())
}

// errNoDriver reports that a job is there, and no driver of it.
type errNoDriver struct {
	job   string
	ended bool
}

func (e *errNoDriver) Error() string {
	if e.ended {
		return fmt.Sprintf("job %s: %v", e.job, job.ErrFinished)
	}
	return fmt.Sprintf("job %s has no driver: hvdrun resume %s", e.job, e.job)
}

// ask calls its driver. One that has just begun gets a moment until it answers.
func (d *jobDir) ask(ctx context.Context, call func(*control.Client) error) error {
	const moment, pause = 3 * time.Second, 20 * time.Millisecond
	client, err := control.Dial(d.controlPath())
	if err != nil {
		return err
	}
	defer client.Close()
	for begin := time.Now(); ; {
		switch running, err := journal.Locked(d.journal()); {
		case errors.Is(err, fs.ErrNotExist): // its driver may have given it up
			if err := call(client); !errors.Is(err, control.ErrNoDriver) {
				return err
			}
			return &errNoDriver{d.about.RunID, d.about.Ended != nil}
		case err != nil:
			return err
		case !running:
			job, err := d.inspect()
			return &errNoDriver{d.about.RunID, err == nil && job.Finished}
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
