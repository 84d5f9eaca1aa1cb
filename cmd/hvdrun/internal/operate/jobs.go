package operate

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/job"
)

func jobsCommand(p *cli.Program) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "jobs [--json]",
		Short: "List the jobs of this user on this machine, and which of them can be resumed",
		Long: `jobs lists the jobs that run, then those whose driver has died, which hvdrun resume takes over, and last those that have
ended within a week, of each kind the newest first. STATUS is the exit status of a job that has ended, TOOK the time from its
beginning to its end, or until now.

The folders of jobs are in $XDG_STATE_HOME/hvdrun/jobs (default of the variable: ~/.local/state) or, if that cannot be used,
in $XDG_RUNTIME_DIR/hvdrun/jobs or /tmp/hvdrun-UID/jobs.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			jobdir.PruneSecrets(p.Env, time.Now())
			dirs, bad, err := jobdir.List(p.Env)
			if err != nil {
				return cli.Failed(err)
			}
			lines := make([]jobdir.Line, 0, len(dirs))
			for _, d := range dirs {
				lines = append(lines, d.Line())
			}
			sortJobs(lines)
			for _, err := range bad {
				fmt.Fprintln(p.Stderr, "hvdrun:", cli.EscapeLines(err.Error()))
			}
			if asJSON {
				return cli.WriteJSON(p.Stdout, lines)
			}
			return printJobs(p, lines, time.Now())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a list of JSON objects")
	return cmd
}

// sortJobs sorts the running jobs first, then those that can be resumed, then the others; within
// each kind the newest first.
func sortJobs(lines []jobdir.Line) {
	place := func(l jobdir.Line) int {
		if i := slices.Index([]jobdir.State{jobdir.Running, jobdir.Resumable, jobdir.Broken}, l.State); i >= 0 {
			return i
		}
		return 3
	}
	slices.SortStableFunc(lines, func(a, b jobdir.Line) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), b.Begun.Compare(a.Begun))
	})
}

func printJobs(p *cli.Program, lines []jobdir.Line, now time.Time) error {
	w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "JOB\tSTATE\tSTATUS\tBEGUN\tENDED\tTOOK\tWORKERS\tGENERATION\tCOMMAND")
	for _, l := range lines {
		status, ended, took := "-", "-", "-"
		if l.Status != nil {
			status = strconv.Itoa(*l.Status)
		}
		if l.Ended != nil {
			ended = l.Ended.Local().Format(time.DateTime)
		}
		if l.State != jobdir.Broken {
			took = job.Round(l.Took(now)).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", cli.EscapeCell(l.Job), l.State, status, l.Begun.Local().Format(time.DateTime), ended, took,
			l.Workers, l.Generation, show.ShortCommand(l.Command))
	}
	return w.Flush()
}
