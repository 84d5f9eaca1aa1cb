package page

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// TestReplayed: a past job is replayed at the requested speed, stays at its end, and refuses
// commands.
func TestReplayed(t *testing.T) {
	r, err := readRecording(filepath.Join("..", "..", "..", "..", "internal", "replay", "testdata", "faults.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Unix(1000, 0)
	s := newReplayed(r, 2, begun)
	for _, after := range []time.Duration{0, 5 * time.Second, 3 * time.Second, time.Hour} {
		want := r.Begun().Add(2 * after)
		switch after {
		case 3 * time.Second: // the clock was set back
			want = r.Begun().Add(10 * time.Second)
		case time.Hour:
			want = r.Ended()
		}
		if got := s.at(begun.Add(after)); !got.Time.Equal(want) || (got.State == job.Failed) != (after == time.Hour) {
			t.Errorf("after %v it is %v, %s; want %v", after, got.Time, got.State, want)
		}
	}
	if s := newReplayed(r, 0, begun); s.speed != 1 {
		t.Errorf("a short job is played %g times as fast", s.speed)
	}
	if _, err := s.Command(t.Context(), job.Command{Verb: job.Stop}); !errors.As(err, new(*job.RefusedError)) {
		t.Errorf("a command: %v", err)
	}
	if _, err := readRecording("replay_test.go"); err == nil || !strings.Contains(err.Error(), "replay_test.go: line 1: ") {
		t.Errorf("another file is read: %v", err)
	}
}
