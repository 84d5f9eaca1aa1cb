package audit_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/audit"
)

// TestRecord: a record is one line of JSON. Input of others can neither make it two lines, nor
// steer a terminal, nor make it long.
func TestRecord(t *testing.T) {
	at := time.Date(2026, 5, 4, 3, 2, 1, 6, time.FixedZone("", 3600))
	r := audit.Record{
		Time: at, Who: audit.Who{Role: "driver", User: "eve\n\x1b[2J", Serial: "0a"}, What: "start",
		Host: "a", Slot: new(0), Outcome: audit.Refused(errors.New(strings.Repeat("long ", 1000) + "\xff")),
	}
	text := r.String()
	if strings.ContainsAny(text, "\n\x1b") || len(text) > 600 {
		t.Errorf("%q", text)
	}
	const begin = `{"time":"2026-05-04T02:02:01.000000006Z","who":{"role":"driver","user":"eve??[2J","serial":"0a"},` +
		`"what":"start","host":"a","slot":0,"outcome":"refused: long `
	if !strings.HasPrefix(text, begin) {
		t.Errorf("%s\ndoes not begin with\n%s", text, begin)
	}
	var back audit.Record
	if err := json.Unmarshal([]byte(text), &back); err != nil || !back.Time.Equal(at) || *back.Slot != 0 || !back.IsRefusal() {
		t.Errorf("%+v, %v", back, err)
	}
}

// TestRefusalsAreBounded: a flood of refusals leaves a bounded number of records per minute, which
// tell how many there were. Other records are never dropped.
func TestRefusalsAreBounded(t *testing.T) {
	var got []audit.Record
	c := audit.NewRecorder(func(r audit.Record) { got = append(got, r) })
	now := time.Unix(1e9, 0)
	const flood = 10_000
	for i := range flood {
		c.Add(audit.Record{Time: now.Add(time.Duration(i) * time.Millisecond), What: "connect", Outcome: audit.Refused(errors.New("a stranger"))})
		c.Add(audit.Record{Time: now, What: "start", Outcome: audit.Done})
	}
	refusals, done := 0, 0
	for _, r := range got {
		if r.IsRefusal() {
			refusals++
		} else {
			done++
		}
	}
	if refusals != 30 || done != flood {
		t.Errorf("%d refusals and %d others are recorded", refusals, done)
	}
	c.Add(audit.Record{Time: now.Add(time.Minute), What: "connect", Outcome: audit.Refused(errors.New("a stranger"))})
	if last := got[len(got)-1]; last.Dropped != flood-refusals {
		t.Errorf("%d are said to have been dropped of %d", last.Dropped, flood-refusals)
	}
}

// TestTrail: records are taken in their order, each once, and no goroutine waits for the reader.
func TestTrail(t *testing.T) {
	trail := audit.NewTrail()
	for _, what := range []string{"a", "b"} {
		trail.Add(audit.Record{What: what, Outcome: audit.Done})
	}
	<-trail.News()
	got := trail.Take()
	if len(got) != 2 || got[0].What != "a" || got[1].What != "b" || got[0].Time.IsZero() {
		t.Errorf("%v", got)
	}
	if again := trail.Take(); len(again) != 0 {
		t.Errorf("twice: %v", again)
	}
	var none *audit.Recorder
	none.Add(audit.Record{})
}
