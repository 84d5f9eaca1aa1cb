package operate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/journal"
)

const (
	// waitPause is the time between two looks whether the job has ended.
	waitPause = 100 * time.Millisecond
	// undriven is how long a job may have no driver, as when one takes over from another.
	undriven = 3 * time.Second
)

func waitCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "wait [JOB]",
		Short: "Wait until a job has ended, and exit with its status",
		Long: `wait waits until the job has ended, prints its end in one line, and exits with the exit status of the job, also if it
has ended before. A job that has had no driver for 3 seconds is an error, status 1: hvdrun resume goes on with it.

` + jobdir.WhichJob,
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return waitFor(cmd.Context(), p, d.Path)
		},
	}
}

// waitFor waits for the end of the job of a folder. The job's hvdrun writes job.json as the last.
func waitFor(ctx context.Context, p *cli.Program, folder string) error {
	tick := time.NewTicker(waitPause)
	defer tick.Stop()
	driven := time.Now()
	for {
		d, err := jobdir.Read(folder)
		if err != nil {
			return cli.Failed(err)
		}
		if d.About.Ended != nil {
			l := d.Line()
			end := fmt.Sprintf("job %s: %s", l.Job, l.State)
			if d.About.Status == 0 {
				_, err := fmt.Fprintln(p.Stdout, end)
				return err
			}
			if l.Message != "" {
				end += ": " + l.Message
			}
			return cli.ExitWith(cli.Failed(errors.New(end)), d.About.Status)
		}
		switch running, err := journal.Locked(d.Journal()); {
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return cli.Failed(err)
		case running:
			driven = time.Now()
		case time.Since(driven) > undriven:
			return cli.Failed(fmt.Errorf("job %s has no driver: hvdrun resume %[1]s", d.About.RunID))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return cli.Failed(context.Cause(ctx))
		}
	}
}
