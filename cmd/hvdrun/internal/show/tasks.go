package show

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
)

// PrintTasks prints tables of functions and workers.
func PrintTasks(out io.Writer, s tasks.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%d running, %d ready, %d waiting for others, %d run again so far\n", s.Running, s.Ready, s.Waiting-s.Suspended, s.Retried)
	if s.Suspended > 0 {
		fmt.Fprintf(w, "%d of the journal, for which workers are waited that may have them\n", s.Suspended)
	}
	if s.Journal != "" {
		fmt.Fprintf(w, "the journal cannot be written: %s\n", s.Journal)
	}
	if m := s.Memory; m != nil && m.Used > 0 {
		fmt.Fprintf(w, "%s of %s of memory (--tasks-memory) are taken\n", mebibytes(m.Used), mebibytes(m.Most))
		if len(m.Clients) > 0 {
			fmt.Fprint(w, "\nCLIENT\tTASKS\tTAKES\tNOT READ\n")
		}
		for _, c := range m.Clients {
			name := c.Name
			if c.Gone {
				name += " (gone)"
			}
			if c.Paused {
				name += " (reads no results: its tasks wait)"
			}
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", name, c.Tasks, mebibytes(c.Bytes), mebibytes(c.Unread))
		}
	}
	if len(s.Functions) > 0 {
		fmt.Fprint(w, "\nFUNCTION\tNEEDS\tRUNNING\tREADY\tTAKES\n")
	}
	for _, f := range s.Functions {
		takes := "-"
		if f.PaceUS > 0 {
			takes = (time.Duration(f.PaceUS) * time.Microsecond).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\n", f.Function, f.Demand, f.Running, f.Ready, takes)
	}
	if len(s.Workers) > 0 {
		fmt.Fprint(w, "\nWORKER\tHOST\tOFFERS\tRUNNING\tAHEAD\tDONE\n")
	}
	for _, k := range s.Workers {
		name := k.Name
		switch {
		case k.Leaving:
			name += " (leaves)"
		case k.Trains:
			name += " (trains)"
		}
		running := strconv.Itoa(k.Running)
		if k.Waits > 0 {
			running += fmt.Sprintf(" (%d wait for others)", k.Waits)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\n", name, k.Host, k.Offers, running, k.Ahead, k.Done)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, line := range s.Lasting() {
		if _, err := fmt.Fprintf(out, "\n%s\n", line); err != nil {
			return err
		}
	}
	for _, f := range s.Functions {
		if f.Why != "" {
			if _, err := fmt.Fprintf(out, "\n%s: %d tasks do not run: %s\n", f.Function, f.Ready, f.Why); err != nil {
				return err
			}
		}
	}
	return nil
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
