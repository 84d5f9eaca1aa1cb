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
		Long: `logs prints the output of a job that was started with --detach: that of its workers and the log of its hvdrun. With RANK it
prints the output of the worker of that rank alone; -f follows the output until the job has ended.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var name, begin string
			rank := -1
			if len(args) > 0 {
				name = args[0]
			}
			if len(args) > 1 {
				n, err := strconv.ParseUint(args[1], 10, 31)
				if err != nil {
					return fmt.Errorf("%q is not a RANK", args[1])
				}
				rank, begin = int(n), fmt.Sprintf("[%d]<", n)
			}
			d, err := jobdir.TheJob(p.Env, name)
			if err != nil {
				return err
			}
			out := &linesThat{to: p.Stdout, begin: []byte(begin)}
			if err := printLogs(cmd.Context(), d, out, follow); err != nil || out.any {
				return err
			}
			return checkRank(cmd.Context(), d, rank)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the output until the job has ended")
	return cmd
}

// checkRank returns an error if a job that has no output of the rank has, or ended with, too few
// ranks.
func checkRank(ctx context.Context, d *jobdir.Dir, rank int) error {
	s, err := d.Status(ctx)
	if err != nil {
		return nil // the existing output of the job has been printed
	}
	size := s.Size
	if size == 0 { // the job has no world
		size = s.NP
	}
	switch {
	case rank < size:
		return nil
	case s.State.Ended():
		return cli.Failed(fmt.Errorf("job %s has no output of rank %d: it ended with ranks 0 to %d", s.Job, rank, size-1))
	}
	return cli.Failed(fmt.Errorf("job %s has no output of rank %d: it now has ranks 0 to %d", s.Job, rank, size-1))
}

// printLogs prints a job's output. If follow is true, it blocks until the job or ctx ends.
func printLogs(ctx context.Context, d *jobdir.Dir, out io.Writer, follow bool) error {
	f, err := safefile.ReadOwn(d.OutputPath())
	if errors.Is(err, fs.ErrNotExist) {
		return cli.Failed(fmt.Errorf("job %s is not in the background: its output is where it was started", d.About.RunID))
	}
	if err != nil {
		return cli.Failed(err)
	}
	defer f.Close()
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
	_, err := io.Copy(to, from)
	return cli.Failed(err)
}

// linesThat is a writer that passes on only the lines that begin with begin, as they arrive.
type linesThat struct {
	to     io.Writer
	begin  []byte
	at     int  // number of bytes of the line that match begin
	hidden bool // the line does not begin with begin
	any    bool // a line began with begin
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

// part handles a part of one line.
func (l *linesThat) part(b []byte) error {
	same := min(len(b), len(l.begin)-l.at)
	if l.hidden = l.hidden || !bytes.Equal(b[:same], l.begin[l.at:l.at+same]); l.hidden {
		return nil
	}
	if l.at += same; l.at < len(l.begin) {
		return nil
	}
	if same > 0 { // all of begin has matched
		b = append(bytes.Clone(l.begin), b[same:]...)
	}
	l.any = true
	_, err := l.to.Write(b)
	return err
}
