package operate

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

func logsCommand(p *cli.Program) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [JOB [RANK]] [-f]",
		Short: "Show the output of a job in the background",
		Long: `logs prints what a job that was started with --detach has printed: the output of its workers and the log of its
hvdrun. With RANK it prints the output of the worker of that rank alone, and with -f also what comes, until the job has
ended.

` + jobdir.WhichJob,
		Args:                  cobra.MaximumNArgs(2),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			var job, of string
			if len(args) > 0 {
				job = args[0]
			}
			if len(args) > 1 {
				rank, err := strconv.ParseUint(args[1], 10, 31)
				if err != nil {
					return fmt.Errorf("RANK %q is no rank", args[1])
				}
				of = fmt.Sprintf("[%d]<", rank)
			}
			d, err := jobdir.TheJob(p.Env, job)
			if err != nil {
				return err
			}
			return printLogs(cmd.Context(), p, d, of, follow)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print what comes, too, until the job has ended")
	return cmd
}

// printLogs prints the lines of a job's output that begin so.
func printLogs(ctx context.Context, p *cli.Program, d *jobdir.Dir, begin string, follow bool) error {
	f, err := safefile.ReadOwn(d.OutputPath())
	if errors.Is(err, fs.ErrNotExist) {
		return cli.Failed(fmt.Errorf("job %s is not in the background: its output is where it was started", d.About.RunID))
	}
	if err != nil {
		return cli.Failed(err)
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 64<<10)
	tick := time.NewTicker(waitPause)
	defer tick.Stop()
	whole, shown := true, true // the next bytes begin a line; they are of a line that is printed
	for ended := !follow; ; {
		text, err := in.ReadSlice('\n')
		if whole && len(text) > 0 && err == io.EOF && !ended && len(text) < len(begin) {
			// What it begins with is not there yet: it is read again below.
			if _, err := f.Seek(-int64(len(text)), io.SeekCurrent); err != nil {
				return cli.Failed(err)
			}
			in.Reset(f)
			text = nil
		}
		if whole {
			shown = bytes.HasPrefix(text, []byte(begin))
		}
		if len(text) > 0 {
			whole = text[len(text)-1] == '\n'
		}
		if shown {
			if _, err := p.Stdout.Write(text); err != nil {
				return cli.Failed(err)
			}
		}
		switch {
		case err == nil || errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != io.EOF:
			return cli.Failed(err)
		case ended:
			return nil
		}
		if ended, err = over(d.Path); err != nil {
			return cli.Failed(err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return cli.Failed(context.Cause(ctx))
		}
	}
}

// over reports whether nobody writes to the output of a job any more.
func over(folder string) (bool, error) {
	d, err := jobdir.Read(folder)
	if err != nil {
		return false, err
	}
	if d.About.Ended == nil {
		return false, nil
	}
	running, err := journal.Locked(d.Journal())
	return !running, err
}
