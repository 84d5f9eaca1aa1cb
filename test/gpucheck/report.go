package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
)

// summary is the results of a run.
type summary struct {
	Time    time.Time `json:"time"`
	Driver  string    `json:"driver"`
	Quick   bool      `json:"quick"`
	Device  string    `json:"device"` // the first device, which all checks use
	Machine string    `json:"machine"`
	Results []result  `json:"checks"`
}

func newSummary(o options, device string) *summary {
	return &summary{Time: time.Now().UTC(), Driver: o.Driver, Quick: o.Quick, Device: device,
		Machine: fmt.Sprintf("%s, %d processors", runtime.GOARCH, runtime.NumCPU())}
}

// add records a result and prints it.
func (r *summary) add(w io.Writer, done result) {
	r.Results = append(r.Results, done)
	fmt.Fprintf(w, "%-4s  %-12s %6.1f s  %s\n", done.Status, done.Check, done.Seconds, done.Reason)
	for _, f := range done.Figures {
		fmt.Fprintln(w, f)
	}
}

// String formats the figure as a line of the table.
func (f figure) String() string {
	line := fmt.Sprintf("        %-44s %12.4g %-6s", f.Name, f.Value, f.Unit)
	switch {
	case f.Target != "" && f.Met == nil:
		line += " target " + f.Target + ": not judged"
	case f.Target != "":
		line += " target " + f.Target + ": " + report.Verdict(*f.Met)
	}
	return strings.TrimRight(line, " ")
}

// conclude prints the summary and returns the exit status.
func (r *summary) conclude(w io.Writer) int {
	count, met, missed := map[string]int{}, 0, 0
	for _, done := range r.Results {
		count[done.Status]++
		for _, f := range done.Figures {
			switch {
			case f.Met == nil:
			case *f.Met:
				met++
			default:
				missed++
			}
		}
	}
	fmt.Fprintf(w, "checks: %d passed, %d failed, %d skipped; targets: %d met, %d missed\n",
		count["pass"], count["fail"], count["skip"], met, missed)
	if r.Quick {
		fmt.Fprintln(w, "sizes were small: the checks work, the figures mean nothing")
	}
	if count["fail"] > 0 || count["pass"] == 0 {
		return 1
	}
	return 0
}

func (r *summary) write(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o666)
}
