package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/probe"
	"github.com/hvdrun/hvdrun/stacks"
)

func stacksCommand(p *cli.Program) *cobra.Command {
	var asJSON, all bool
	var pid string
	cmd := &cobra.Command{
		Use:   "stacks [JOB] [RANK…] | stacks --pid PID",
		Short: "Show where the workers of a job are: the user's frames, or what they do in the kernel",
		Long: `stacks shows where each worker is, or those of some ranks: for a Go program the functions of the user's code, with file and
line, for other programs the system call of each thread, and where it waits in the kernel. Ranks that are at the same place
are shown together. Nothing is stopped, and no core is written: a Go worker reports its goroutines itself. hvdrun reads /proc
for a worker that does not answer, for example because a signal has stopped it, for other processes, and for their children.

--all shows all goroutines and threads. --pid shows the threads of a process of this machine and of its children without a
job, for example those of a hvdrun torchrun.

` + jobdir.WhichJob + ` A number that names no job is a rank.`,
		Example: "  hvdrun stacks 3f2a 7\n  hvdrun stacks --pid 4711",
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("pid") {
				if len(args) > 0 {
					return errors.New("--pid takes neither a job nor a rank")
				}
				n, err := settings.ParseCount(pid, 1)
				if err != nil {
					return fmt.Errorf("--pid: %w", err)
				}
				return stacksOfProcess(p, n, asJSON, all)
			}
			job, ranks, err := jobAndRanks(p, args)
			if err != nil {
				return err
			}
			return stacksOfJob(cmd.Context(), p, job, ranks, asJSON, all)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: an array with an object for each rank")
	cmd.Flags().BoolVar(&all, "all", false, "all goroutines and threads, not only those in the user's code")
	cmd.Flags().StringVar(&pid, "pid", "", "a process of this machine, instead of a job")
	return cmd
}

// jobAndRanks splits the arguments into the job and the ranks. The first argument is the job unless
// it is a number that names no job.
func jobAndRanks(p *cli.Program, args []string) (job string, ranks []int, err error) {
	if len(args) > 0 {
		_, notNumber := strconv.ParseUint(args[0], 10, 31)
		_, notJob := jobdir.Find(p.Env, args[0])
		if notNumber != nil || notJob == nil {
			job, args = args[0], args[1:]
		}
	}
	for _, a := range args {
		n, err := strconv.ParseUint(a, 10, 31)
		if err != nil {
			return "", nil, fmt.Errorf("%q is not a rank", a)
		}
		if !slices.Contains(ranks, int(n)) {
			ranks = append(ranks, int(n))
		}
	}
	return job, ranks, nil
}

func stacksOfJob(ctx context.Context, p *cli.Program, job string, ranks []int, asJSON, all bool) error {
	d, err := jobdir.TheJob(p.Env, job)
	if err != nil {
		return err
	}
	found, err := jobdir.Ask(ctx, d, func(driver *control.Client) ([]control.Stacks, error) { return driver.Stacks(ctx, ranks, all) })
	if err != nil {
		return cli.Failed(err)
	}
	if asJSON {
		return cli.WriteJSON(p.Stdout, found)
	}
	return printStacks(p.Stdout, found, all)
}

func stacksOfProcess(p *cli.Program, pid int, asJSON, all bool) error {
	w := control.Stacks{PID: pid}
	var err error
	if w.Processes, err = probe.Probe(pid); err != nil {
		return cli.Failed(err)
	}
	w.Where = w.Text()
	if asJSON {
		return cli.WriteJSON(p.Stdout, []control.Stacks{w})
	}
	var b strings.Builder
	describeWorker(&b, &w.Worker, all)
	_, err = io.WriteString(p.Stdout, cli.Escape(b.String()))
	return err
}

// printStacks prints the stacks of workers. Workers with the same stacks are printed together, the
// largest group first.
func printStacks(out io.Writer, found []control.Stacks, all bool) error {
	groups := map[string][]*control.Stacks{}
	var order []string
	for i := range found {
		key := found[i].Key()
		if all {
			key = fmt.Sprint(found[i].Rank)
		}
		if groups[key] == nil {
			order = append(order, key)
		}
		groups[key] = append(groups[key], &found[i])
	}
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(len(groups[b]), len(groups[a])) })
	var b strings.Builder
	for i, key := range order {
		if i > 0 {
			b.WriteString("\n")
		}
		of := groups[key]
		b.WriteString(rankList(of))
		if first := of[0]; len(of) == 1 {
			fmt.Fprintf(&b, " (%s:%d, pid %d)", cli.EscapeCell(first.Host), first.Slot, first.PID)
		}
		where := of[0].Where
		if where == "" {
			where = "it is not known where"
		}
		fmt.Fprintf(&b, ": %s\n", cli.EscapeCell(where))
		describeWorker(&b, &of[0].Worker, all)
	}
	_, err := io.WriteString(out, cli.Escape(b.String()))
	return err
}

// rankList returns "rank 3" or "ranks 0-2 5".
func rankList(of []*control.Stacks) string {
	if len(of) == 1 {
		return fmt.Sprintf("rank %d", of[0].Rank)
	}
	var all []int
	for _, s := range of {
		all = append(all, s.Rank)
	}
	slices.Sort(all)
	text := "ranks"
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1] == all[j]+1 {
			j++
		}
		if text += fmt.Sprintf(" %d", all[i]); j > i {
			text += fmt.Sprintf("-%d", all[j])
		}
		i = j + 1
	}
	return text
}

// describeWorker prints goroutines and threads, indented.
func describeWorker(b *strings.Builder, w *stacks.Worker, all bool) {
	for _, g := range w.Goroutines {
		frames := g.Frames
		if !all {
			if frames = stacks.UserFrames(frames); len(frames) == 0 {
				continue
			}
		}
		what := "goroutine"
		if g.Count != 1 {
			what = "goroutines"
		}
		in := ""
		if g.Training {
			in = " in elastic.Run"
		}
		fmt.Fprintf(b, "  %d %s%s\n", g.Count, what, in)
		for _, f := range frames {
			fmt.Fprintf(b, "    %s %s:%d\n", cli.EscapeCell(f.Func), cli.EscapeCell(f.File), f.Line)
		}
	}
	for _, q := range w.Processes {
		fmt.Fprintf(b, "  process %d: %s\n", q.PID, cli.EscapeCell(q.Command))
		for _, t := range q.Threads {
			fmt.Fprintf(b, "    %s\n", cli.EscapeCell(t.Text()))
			for _, k := range t.Kernel {
				if all {
					fmt.Fprintf(b, "      %s\n", cli.EscapeCell(k))
				}
			}
		}
		if q.More > 0 {
			fmt.Fprintf(b, "    and %d more threads\n", q.More)
		}
	}
	if w.Error != "" {
		fmt.Fprintf(b, "  %s\n", cli.EscapeCell(w.Error))
	}
}
