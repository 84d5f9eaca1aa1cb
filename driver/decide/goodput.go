package decide

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// ledger keeps what the job's time was spent on. At each moment the time goes to one part, which
// the machine's state determines, so the parts add up to the whole.
//
// Some time turns out to be lost only after it was counted as training: a worker is reported as
// holding up others when they have waited for a while, and a death undoes what was trained since
// the last commit. The ledger does not take that back. It owes the time to its part, and the
// training that follows pays: no part ever becomes smaller, as counters must not.
type ledger struct {
	begun time.Time // zero: nothing is counted yet
	at    time.Time // up to which everything is counted
	part  job.Part  // from at on
	by    plan.SlotID
	spent map[job.Part]time.Duration
	owed  []debt
	held  []held // the stalled time by slot, longest first
	ended bool
}

// debt is time that was counted as training and belongs to another part.
type debt struct {
	part job.Part
	by   plan.SlotID // of stalled time
	long time.Duration
}

// held is the stalled time of a slot. The slot without a host stands for all workers that waited
// for each other, and for the slots beyond mostHeld.
type held struct {
	slot plan.SlotID
	long time.Duration
}

// mostHeld is the number of slots whose stalled time is kept apart: a job may have thousands.
const mostHeld = 64

// shownHeld is how many of them a status shows.
const shownHeld = 8

// begin starts counting, unless it has begun.
func (l *ledger) begin(now time.Time) {
	if l.begun.IsZero() {
		l.begun, l.at, l.part, l.spent = now, now, job.PartWaiting, map[job.Part]time.Duration{}
	}
}

// enter counts the time until now, and has the time from now on go to a part; by is who holds up
// the others, of PartStalled.
func (l *ledger) enter(now time.Time, part job.Part, by plan.SlotID) {
	if l.ended {
		return
	}
	l.begin(now)
	l.count(now)
	l.part, l.by = part, by
}

