// Package operate implements the commands that show and control a running job, and the commands
// that show ended jobs.
package operate

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/job"
)

// Commands returns the commands that call the driver of a running job, the commands that show what
// jobs left behind, and hvdrun submit.
func Commands(p *cli.Program) []*cobra.Command {
	all := []*cobra.Command{statusCommand(p), logsCommand(p), waitCommand(p), stopCommand(p), scaleCommand(p), stacksCommand(p)}
	for _, c := range all {
		jobdir.CompletesJobs(p, c)
	}
	for _, c := range []*cobra.Command{drainCommand(p), excludeCommand(p), readmitCommand(p)} {
		all = append(all, jobdir.CompletesPlaces(p, c))
	}
	return append(all, jobsCommand(p), inspectCommand(p), timelineCommand(p), submitCommand(p))
}

func stopCommand(p *cli.Program) *cobra.Command {
	var now bool
	cmd := &cobra.Command{
		Use:   "stop [JOB] [--now]",
		Short: "Stop a job",
		Long: `stop does the same as SIGTERM to the job's hvdrun: workers in training leave at a step boundary, all others get SIGTERM,
and workers that remain after --drain-timeout, and do not write the last checkpoint, are killed. That hvdrun exits with 143;
stop does not wait for it.

If the job's hvdrun is gone, or its journal is damaged, stop asks the agents to end the job's workers; agents that the job has
started then end themselves. stop waits for that and prints how many workers there were. Such a job cannot be resumed.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return stopJob(cmd.Context(), p, strings.Join(args, ""), now)
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "kill the workers at once")
	return cmd
}

func drainCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "drain [JOB] HOST[:SLOT]",
		Short: "Ask the workers of a host, or of one slot, to leave without loss",
		Long: `drain asks the workers of a host, or of a slot, to leave at the next commit; training continues without them, and no step is
lost. No worker is started there until hvdrun readmit, or until the host has left the list of hosts and returned. drain is
refused if fewer than --min-np slots would be left.

` + jobdir.WhichJob,
		Example: "  hvdrun drain 3f2a node7:3",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return placeCommand(cmd.Context(), p, args, job.Command{Verb: job.Drain})
		},
	}
}

func excludeCommand(p *cli.Program) *cobra.Command {
	var howLong string
	cmd := &cobra.Command{
		Use:   "exclude [JOB] HOST[:SLOT] [--for D]",
		Short: "Stop the workers of a host, or of one slot, at once, and start none there",
		Long: `exclude stops the workers of a host, or of a slot, at once: the others go back to their last commit and continue. No worker is
started there for the time of --for, or until hvdrun readmit. drain does this without loss.

` + jobdir.WhichJob,
		Example: "  hvdrun exclude 3f2a node7 --for 30m",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			c := job.Command{Verb: job.Exclude}
			if cmd.Flags().Changed("for") {
				if c.For, err = settings.ParseDuration(howLong); err != nil {
					return fmt.Errorf("--for: %w", err)
				}
			}
			return placeCommand(cmd.Context(), p, args, c)
		},
	}
	cmd.Flags().StringVar(&howLong, "for", "", "until it may be used again (default: until it is readmitted)")
	return cmd
}

func readmitCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "readmit [JOB] HOST[:SLOT]",
		Short: "Use a host or slot again that was drained or excluded",
		Long: `readmit lets workers start again on a host, or in a slot, that a person has drained or excluded, or that is excluded
because workers have failed there; those failures are forgotten.

` + jobdir.WhichJob,
		Example: "  hvdrun readmit 3f2a node7:3",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return placeCommand(cmd.Context(), p, args, job.Command{Verb: job.Readmit})
		},
	}
}

func scaleCommand(p *cli.Program) *cobra.Command {
	var least, most string
	cmd := &cobra.Command{
		Use:   "scale [JOB] [--min-np N] [--max-np N]",
		Short: "Change the bounds of the number of workers",
		Long: `scale changes --min-np and --max-np of a running job. If there are more workers than the new maximum, the youngest leave at
the next commit; if there are slots for more, workers are started at once. --max-np none removes the bound.

` + jobdir.WhichJob,
		Example: "  hvdrun scale 3f2a --max-np 16",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := job.Command{Verb: job.Scale}
			if cmd.Flags().Changed("min-np") {
				n, err := settings.ParseCount(least, 1)
				if err != nil {
					return fmt.Errorf("--min-np: %w", err)
				}
				c.MinNP = &n
			}
			if cmd.Flags().Changed("max-np") {
				n := 0
				if most != "none" {
					var err error
					if n, err = settings.ParseCount(most, 1); err != nil {
						return fmt.Errorf("--max-np: %w", err)
					}
				}
				c.MaxNP = &n
			}
			if c.MinNP == nil && c.MaxNP == nil {
				return errors.New("scale needs --min-np, --max-np, or both")
			}
			return order(cmd.Context(), p, strings.Join(args, ""), c)
		},
	}
	cmd.Flags().StringVar(&least, "min-np", "", "fewest workers with which training continues")
	cmd.Flags().StringVar(&most, "max-np", "", "most workers")
	return cmd
}

// placeCommand sends the command c about HOST[:SLOT], the last argument, to the job that the
// argument before it names, if there is one.
func placeCommand(ctx context.Context, p *cli.Program, args []string, c job.Command) (err error) {
	job := ""
	if len(args) == 2 {
		job = args[0]
	}
	if c.Host, c.Slot, err = parsePlace(args[len(args)-1]); err != nil {
		return err
	}
	return order(ctx, p, job, c)
}

// parsePlace parses HOST or HOST:SLOT. An IPv6 address with a slot is written in brackets. slot is
// nil without a slot.
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

// order sends a command to the job's driver and prints what the driver did.
func order(ctx context.Context, p *cli.Program, job string, c job.Command) error {
	d, err := jobdir.TheJob(p.Env, job)
	if err != nil {
		return err
	}
	return orderOf(ctx, p, d, c)
}

// orderOf is like order, for the job with the folder d.
func orderOf(ctx context.Context, p *cli.Program, d *jobdir.Dir, c job.Command) error {
	done, err := d.Command(ctx, c)
	if err != nil {
		return cli.Failed(err)
	}
	fmt.Fprintf(p.Stdout, "job %s: %s\n", cli.EscapeCell(d.About.RunID), cli.EscapeLines(done))
	return nil
}
