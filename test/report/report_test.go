package report

import (
	"strings"
	"testing"
	"time"
)

func TestTable(t *testing.T) {
	var table Table
	table.Add("workers", 100, 1000)
	table.Add("time, ms", 2.5, "-")
	if got, want := table.Text(), "workers   100  1000\ntime, ms  2.5     -\n"; got != want {
		t.Errorf("got text\n%s", got)
	}
	if got, want := table.Markdown(), "| workers | 100 | 1000 |\n|---|---|---|\n| time, ms | 2.5 | - |\n"; got != want {
		t.Errorf("got markdown\n%s", got)
	}
}

// TestTargets: a target counts as met up to its limit.
func TestTargets(t *testing.T) {
	var out strings.Builder
	times := Spread{10 * time.Millisecond, 20 * time.Millisecond}
	Rows(&out, "From here to", []Row{{"  half", times[:1]}}, Row{"there", times},
		Target{"median", 0.5, 10 * time.Millisecond}, Target{"p99", 0.99, 19 * time.Millisecond})
	got := out.String()
	for _, want := range []string{"\nFrom here to\n" + header + "\n  half ", "\nthere ",
		"target median at most 10ms: met\n", "target p99 at most 19ms: MISSED\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("the report has no %q:\n%s", want, got)
		}
	}
}
