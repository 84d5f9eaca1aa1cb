package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/driver/control"
)

// linesIn returns FILE:LINE for each line of a source file of the trainer whose comment is the
// mark.
func linesIn(t *testing.T, file, mark string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "trainer", file))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		if n++; strings.HasSuffix(strings.TrimSpace(line), mark) {
			lines = append(lines, fmt.Sprintf("%s:%d", file, n))
		}
	}
	if lines == nil {
		t.Fatalf("%s has no line with %q", file, mark)
	}
	return lines
}

// TestWhereItHangs: the log names the line of the user's code in which a worker holds up the
// others, whatever it does there; hvdrun stacks prints the same line. Of a worker that a signal has
// stopped they name only that. One of the jobs has the default warning.
func TestWhereItHangs(t *testing.T) {
	early := []string{"--stall-warning", "1s"}
	for name, test := range map[string]struct {
		how, at, file, mark string
		more                []string
	}{
		"a deadlock":       {how: "mutex", at: "main.lockTwice", file: "hang.go", mark: "// mutex"},
		"an endless loop":  {how: "spin", at: "main.spin", file: "hang.go", mark: "// spin", more: early},
		"a sleep":          {how: "sleep", at: "main.nap", file: "hang.go", mark: "// sleep", more: early},
		"a file":           {how: "fifo", at: "main.readFIFO", file: "hang.go", mark: "// fifo", more: early},
		"a stopped worker": {how: "stop", at: "is stopped by a signal", more: early},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags:   append(flags("-np", "3", "--min-np", "2", "--discovery-interval", "1s"), test.more...),
				Stages:  []Stage{{Hosts: on(hostA, 3)}},
				Trainer: []string{"-steps", "12", "-step-time", "20ms", "-exit", "localhost:1@step=5:" + test.how},
			})
			var named Event
			if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
				for _, e := range events {
					if e.Name == "located" && e.Place() == "localhost:1" {
						named = e
						return true
					}
				}
				return false
			}); err != nil {
				t.Fatal(err)
			}
			fault, err := os.Stat(filepath.Join(r.Dir, "fault.0"))
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("named %v after it began to hang: %s: %s", named.Time.Sub(fault.ModTime()), named.What, named.Where)
			want, answers := test.at, test.file != ""
			if answers {
				for _, line := range linesIn(t, test.file, test.mark) {
					if want = test.at + " " + line; strings.Contains(named.Where, want) {
						break
					}
				}
			}
			if !strings.Contains(named.Where, want) || !strings.Contains(named.What, "before AllReduce") {
				t.Errorf("located: %s: %s; want %s", named.What, named.Where, want)
			}
			folder, err := r.Folder()
			if err != nil {
				t.Fatal(err)
			}
			out, err := r.Subcommand(t.Context(), "stacks", folder, "--json").Output()
			if err != nil {
				t.Fatal(err)
			}
			var found []control.Stacks
			if err := json.Unmarshal(out, &found); err != nil || len(found) != 3 {
				t.Fatalf("%v: %s", err, out)
			}
			for _, s := range found {
				hangs := s.Rank == named.Rank
				if strings.Contains(s.Where, want) != hangs || len(s.Goroutines) > 0 != (answers || !hangs) || len(s.Processes) == 0 {
					t.Errorf("rank %d: %s, %+v", s.Rank, s.Where, s.Worker)
				}
			}
			text, err := r.Subcommand(t.Context(), "stacks", folder, fmt.Sprint(named.Rank), "--all").Output()
			if err != nil || !strings.Contains(string(text), want) || strings.Contains(string(text), "elastic.Run") != answers {
				t.Errorf("%v: %s", err, text)
			}
			status, err := r.Subcommand(t.Context(), "status", folder).Output()
			if err != nil || !strings.Contains(string(status), "at "+named.Where) {
				t.Errorf("%v: %s", err, status)
			}
			if err := syscall.Kill(named.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			res := finish(t, r, 0, 12)
			says(t, res, fmt.Sprintf("rank %d (localhost:1, pid %d) holds up 2 others for ", named.Rank, named.PID))
			says(t, res, want)
		})
	}
}
