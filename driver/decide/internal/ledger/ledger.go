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
// The zero value has not begun. A Ledger is not safe for concurrent use.
type Ledger struct {
	begun time.Time // zero: nothing is counted yet
	at    time.Time // time up to which everything is counted
	part  job.Part  // part to which the time after at belongs
	by    plan.SlotID
	spent map[job.Part]time.Duration
	owed  []debt
	held  []held // the stalled time by slot, longest first
	ended bool
}

// debt is time that was counted as training but belongs to another part.
type debt struct {
	part job.Part
	by   plan.SlotID // slot to which the debt is charged if it is stalled time
	long time.Duration
}

// held is the stalled time of one slot. The zero SlotID stands for time in which all workers waited
// for each other, and for the slots beyond mostHeld.
type held struct {
	slot plan.SlotID
	long time.Duration
}

// mostHeld is the number of slots whose stalled time is counted separately: a job may have
// thousands.
const mostHeld = 64

// shownHeld is the number of these slots that a status shows.
const shownHeld = 8

// Begin starts counting at now. If counting has started already, it does nothing.
func (l *Ledger) Begin(now time.Time) {
	if l.begun.IsZero() {
		l.begun, l.at, l.part, l.spent = now, now, job.PartWaiting, map[job.Part]time.Duration{}
	}
}

// Begun returns when counting started; zero if it has not.
func (l *Ledger) Begun() time.Time { return l.begun }

// Enter counts the time until now, and assigns the time from now on to part. by is the slot that
// holds up the others, for PartStalled. Enter has no effect after End.
func (l *Ledger) Enter(now time.Time, part job.Part, by plan.SlotID) {
	if l.ended {
		return
	}
	l.Begin(now)
	l.Count(now)
	l.part, l.by = part, by
}

// Count counts the time until now.
func (l *Ledger) Count(now time.Time) {
	long := now.Sub(l.at)
	if long <= 0 {
		return
	}
	l.at = now
	if l.part == job.PartTraining {
		long -= l.pay(long)
	}
	l.add(l.part, l.by, long)
}

// pay pays debts, oldest first, from a training time of long, and returns how much of that time it
// used.
func (l *Ledger) pay(long time.Duration) (paid time.Duration) {
	for len(l.owed) > 0 && paid < long {
		d := &l.owed[0]
		some := min(d.long, long-paid)
		l.add(d.part, d.by, some)
		paid += some
		if d.long -= some; d.long == 0 {
			l.owed = l.owed[1:]
		}
	}
	if len(l.owed) == 0 {
		l.owed = nil
	}
	return paid
}

func (l *Ledger) add(part job.Part, by plan.SlotID, long time.Duration) {
	if long == 0 {
		return
	}
	l.spent[part] += long
	if part == job.PartStalled {
		l.blame(by, long)
	}
}

// blame adds stalled time to the total of a slot.
func (l *Ledger) blame(slot plan.SlotID, long time.Duration) {
	at := slices.IndexFunc(l.held, func(h held) bool { return h.slot == slot })
	if at < 0 && len(l.held) >= mostHeld {
		slot = plan.SlotID{}
		at = slices.IndexFunc(l.held, func(h held) bool { return h.slot == slot })
	}
	if at < 0 {
		at = len(l.held)
		l.held = append(l.held, held{slot: slot})
	}
	l.held[at].long += long
	slices.SortStableFunc(l.held, func(x, y held) int { return cmp.Compare(y.long, x.long) })
}

// Owe records that a time of long, counted as training until now, belongs to another part. It has
// no effect after End.
func (l *Ledger) Owe(now time.Time, part job.Part, by plan.SlotID, long time.Duration) {
	if long <= 0 || l.ended {
		return
	}
	l.Count(now)
	if n := len(l.owed); n > 0 && l.owed[n-1].part == part && l.owed[n-1].by == by {
		l.owed[n-1].long += long
		return
	}
	if len(l.owed) == mostHeld { // there were so many stalls without training between them
		l.owed[mostHeld-1].long += long
		return
	}
	l.owed = append(l.owed, debt{part, by, long})
}

// Trained returns the time counted as training so far, debts included.
func (l *Ledger) Trained() time.Duration {
	return l.spent[job.PartTraining] + l.spent[job.PartRecomputing]
}

// End counts the time until now and closes the ledger. No training follows, so the training counted
// before pays the remaining debts.
func (l *Ledger) End(now time.Time) {
	l.Begin(now)
	l.Count(now)
	l.spent[job.PartTraining] -= l.pay(l.spent[job.PartTraining])
	l.owed, l.ended = nil, true
}

// Until returns how the time until now was spent. It does not change the ledger.
func (l *Ledger) Until(now time.Time) job.Goodput {
	g := job.Goodput{Parts: make([]job.Spent, 0, len(job.Parts()))}
	upTo := *l
	upTo.spent = make(map[job.Part]time.Duration, len(l.spent))
	maps.Copy(upTo.spent, l.spent)
	upTo.owed, upTo.held = slices.Clone(l.owed), slices.Clone(l.held)
	if !l.ended && !l.begun.IsZero() {
		upTo.Count(now)
	}
	if !l.begun.IsZero() {
		g.Seconds = upTo.at.Sub(upTo.begun).Seconds()
	}
	for _, part := range job.Parts() {
		g.Parts = append(g.Parts, job.Spent{Part: part, Seconds: upTo.spent[part].Seconds()})
	}
	for _, h := range upTo.held {
		if h.slot.Host != "" && len(g.StalledBy) < shownHeld {
			g.StalledBy = append(g.StalledBy, job.StalledBy{Host: h.slot.Host, Slot: h.slot.Index, Seconds: h.long.Seconds()})
		}
	}
	return g
}
