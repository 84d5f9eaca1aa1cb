package scheduler

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/job"
)

// TestTeller: events are passed on up to a rate, with texts that are cut between characters; the
// next event has the number of those dropped.
func TestTeller(t *testing.T) {
	var told []job.TaskEvent
	e := newTeller(func(e job.TaskEvent) { told = append(told, e) })
	now := time.Unix(1000, 0)
	for range 1000 {
		e.event(now, job.TaskEvent{Text: "a" + strings.Repeat("é", 500)})
	}
	if len(told) != eventBurst || len(told[0].Text) > maxEventText || !utf8.ValidString(told[0].Text) {
		t.Errorf("%d events are told at once, with %q", len(told), told[0].Text)
	}
	e.event(now.Add(time.Second), job.TaskEvent{})
	if last := told[len(told)-1]; len(told) != eventBurst+1 || last.Dropped != 900 {
		t.Errorf("%d events, %d dropped", len(told), last.Dropped)
	}
	for i := range 1000 {
		e.event(now.Add(time.Duration(i)*time.Second), job.TaskEvent{})
	}
	if len(told) != 1101 || told[len(told)-1].Dropped != 0 {
		t.Errorf("%d events", len(told))
	}
	newTeller(nil).event(now, job.TaskEvent{})
}
