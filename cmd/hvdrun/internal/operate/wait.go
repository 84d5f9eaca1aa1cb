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
	// waitPause is the time between two checks whether the job has ended.
	waitPause = 100 * time.Millisecond
	// undriven is how long a job may have no driver, for instance while another driver takes over.
	undriven = 3 * time.Second
)

func waitCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "wait [JOB]",
		Short: "Wait until a job has ended, and exit with its status",
		Long: `wait waits until the job has ended, prints the outcome in one line, and exits with the exit status of the job, also if the
job ended earlier. If the job has had no driver for 3 seconds, wait fails with status 1: hvdrun resume takes the job over.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return waitFor(cmd.Context(), p, d.Path)
		},
	}
}

// waitFor blocks until the job of a folder has ended, and reports its end as tellEnd does.
func waitFor(ctx context.Context, p *cli.Program, folder string) error {
	tick := time.NewTicker(waitPause)
	defer tick.Stop()
	for w := newEndWatch(folder); ; {
		switch d, err := w.look(); {
		case err != nil:
			return cli.Failed(err)
		case d != nil:
			return tellEnd(p, d)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return cli.Failed(context.Cause(ctx))
		}
	}
}

// tellEnd prints how a job ended. If the job failed, it returns that as an error with the job's
// exit status.
func tellEnd(p *cli.Program, d *jobdir.Dir) error {
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

// endWatch checks whether the job of a folder has ended.
type endWatch struct {
	folder string
	driven time.Time // when the job last had a driver, as far as known
}

func newEndWatch(folder string) *endWatch { return &endWatch{folder, time.Now()} }

// look returns the folder once the job has ended, and nil before. It returns an error if the job
// has had no driver for longer than undriven. The end is in job.json, the last file that the job's
// hvdrun writes.
func (w *endWatch) look() (*jobdir.Dir, error) {
	d, err := jobdir.Read(w.folder)
	if err != nil || d.About.Ended != nil {
		return d, err
	}
	switch running, err := journal.Locked(d.Journal()); {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	case running:
		w.driven = time.Now()
	case time.Since(w.driven) > undriven:
		return nil, d.NoDriver()
	}
	return nil, nil
}
