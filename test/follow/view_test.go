package follow

import (
	"os"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/test/steplog"
)

// TestHolders: a worker that applies the last world's step in a settlement has the state for the
// driver only after the sync that follows.
func TestHolders(t *testing.T) {
	j := Job{Dir: t.TempDir()}
	started := `{"time":"2026-01-01T00:00:00Z","event":"worker_started","pid":11}
{"time":"2026-01-01T00:00:00Z","event":"worker_started","pid":12}
`
	if err := os.WriteFile(j.EventsPath(), []byte(started), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(j.StepLogPath())
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	view := newView(j)
	for _, c := range []struct {
		line steplog.Line
		want []int
	}{
		{steplog.Line{Event: steplog.Step, Step: 4, PID: 11, Generation: 2}, []int{11}},
		{steplog.Line{Event: steplog.Enter, Step: 4, PID: 12, Rank: 1, Generation: 3, Settling: true}, nil},
		{steplog.Line{Event: steplog.Step, Step: 5, PID: 12, Rank: 1, Generation: 3, Settling: true}, nil},
		{steplog.Line{Event: steplog.Step, Step: 6, PID: 11, Generation: 3}, []int{11}},
		{steplog.Line{Event: steplog.Step, Step: 6, PID: 12, Rank: 1, Generation: 3}, []int{11, 12}},
	} {
		if err := c.line.Append(log); err != nil {
			t.Fatal(err)
		}
		if err := view.Look(); err != nil {
			t.Fatal(err)
		}
		if got := view.Holders(); !slices.Equal(got, c.want) {
			t.Errorf("after %+v the holders are %v, want %v", c.line, got, c.want)
		}
	}
}
