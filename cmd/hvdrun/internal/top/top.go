// Package top implements hvdrun top, which shows and controls a job in a terminal.
package top

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/page"
	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/job"
)

// Command returns the command hvdrun top.
func Command(p *cli.Program) *cobra.Command {
	return jobdir.CompletesJobs(p, &cobra.Command{
		Use:   "top [JOB]",
		Short: "Watch and steer a job in this terminal",
		Long: `top shows in a terminal what the page of hvdrun dashboard shows: hosts and slots, commits, generations and their causes, the
use of time, stragglers, where a worker hangs, events, output and tasks. It stays open when hvdrun resume takes the job over,
and when the job has ended, until q or Ctrl-C. The bottom of the screen shows its keys, and ? shows all of them; those that
change the job ask first.

It needs a terminal: hvdrun status --watch is for pipes and files. With NO_COLOR in the environment it has no colours.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in, out, err := openScreen(p)
			if err != nil {
				return err
			}
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return showTop(cmd.Context(), p, d, in, out)
		},
	})
}

// openScreen returns the terminal for keys and the terminal for frames.
func openScreen(p *cli.Program) (in, out *os.File, err error) {
	out, drawn := p.Stdout.(*cli.Stream).Terminal()
	in, is := p.Stdin.(*os.File)
	name, _ := cli.Lookup(p.Env, "TERM")
	switch {
	case !drawn || !is || !cli.IsTerminal(in):
		return nil, nil, errors.New("top needs a terminal for its input and output; `hvdrun status --watch` needs none")
	case name == "" || name == "dumb":
		return nil, nil, fmt.Errorf("top needs a terminal whose cursor can be moved, and TERM is %q; `hvdrun status --watch` needs none", name)
	}
	return in, out, nil
}

// showTop shows the job until the user quits or ctx ends.
func showTop(ctx context.Context, p *cli.Program, d *jobdir.Dir, in, out *os.File) error {
	j := newTopJob(ctx, page.Config(d).Job)
	_, err := tea.NewProgram(newTop(j), tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithEnvironment(p.Env),
		tea.WithoutSignalHandler()).Run()
	err = errors.Join(err, j.close())
	switch {
	case ctx.Err() != nil:
		return cli.Failed(context.Cause(ctx))
	case err != nil:
		return cli.Failed(fmt.Errorf("top: %w", err))
	}
	return nil
}

// topJob calls a job for top in the background. The caller must call close.
type topJob struct {
	dashboard.Job
	feed *dashboard.Feed // used by one look at a time
	ctx  context.Context // of the calls
	stop context.CancelFunc

	mu     sync.Mutex
	closed bool
	busy   sync.WaitGroup
}

func newTopJob(ctx context.Context, j dashboard.Job) *topJob {
	ctx, stop := context.WithCancel(ctx)
	return &topJob{Job: j, feed: dashboard.NewFeed(j), ctx: ctx, stop: stop}
}

// close cancels the calls in progress and waits for them.
func (j *topJob) close() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	j.stop()
	j.busy.Wait()
	return j.feed.Close()
}

// ask returns a command of the terminal that calls f, unless j is closed by then.
func (j *topJob) ask(f func(ctx context.Context) tea.Msg) tea.Cmd {
	return func() tea.Msg {
		j.mu.Lock()
		if j.closed {
			j.mu.Unlock()
			return nil
		}
		j.busy.Add(1)
		j.mu.Unlock()
		defer j.busy.Done()
		return f(j.ctx)
	}
}

// order sends a command to the job.
func (j *topJob) order(by *dialog, c job.Command) tea.Cmd {
	return j.ask(func(ctx context.Context) tea.Msg {
		done, err := j.Source.Command(ctx, c)
		return ordered{by, done, err}
	})
}

// read reads a rank's output, beginning at the offset from. If from is negative, it reads the end
// of the output.
func (j *topJob) read(of outputOf, from int64) tea.Cmd {
	return j.ask(func(context.Context) tea.Msg {
		stream := "stdout"
		if of.stderr {
			stream = "stderr"
		}
		text, err := j.ReadOutput(of.rank, stream, from)
		return printed{of, text, err}
	})
}
