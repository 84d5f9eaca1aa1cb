// Package ledger counts how a job's time is spent, which is its goodput. It is pure: callers pass
// the time.
package ledger

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Ledger counts how the job's time was spent. At each moment the time goes to one part, which the
// machine's state determines, so the parts add up to the whole.
//
// Some time turns out to be lost only after it was counted as training: a worker is reported as
// holding up others when they have waited for a while, and a death undoes what was trained since
// the last commit. The ledger does not take that back. It owes the time to its part, and takes it
// from the training that follows: no part ever becomes smaller, because the parts are exported as
// counters.
//
// The zero value has not begun. A journal holds a Ledger as JSON, with durations in nanoseconds;
// only this package sets its fields. A Ledger is not safe for concurrent use.
type Ledger struct {
	Start time.Time                  `json:"start,omitzero"` // zero: nothing is counted yet
	At    time.Time                  `json:"at,omitzero"`    // time up to which everything is counted
	Part  job.Part                   `json:"part,omitempty"` // part to which the time after At belongs
	By    plan.SlotID                `json:"by,omitzero"`
	Spent map[job.Part]time.Duration `json:"spent,omitempty"`
	Owed  []debt                     `json:"owed,omitempty"`
	Held  []held                     `json:"held,omitempty"` // the stalled time by slot, longest first
	Ended bool                       `json:"ended,omitempty"`
}

// debt is time that was counted as training but belongs to another part.
type debt struct {
	Part job.Part      `json:"part"`
	By   plan.SlotID   `json:"by,omitzero"` // slot to which the debt is charged if it is stalled time
	Long time.Duration `json:"long"`
}

// held is the stalled time of one slot. The zero SlotID stands for time in which all workers waited
// for each other, and for the slots beyond mostHeld.
type held struct {
	Slot plan.SlotID   `json:"slot,omitzero"`
	Long time.Duration `json:"long"`
}

// mostHeld is the number of slots whose stalled time is counted separately: a job may have
// thousands.
const mostHeld = 64

// shownHeld is the number of these slots that a status shows.
const shownHeld = 8

// Begin starts counting at now. If counting has started already, it does nothing.
func (l *Ledger) Begin(now time.Time) {
	if l.Start.IsZero() {
		l.Start, l.At, l.Part = now, now, job.PartWaiting
	}
}

// Begun returns when counting started; zero if it has not.
func (l *Ledger) Begun() time.Time { return l.Start }

// Enter counts the time until now, and assigns the time from now on to part. by is the slot that
// holds up the others, for PartStalled. Enter has no effect after End.
func (l *Ledger) Enter(now time.Time, part job.Part, by plan.SlotID) {
	if l.Ended {
		return
	}
	l.Begin(now)
	l.Count(now)
	l.Part, l.By = part, by
}

// Count counts the time until now.
func (l *Ledger) Count(now time.Time) {
	long := now.Sub(l.At)
	if long <= 0 {
		return
	}
	l.At = now
	if l.Part == job.PartTraining {
		long -= l.pay(long)
	}
	l.add(l.Part, l.By, long)
}

// pay pays debts, oldest first, from a training time with the duration long, and returns how much
// of that time it used.
func (l *Ledger) pay(long time.Duration) (paid time.Duration) {
	for len(l.Owed) > 0 && paid < long {
		d := &l.Owed[0]
		some := min(d.Long, long-paid)
		l.add(d.Part, d.By, some)
		paid += some
		if d.Long -= some; d.Long == 0 {
			l.Owed = l.Owed[1:]
		}
	}
	if len(l.Owed) == 0 {
		l.Owed = nil
	}
	return paid
}

func (l *Ledger) add(part job.Part, by plan.SlotID, long time.Duration) {
	if long == 0 {
		return
	}
	if l.Spent == nil {
		l.Spent = map[job.Part]time.Duration{}
	}
	l.Spent[part] += long
	if part == job.PartStalled {
		l.blame(by, long)
	}
}

// blame adds stalled time to the total of a slot.
func (l *Ledger) blame(slot plan.SlotID, long time.Duration) {
	at := slices.IndexFunc(l.Held, func(h held) bool { return h.Slot == slot })
	if at < 0 && len(l.Held) >= mostHeld {
		slot = plan.SlotID{}
		at = slices.IndexFunc(l.Held, func(h held) bool { return h.Slot == slot })
	}
	if at < 0 {
		at = len(l.Held)
		l.Held = append(l.Held, held{Slot: slot})
	}
	l.Held[at].Long += long
	slices.SortStableFunc(l.Held, func(x, y held) int { return cmp.Compare(y.Long, x.Long) })
}

// Owe records that a time with the duration long, counted as training until now, belongs to another
// part. It has no effect after End.
func (l *Ledger) Owe(now time.Time, part job.Part, by plan.SlotID, long time.Duration) {
	if long <= 0 || l.Ended {
		return
	}
	l.Count(now)
	if n := len(l.Owed); n > 0 && l.Owed[n-1].Part == part && l.Owed[n-1].By == by {
		l.Owed[n-1].Long += long
		return
	}
	if len(l.Owed) == mostHeld { // there were so many stalls without training between them
		l.Owed[mostHeld-1].Long += long
		return
	}
	l.Owed = append(l.Owed, debt{part, by, long})
}

// Trained returns the time counted as training so far, debts included.
func (l *Ledger) Trained() time.Duration {
	return l.Spent[job.PartTraining] + l.Spent[job.PartRecomputing]
}

// End counts the time until now and closes the ledger. No training follows, so the training counted
// before pays the remaining debts.
func (l *Ledger) End(now time.Time) {
	l.Begin(now)
	l.Count(now)
	if trained := l.Spent[job.PartTraining]; trained > 0 {
		l.Spent[job.PartTraining] -= l.pay(trained)
	}
	l.Owed, l.Ended = nil, true
}

// Until returns how the time until now was spent. It does not change the ledger.
func (l *Ledger) Until(now time.Time) job.Goodput {
	g := job.Goodput{Parts: make([]job.Spent, 0, len(job.Parts()))}
	upTo := *l
	upTo.Spent = make(map[job.Part]time.Duration, len(l.Spent))
	maps.Copy(upTo.Spent, l.Spent)
	upTo.Owed, upTo.Held = slices.Clone(l.Owed), slices.Clone(l.Held)
	if !l.Ended && !l.Start.IsZero() {
		upTo.Count(now)
	}
	if !l.Start.IsZero() {
		g.Seconds = upTo.At.Sub(upTo.Start).Seconds()
	}
	for _, part := range job.Parts() {
		g.Parts = append(g.Parts, job.Spent{Part: part, Seconds: upTo.Spent[part].Seconds()})
	}
	for _, h := range upTo.Held {
		if h.Slot.Host != "" && len(g.StalledBy) < shownHeld {
			g.StalledBy = append(g.StalledBy, job.StalledBy{Host: h.Slot.Host, Slot: h.Slot.Index, Seconds: h.Long.Seconds()})
		}
	}
	return g
}
