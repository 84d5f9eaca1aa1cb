package line

import (
	"fmt"
	"testing"
	"time"
)

// TestTrace: the phases from a join to the first save, and no others, are reported until they have
// been sent.
func TestTrace(t *testing.T) {
	var w Trace
	now := time.Unix(1000, 0)
	enter := func(phases ...Phase) {
		for _, p := range phases {
			now = now.Add(time.Second)
			w.Enter(p, now)
		}
	}
	const j, c, s, tr, sv = Joins, Connecting, Syncing, Training, Saving
	check := func(want string) {
		t.Helper()
		text := ""
		for _, e := range w.Told(now) {
			text += fmt.Sprintf("%d-%v ", e.Phase, e.Ago)
		}
		if text != want {
			t.Errorf("told: %q, want %q", text, want)
		}
	}
	enter(tr, sv, tr)
	check("")
	enter(j, c, s, tr)
	check("")
	enter(sv, tr, sv, tr)
	const way = "1-7s 2-6s 4-5s 5-4s 6-3s "
	check(way)
	check(way)
	w.Sent()
	check("")
	enter(j, c, j, c, s, tr, sv)
	check("1-6s 2-5s 1-4s 2-3s 4-2s 5-1s 6-0s ")
	enter(j) // the next world, before that was sent
	check("")
	for range 100 {
		enter(c, j)
	}
	enter(c, s, tr, sv)
	if n := len(w.Told(now)); n == 0 || n > maxEntered {
		t.Errorf("%d phases", n)
	}
}