// count counts the time until now.
func (l *ledger) count(now time.Time) {
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

// pay pays debts with so much training, oldest first, and returns how much of it that took.
func (l *ledger) pay(long time.Duration) (paid time.Duration) {
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

func (l *ledger) add(part job.Part, by plan.SlotID, long time.Duration) {
	if long == 0 {
		return
	}
	l.spent[part] += long
	if part == job.PartStalled {
		l.blame(by, long)
	}
}

// blame adds stalled time to that of a slot.
func (l *ledger) blame(slot plan.SlotID, long time.Duration) {
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

// owe notes that so much of the training until now belongs to another part.
func (l *ledger) owe(now time.Time, part job.Part, by plan.SlotID, long time.Duration) {
	if long <= 0 || l.ended {
		return
	}
	l.count(now)
	if n := len(l.owed); n > 0 && l.owed[n-1].part == part && l.owed[n-1].by == by {
		l.owed[n-1].long += long
		return
	}
	if len(l.owed) == mostHeld { // of as many stalls in a row, with no training between them
		l.owed[mostHeld-1].long += long
		return
	}
	l.owed = append(l.owed, debt{part, by, long})
}

// trained is the training so far, debts included.
func (l *ledger) trained() time.Duration {
	return l.spent[job.PartTraining] + l.spent[job.PartRecomputing]
}

// end counts the rest. No training follows, so what was trained before pays what is owed.
func (l *ledger) end(now time.Time) {
	l.begin(now)
	l.count(now)
	l.spent[job.PartTraining] -= l.pay(l.spent[job.PartTraining])
	l.owed, l.ended = nil, true
}

// until returns what the time until now was spent on.
func (l *ledger) until(now time.Time) job.Goodput {
	g := job.Goodput{Parts: make([]job.Spent, 0, len(job.Parts()))}
	upTo := *l
	upTo.spent = make(map[job.Part]time.Duration, len(l.spent))
	for part, long := range l.spent {
		upTo.spent[part] = long
	}
	upTo.owed, upTo.held = slices.Clone(l.owed), slices.Clone(l.held)
	if !l.ended && !l.begun.IsZero() {
		upTo.count(now)
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

// Begin sets when the job began. It is called once, before the first Step; without it, the job
// begins with that.
func (m *Machine) Begin(now time.Time) { m.ledger.begin(now) }

// Goodput returns what the job's time until now was spent on.
func (m *Machine) Goodput(now time.Time) job.Goodput { return m.ledger.until(now) }

// ResetsBy returns the number of resets whose next world was published, by cause.
func (m *Machine) ResetsBy() map[job.Cause]int { return maps.Clone(m.resetsBy) }

// Measured reports whether the goodput says anything: there was a world, or workers run tasks. A
// command that does not use hvdrun's library never joins.
func (m *Machine) Measured() bool { return m.world.Generation > 0 || m.size.TasksOnly }

// account has the time from now on go to the part in which the job is.
func (m *Machine) account(now time.Time) {
	part, by := m.partNow()
	m.ledger.enter(now, part, by)
	if m.finished {
		m.ledger.end(now)
	}
}

func (m *Machine) partNow() (part job.Part, by plan.SlotID) {
	switch m.doing() {
	case job.Waiting:
		return job.PartWaiting, by
	case job.Starting:
		return job.PartStarting, by
	case job.Resetting:
		switch m.leftFor {
		case job.CauseGrowth:
			return job.PartGrowing, by
		case job.CauseRemoval:
			return job.PartShrinking, by
		}
		return job.PartRecovering, by
	case job.Running:
	default:
		return job.PartStopping, by
	}
	if m.size.TasksOnly {
		return job.PartTraining, by
	}
	if !m.trains {
		return job.PartSynchronising, by
	}
	if w := m.longestHoldUp(); w != nil {
		return job.PartStalled, w.slot
	}
	if m.jam {
		return job.PartStalled, by
	}
	return job.PartTraining, by
}

// longestHoldUp returns the worker that has held up the others longest, or nil.
func (m *Machine) longestHoldUp() (longest *Worker) {
	for _, w := range m.workers {
		if !w.stalledFrom.IsZero() && (longest == nil || w.stalledFrom.Before(longest.stalledFrom)) {
			longest = w
		}
	}
	return longest
}

// entry is how the job came into the current world.
type entry struct {
	cause    job.Cause
	from     time.Time     // since when no step was made
	training time.Duration // what the ledger had counted as training when the world was published
}

// because sets why the current world is left, unless there is a weightier cause.
func (m *Machine) because(c job.Cause) {
	if weight(c) > weight(m.leftFor) {
		m.leftFor = c
	}
}

func weight(c job.Cause) int { return slices.Index(job.Causes(), c) }

// causeOfLeaving is why a member joins the next world, as far as the machine knows.
func (m *Machine) causeOfLeaving() job.Cause {
	switch {
	case len(m.dead) > 0:
		return job.CauseDeath
	case m.given:
		return job.CauseStall
	case m.announced&plan.Removed != 0:
		return job.CauseRemoval
	case m.announced&plan.Added != 0:
		return job.CauseGrowth
	}
	return job.CauseBroken
}

// entryOf returns the entry into the world that follows the current one.
func (m *Machine) entryOf() entry {
	m.because(m.causeOfLeaving())
	e := entry{cause: m.leftFor, from: m.resetFrom, training: m.ledger.trained()}
	switch {
	case m.world.Generation == 0:
		e.cause, e.from = job.CauseStart, m.ledger.begun
	case !m.committed: // no step was made in the world that ends
		if e.from = m.entry.from; weight(m.entry.cause) > weight(e.cause) || m.entry.cause == job.CauseStart {
			e.cause = m.entry.cause
		}
	}
	return e
}

// undone has the ledger owe what the loss of members has undone: by the word of the members, of
// which the one in the middle counts, and not more than was trained in the world that ends.
func (m *Machine) undone(now time.Time, members []*Worker) {
	var lost []time.Duration
	for _, w := range members {
		if w.join.After != 0 && w.join.After == m.world.Generation && w.join.HoldsState {
			lost = append(lost, w.join.Undone)
		}
	}
	if len(lost) == 0 {
		return
	}
	slices.Sort(lost)
	m.ledger.count(now)
	most := m.ledger.trained() - m.entry.training
	m.ledger.owe(now, job.PartRecomputing, plan.SlotID{}, min(lost[(len(lost)-1)/2], most))
}

// begins records that rank 0 of the current world has synchronised and trains.
func (m *Machine) begins(e WorldTrains) {
	if e.Generation == m.world.Generation {
		m.trains = true
	}
}

// unjammed records that the members do not wait for each other any more.
func (m *Machine) unjammed(e WorldStirred) {
	if e.Generation == m.world.Generation {
		m.jam = false
	}
}
