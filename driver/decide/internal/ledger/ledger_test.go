package ledger

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// TestLedgerAddsUp: whatever happens, the parts add up to the time since the beginning, no part
// shrinks before the end, the parts of the stalled slots add up to the stalled time, and a ledger
// that is saved and loaded continues identically.
func TestLedgerAddsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &Ledger{}
		now := time.Unix(1_700_000_000, 0).UTC()
		begun := now
		l.Begin(now)
		slots := rapid.SampledFrom([]plan.SlotID{{}, {Host: "a"}, {Host: "a", Index: 1}, {Host: "b"}})
		parts := rapid.SampledFrom(job.Parts())
		span := rapid.Int64Range(-int64(time.Second), int64(time.Hour))
		before := l.Until(now)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(max(0, time.Duration(span.Draw(t, "passes"))))
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0, 1:
				l.Enter(now, parts.Draw(t, "part"), slots.Draw(t, "by"))
			case 2:
				part := rapid.SampledFrom([]job.Part{job.PartStalled, job.PartRecomputing}).Draw(t, "owed")
				l.Owe(now, part, slots.Draw(t, "to"), time.Duration(span.Draw(t, "long")))
			case 3:
				text, err := json.Marshal(l)
				if err != nil {
					t.Fatal(err)
				}
				l = &Ledger{}
				if err := json.Unmarshal(text, l); err != nil {
					t.Fatal(err)
				}
			}
			g := l.Until(now)
			checkSum(t, g, now.Sub(begun))
			for i, s := range g.Parts {
				if s.Seconds < before.Parts[i].Seconds {
					t.Fatalf("%s went from %v to %v", s.Part, before.Parts[i].Seconds, s.Seconds)
				}
			}
			before = g
			var by time.Duration
			for _, h := range l.Held {
				by += h.Long
			}
			if by != l.Spent[job.PartStalled] {
				t.Fatalf("slots: %v of %v stalled", by, l.Spent[job.PartStalled])
			}
		}
		l.End(now)
		checkSum(t, l.Until(now), now.Sub(begun))
		checkSum(t, l.Until(now.Add(time.Hour)), now.Sub(begun))
		for _, s := range l.Until(now).Parts {
			if s.Seconds < 0 {
				t.Fatalf("%s: %v", s.Part, s.Seconds)
			}
		}
	})
}

type fataler interface{ Fatalf(string, ...any) }

func checkSum(t fataler, g job.Goodput, want time.Duration) {
	sum := 0.0
	for _, s := range g.Parts {
		sum += s.Seconds
	}
	if math.Abs(g.Seconds-want.Seconds()) > 1e-6 || math.Abs(sum-g.Seconds) > 1e-6*max(1, g.Seconds) {
		t.Fatalf("%v s in all, the parts add up to %v, want %v", g.Seconds, sum, want.Seconds())
	}
}

// TestManyStalls: if every slot of a job stalls it, the ledger keeps only the longest stalls
// separately.
func TestManyStalls(t *testing.T) {
	l := &Ledger{}
	now := time.Unix(0, 0)
	l.Begin(now)
	for i := range 1000 {
		l.Enter(now, job.PartStalled, plan.SlotID{Host: "a", Index: i})
		now = now.Add(time.Second)
		l.Owe(now, job.PartStalled, plan.SlotID{Host: "b", Index: i}, time.Second)
	}
	l.End(now)
	if len(l.Held) > mostHeld+1 || len(l.Until(now).StalledBy) != shownHeld {
		t.Errorf("%d slots are kept, %d shown", len(l.Held), len(l.Until(now).StalledBy))
	}
	checkSum(t, l.Until(now), 1000*time.Second)
}

// TestGoodputText: the text is the last line of a job's log.
func TestGoodputText(t *testing.T) {
	l := &Ledger{}
	now := time.Unix(0, 0)
	l.Begin(now)
	for _, c := range []struct {
		part job.Part
		by   plan.SlotID
		long time.Duration
	}{
		{job.PartStarting, plan.SlotID{}, 30 * time.Second},
		{job.PartTraining, plan.SlotID{}, 3463 * time.Second},
		{job.PartRecovering, plan.SlotID{}, 75 * time.Second},
		{job.PartStalled, plan.SlotID{Host: "b", Index: 1}, 150 * time.Second},
		{job.PartSynchronising, plan.SlotID{}, time.Second},
		{job.PartStopping, plan.SlotID{}, time.Second},
	} {
		l.Enter(now, c.part, c.by)
		now = now.Add(c.long)
	}
	l.End(now)
	want := "trained 93.1 % of 1h2m0s; stalled 4.0 % (most by b:1), recovering 2.0 %, starting 0.8 %"
	if got := l.Until(now).String(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := (job.Goodput{}).String(); !strings.HasPrefix(got, "trained 0.0 % of 0s") {
		t.Error(got)
	}
}
