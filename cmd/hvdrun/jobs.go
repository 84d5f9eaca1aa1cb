package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

// jobState is the state of a job, as the list shows it.
type jobState string

const (
	jobRunning   jobState = "running"
	jobResumable jobState = "resumable" // its driver is gone
	jobDone      jobState = "done"
	jobFailed    jobState = "failed"
	jobStopped   jobState = "stopped" // by a person or a signal
	jobBroken    jobState = "broken"  // its journal cannot be read
)

// jobLine is one job of the list.
type jobLine struct {
	Job        string    `json:"job"`
	State      jobState  `json:"state"`
	Begun      time.Time `json:"begun"`
	Workers    int       `json:"workers"`
	Generation uint64    `json:"generation"`
	Dir        string    `json:"dir"`
	Command    []string  `json:"command"`
	Message    string    `json:"message,omitempty"`
}

func (p *program) jobsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "jobs [--json]",
		Short: "List the jobs of this user on this machine, and which of them can be resumed",
		Long: `jobs lists the jobs that have their folders in $XDG_STATE_HOME/hvdrun/jobs, which is in ~/.local/state unless it is
set, or where that cannot be used in $XDG_RUNTIME_DIR/hvdrun/jobs or /tmp/hvdrun-UID/jobs: first those that run, then those
whose driver has died, which hvdrun resume takes over, and last those that have ended within a week.`,
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(*cobra.Command, []string) error {
			pruneSecrets(p.env, time.Now())
			dirs, bad, err := listJobs(p.env)
			if err != nil {
				return workFailed(err)
			}
			lines := make([]jobLine, 0, len(dirs))
			for _, d := range dirs {
				lines = append(lines, d.line())
			}
			sortJobs(lines)
			for _, err := range bad {
				fmt.Fprintln(p.stderr, "hvdrun:", escapeLines(err.Error()))
			}
			if asJSON {
				enc := json.NewEncoder(p.stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(lines)
			}
			return p.printJobs(lines)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a list of JSON objects")
	return cmd
}

// sortJobs puts those first that run, and those after them that can be resumed; of each kind the
// oldest is first.
func sortJobs(lines []jobLine) {
	place := func(l jobLine) int {
		if i := slices.Index([]jobState{jobRunning, jobResumable, jobBroken}, l.State); i >= 0 {
			return i
		}
		return 3
	}
	slices.SortStableFunc(lines, func(a, b jobLine) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), a.Begun.Compare(b.Begun))
	})
}

// line returns the state of the job.
func (d *jobDir) line() jobLine {
	l := jobLine{Job: d.about.RunID, Begun: d.about.Begun, Dir: d.path, Command: d.about.Command}
	job, err := d.inspect()
	l.Workers, l.Generation = job.Workers, job.Generation
	switch {
	case job.Running:
		l.State = jobRunning
	case d.about.Ended != nil && (err != nil || !job.Finished):
		l.State, l.Message, l.Workers = jobStopped, "stopped without its driver", 0
	case err != nil:
		l.State, l.Message = jobBroken, err.Error()
	case job.Finished && job.Result == nil:
		l.State = jobDone
	case job.Finished && errors.As(job.Result, new(stopSignal)):
		l.State, l.Message = jobStopped, strings.TrimPrefix(job.Result.Error(), "driver: ")
	case job.Finished:
		l.State, l.Message = jobFailed, strings.TrimPrefix(job.Result.Error(), "driver: ")
	default:
		l.State = jobResumable
		if err := d.keyLost(); err != nil {
			l.State, l.Message, l.Workers = jobFailed, "its hvdrun has died: "+err.Error(), 0
		}
	}
	return l
}

func (p *program) printJobs(lines []jobLine) error {
	w := tabwriter.NewWriter(p.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "JOB\tSTATE\tBEGUN\tWORKERS\tGENERATION\tCOMMAND")
	for _, l := range lines {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\n", escapeCell(l.Job), l.State, l.Begun.Local().Format(time.DateTime), l.Workers, l.Generation,
			shortCommand(l.Command))
	}
	return w.Flush()
}

// shortCommand is a command for the last column of a table.
func shortCommand(words []string) string {
	text := escapeCell(strings.NewReplacer("\n", " ", "\t", " ").Replace(strings.Join(words, " ")))
	if cut := []rune(text); len(cut) > 60 {
		return string(cut[:59]) + "…"
	}
	return text
}
