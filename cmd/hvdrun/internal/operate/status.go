package operate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/job"
)

func statusCommand(p *cli.Program) *cobra.Command {
	var asJSON, watch bool
	cmd := &cobra.Command{
		Use:   "status [JOB] [--json] [--watch]",
		Short: "Show the state of a job: hosts, slots, ranks, exclusions, waits, the last events",
		Long: `status asks the driver of a job for its state. If the driver is gone, it shows the last known state of the job.

With --watch it continues until the job has ended: on a terminal it shows the state again each second, elsewhere it prints a
line for each event; with --json, an object a line at each change.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			if watch {
				return watchStatus(cmd.Context(), p, d, asJSON)
			}
			s, err := d.Status(cmd.Context())
			if err != nil {
				return cli.Failed(err)
			}
			if asJSON {
				return cli.WriteJSON(p.Stdout, s)
			}
			_, err = io.WriteString(p.Stdout, picture(d, s))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with --watch one a line")
	cmd.Flags().BoolVar(&watch, "watch", false, "continue until the job has ended")
	return cmd
}

// watchStatus prints the status at intervals until the job or ctx ends.
func watchStatus(ctx context.Context, p *cli.Program, d *jobdir.Dir, asJSON bool) error {
	_, file := p.Stdout.(*cli.Stream).Terminal()
	show := (&statusLines{out: p.Stdout}).show
	switch {
	case asJSON:
		show = (&statusObjects{p.Stdout, nil}).show
	case file:
		show = func(s job.Status) error { return redraw(p.Stdout, picture(d, s)) }
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		s, err := d.Status(ctx)
		if ctx.Err() != nil {
			return cli.Failed(context.Cause(ctx))
		}
		if err == nil {
			err = show(s)
		}
		if err != nil {
			return cli.Failed(err)
		}
		if s.State.Ended() {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return cli.Failed(context.Cause(ctx))
		}
	}
}

// redraw draws a picture over the last one, line by line so that nothing flickers.
func redraw(w io.Writer, picture string) error {
	const home, restOfLine, restOfScreen = "\x1b[H", "\x1b[K", "\x1b[J"
	_, err := io.WriteString(w, home+strings.ReplaceAll(picture, "\n", restOfLine+"\n")+restOfScreen)
	return err
}

// statusObjects prints each status that differs from the last in more than its time.
type statusObjects struct {
	out  io.Writer
	last []byte
}

func (o *statusObjects) show(s job.Status) error {
	still := s
	still.Time = time.Time{}
	b, err := json.Marshal(still)
	if err != nil || bytes.Equal(b, o.last) {
		return err
	}
	o.last = b
	return json.NewEncoder(o.out).Encode(s)
}

// statusLines prints the changes in each status, one line each.
type statusLines struct {
	out  io.Writer
	last job.Status
}

func (l *statusLines) show(s job.Status) error {
	var b strings.Builder
	fresh := s.Events
	for i := len(s.Events) - 1; i >= 0 && len(l.last.Events) > 0; i-- {
		if bytes.Equal(s.Events[i], l.last.Events[len(l.last.Events)-1]) {
			fresh = s.Events[i+1:]
			break
		}
	}
	if len(l.last.Events) > 0 && len(fresh) == len(s.Events) && len(fresh) > 0 {
		fmt.Fprintln(&b, "… events that are not shown")
	}
	for _, e := range fresh {
		fmt.Fprintln(&b, cli.EscapeCell(eventLine(e)))
	}
	if s.State != l.last.State || (s.Driver == 0) != (l.last.Driver == 0) {
		fmt.Fprintf(&b, "%s  %s\n", s.Time.Local().Format(cli.TimeText), headline(s))
	}
	l.last = s
	_, err := io.WriteString(l.out, cli.Escape(b.String()))
	return err
}

// headline describes the state of a job in one line.
func headline(s job.Status) string {
	var b strings.Builder
	fmt.Fprintf(&b, "job %s ", cli.EscapeCell(s.Job))
	ended := s.State.Ended()
	trains := s.State == job.Running && s.Driver != 0
	switch {
	case s.Stopped:
		b.WriteString("has ended") // the message describes how
	case ended:
		fmt.Fprintf(&b, "has ended: %s", s.State)
	case s.Driver == 0:
		fmt.Fprintf(&b, "has no driver; it was %s at %s", s.State, show.ClockTime(s.Last, s.Time))
	default:
		since := s.Since
		if trains && !s.Begun.IsZero() {
			since = s.Begun
		}
		fmt.Fprintf(&b, "is %s since %s (%v)", s.State, show.ClockTime(since, s.Time), job.Round(s.Time.Sub(since)))
	}
	if s.Message != "" {
		fmt.Fprintf(&b, ": %s", cli.EscapeLines(s.Message))
	}
	if s.Generation > 0 && trains {
		fmt.Fprintf(&b, "; generation %d since %s (%v), workers: %d", s.Generation, show.ClockTime(s.Since, s.Time), job.Round(s.Time.Sub(s.Since)), s.Size)
	} else if s.Generation > 0 {
		fmt.Fprintf(&b, "; generation %d, workers: %d", s.Generation, s.Size)
	} else if !ended {
		fmt.Fprintf(&b, "; no world yet, %d slots are needed", s.NP)
	}
	if !ended {
		fmt.Fprintf(&b, " (allowed: %s)", show.SizeText(s))
	}
	if s.Journal != "" {
		fmt.Fprintf(&b, "; cannot be resumed now: its journal is %s", s.Journal)
	}
	return b.String()
}

// picture returns the status for people: the headline, waits, a table of slots, the last events.
func picture(d *jobdir.Dir, s job.Status) string {
	var b strings.Builder
	fmt.Fprintln(&b, headline(s))
	fmt.Fprintf(&b, "begun %s, resets: %d", s.Begun.Local().Format(time.DateTime), s.Resets)
	if s.Driver != 0 {
		fmt.Fprintf(&b, ", driver: pid %d", s.Driver)
	}
	fmt.Fprintf(&b, "\n%s\n", show.ShortCommand(d.About.Command))
	if s.Goodput.Seconds > 0 && (s.Generation > 0 || s.Goodput.Of(job.PartTraining) > 0) { // a program without hvdrun's library reports nothing
		fmt.Fprintf(&b, "%v\n", s.Goodput)
	}
	for _, w := range s.Waits {
		if s.Driver != 0 {
			fmt.Fprintf(&b, "waiting for %s, %v left\n", cli.EscapeCell(fmt.Sprint(w.For)), job.Round(max(0, w.Until.Sub(s.Time))))
		}
	}
	for _, line := range s.Tasks {
		fmt.Fprintf(&b, "%s\n", cli.EscapeCell(line))
	}
	if s.Driver == 0 && !s.State.Ended() {
		if err := d.KeyLost(); err != nil {
			fmt.Fprintf(&b, "it cannot be resumed: %v\n", err)
		} else {
			fmt.Fprintf(&b, "its workers may train on; `hvdrun resume %s` takes the job over\n", s.Job)
		}
	}
	if len(s.Hosts) > 0 {
		b.WriteString("\n")
		slotTable(&b, s)
	}
	if len(s.Events) > 0 {
		b.WriteString("\n")
	}
	for _, e := range s.Events {
		fmt.Fprintln(&b, cli.EscapeCell(eventLine(e)))
	}
	return cli.Escape(b.String())
}

func slotTable(out io.Writer, s job.Status) {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "HOST\tSLOT\tRANK\tPID\tSTATE\tCOMMITS\tFAILURES\tCPU\tMEMORY\tWHAT")
	for _, h := range s.Hosts {
		var notes []string
		if h.Draining {
			notes = append(notes, "the host drains")
		}
		if !h.Listed {
			notes = append(notes, "the host is no longer listed")
		}
		if len(h.Slots) == 0 {
			fmt.Fprintf(w, "%s\t-\t-\t-\t-\t-\t-\t-\t-\t%s\n", cli.EscapeCell(h.Host), strings.Join(append(notes, "no slots"), ", "))
		}
		for _, slot := range h.Slots {
			rank, pid, commits, state := "-", "-", "-", show.SlotState(slot, s.Time)
			if slot.Rank != nil {
				rank = strconv.Itoa(*slot.Rank)
			}
			if slot.PID != 0 {
				pid = strconv.Itoa(slot.PID)
			}
			if slot.Commits != nil {
				commits = strconv.FormatUint(*slot.Commits, 10)
			}
			cpu, memory := "-", "-"
			if u := slot.Usage; u != nil {
				cpu, memory = fmt.Sprintf("%.1f", u.Processors), show.Bytes(u.Resident)
			}
			where := ""
			if slot.Where != "" {
				where = "at " + cli.EscapeCell(slot.Where)
			}
			what := slices.Concat([]string{
				cli.EscapeCell(slot.What), where, show.LateText(slot.Straggler), show.FiguresText(slot.Figures), show.ShortText(slot.Usage),
			}, notes)
			what = slices.DeleteFunc(what, func(text string) bool { return text == "" })
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", cli.EscapeCell(h.Host), slot.Slot, rank, pid, state, commits, slot.Failures, cpu, memory,
				strings.Join(what, ", "))
		}
	}
	_ = w.Flush() // cannot fail: it writes to memory
	for line := range strings.Lines(b.String()) {
		fmt.Fprintln(out, strings.TrimRight(line, " \n"))
	}
}

// eventLine returns one line about an event: its time, its name, and a text of what happened.
func eventLine(raw json.RawMessage) string {
	e, err := job.ParseEvent(raw)
	if err != nil {
		return string(raw)
	}
	_, text := e.Words()
	return fmt.Sprintf("%s  %-16s %s", e.Time.Local().Format(cli.TimeText), e.Name, text)
}
