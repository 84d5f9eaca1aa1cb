package operate

import (
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
	out := &linesThat{to: p.Stdout, begin: []byte(begin)}
	if !follow {
		return copyLogs(out, f)
	}
	tick := time.NewTicker(waitPause)
	defer tick.Stop()
	for w, ended := newEndWatch(d.Path), false; ; {
		if err := copyLogs(out, f); err != nil || ended {
			return err
		}
		now, err := w.look()
		if err != nil {
			return cli.Failed(err)
		}
		ended = now != nil
		select {
		case <-tick.C:
		case <-ctx.Done():
			return cli.Failed(context.Cause(ctx))
		}
	}
}

func copyLogs(to io.Writer, from io.Reader) error {
	if _, err := io.Copy(to, from); err != nil {
		return cli.Failed(err)
	}
	return nil
}

// linesThat passes on the lines that begin so, as they come.
type linesThat struct {
	to     io.Writer
	begin  []byte
	at     int  // so many bytes of the line are those of begin
	hidden bool // the line begins otherwise
}

func (l *linesThat) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		end := len(b)
		if i := bytes.IndexByte(b[n:], '\n'); i >= 0 {
			end = n + i + 1
		}
		err = l.part(b[n:end])
		if n = end; b[n-1] == '\n' {
			l.at, l.hidden = 0, false
		}
	}
	return n, err
}

// part takes a part of one line.
func (l *linesThat) part(b []byte) error {
	same := min(len(b), len(l.begin)-l.at)
	if l.hidden = l.hidden || !bytes.Equal(b[:same], l.begin[l.at:l.at+same]); l.hidden {
		return nil
	}
	if l.at += same; l.at < len(l.begin) {
		return nil
	}
	if same > 0 { // the begin is whole
		b = append(bytes.Clone(l.begin), b[same:]...)
	}
	_, err := l.to.Write(b)
	return err
}
