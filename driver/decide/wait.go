package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/job"
)

// wait is a condition that the machine waits for, with its deadline. waits enumerates all of them,
// as a table that determines the machine's timer, the actions at deadlines, and the waits that a
// status shows.
type wait struct {
	kind  waitKind
	until time.Time
	who   *Worker // nil if the wait is not for one worker
}

type waitKind uint8

// The kinds of waits, in the order in which simultaneous deadlines are handled.
const (
	forSlots     waitKind = iota // enough slots, or workers, for a world
	forShort                     // log reminder: there are still not enough slots
	forLateStart                 // log reminder: starting workers have not joined
	forReset                     // log reminder: members have not joined the next world, or not left this one
	forJoin                      // a starting worker joins
	forMember                    // a member of the world being left joins again
	forLeave                     // a worker that was dismissed exits, or one that left writes its last checkpoint
	forLoss                      // members notice a death by themselves
	forDone                      // the remaining workers are done after the first
	forReminder                  // log reminder: workers that are done have not exited
	forExit                      // a worker that is done exits
	forReturn                    // an exclusion ends
	forTaken                     // a slot that has another job's worker is tried again
	forRamp                      // a starting worker stops counting against its host's ramp
	forStarts                    // any starting worker joins
	forEnds                      // log reminder: workers have not ended although the job ends
	forProcess                   // the process of a worker that is being stopped ends
)

// waits calls each for every current wait.
func (m *Machine) waits(each func(wait)) {
	if m.Over {
		return
	}
	switch {
	case m.Decided:
		if !m.EndFrom.IsZero() && !m.Reminded {
			each(wait{kind: forEnds, until: m.EndFrom.Add(min(m.remindAfter(), m.wait.Drain/2))})
		}
	case !m.DoneFrom.IsZero():
		m.waitsForDone(each)
	default:
		m.waitsForWorld(each)
	}
	if t, ok := m.hosts.NextReturn(); ok && !m.Decided {
		each(wait{kind: forReturn, until: t})
	}
	if t, ok := m.nextTry(); ok && !m.Decided && m.DoneFrom.IsZero() {
		each(wait{kind: forTaken, until: t})
	}
	for _, w := range m.workers {
		if w.Phase == stopping {
			each(wait{forProcess, m.endsBy(w), w})
		}
	}
}

// waitsForWorld calls each for the waits of a job that trains or is about to.
func (m *Machine) waitsForWorld(each func(wait)) {
	if !m.ShortFrom.IsZero() {
		each(wait{kind: forSlots, until: m.ShortFrom.Add(m.wait.Elastic)})
		each(wait{kind: forShort, until: m.sayAgain(m.ShortFrom)})
	}
	if !m.DeadFrom.IsZero() {
		each(wait{kind: forLoss, until: m.DeadFrom.Add(lossAfter)})
	}
	trains, starts, limits := false, false, false
	for _, w := range m.workers {
		trains = trains || w.inWorld()
		starts = starts || w.Phase == starting
		switch {
		case w.Phase == starting:
			if by, limited := m.startBy(w); limited {
				limits = true
				each(wait{forJoin, by, w})
			}
		case w.inWorld() && !m.ResetFrom.IsZero():
			each(wait{forMember, m.joinBy(w), w})
		case w.Phase == leaving, w.Phase == training && w.Left:
			each(wait{forLeave, w.graceFrom(w.Since).Add(m.wait.Drain), w})
		}
	}
	if since := m.lateFrom(); trains && !m.Reminded && !since.IsZero() {
		each(wait{kind: forReset, until: since.Add(m.remindAfter())})
	}
	if limits && m.ShortFrom.IsZero() {
		each(wait{kind: forLateStart, until: m.sayAgain(m.unjoinedFrom())})
	}
	m.waitsForStarts(each, starts)
}

// sayAfter is how long a job waits for slots, or for a start, before its log says so, and says so
// again.
var sayAfter = retry.Backoff{First: 5 * time.Second}

// sayAgain returns when the log next says what the job has been waiting for since the given time:
// each time the wait has doubled.
func (m *Machine) sayAgain(since time.Time) time.Time {
	after := sayAfter.First
	for !since.Add(after).After(m.Stepped) {
		after = sayAfter.Next(after)
	}
	return since.Add(after)
}

// remindOfShort logs which slots the job waits for.
func (m *Machine) remindOfShort(now time.Time) {
	why := ""
	if !m.Started && m.size.Min < m.size.NP {
		why = fmt.Sprintf(" (-np: the first start needs them all, and later ones %d)", m.size.Min)
	}
	m.log(Warn, "after %v the job still waits for %s%s; up to %v (--elastic-timeout)",
		now.Sub(m.ShortFrom).Round(time.Second), m.waitWords(now, forSlots), why, m.wait.Elastic)
}

// remindOfStarts logs which workers have not joined since they were started.
func (m *Machine) remindOfStarts(now time.Time) {
	from := ""
	if slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.Phase == starting && w.Since.After(w.Begun) }) {
		from = " after its start or its last report that it prepares"
	}
	m.log(Info, "after %v the job still waits for %s; up to %v (--start-timeout)%s",
		now.Sub(m.unjoinedFrom()).Round(time.Second), m.waitWords(now, forJoin), m.wait.Start, from)
}

// unjoinedFrom returns the time from which the log counts the wait for starting workers. Neither a
// worker's reports that it prepares nor the joins of others hide that the worker does not join.
func (m *Machine) unjoinedFrom() time.Time {
	from := m.StartsFrom
	for _, w := range m.workers {
		if w.Phase == starting && w.Begun.Before(from) {
			from = w.Begun
		}
	}
	return from
}

// lateFrom returns the time since which members have to join the next world or leave this one;
// zero: they do not have to.
func (m *Machine) lateFrom() time.Time {
	if !m.ResetFrom.IsZero() {
		return m.ResetFrom
	}
	return m.ChangeFrom
}

// waitsForStarts calls each for the waits whose deadlines need no action beyond the reconcile of
// each step. They end by that step.
func (m *Machine) waitsForStarts(each func(wait), starts bool) {
	if m.rampUntil.After(m.Stepped) {
		each(wait{kind: forRamp, until: m.rampUntil})
	}
	if m.StartsFrom.IsZero() || m.queued == 0 && !(starts && m.size.Elastic) {
		return
	}
	if until := m.StartsFrom.Add(m.wait.Start); until.After(m.Stepped) {
		each(wait{kind: forStarts, until: until})
	}
}

// startBy returns the join deadline of a starting worker; false: it has none. A job that is not
// elastic may run a command that never joins, so without a join a worker has a deadline only until
// its process runs. Workers that only run tasks have none.
func (m *Machine) startBy(w *Worker) (time.Time, bool) {
	switch {
	case m.size.TasksOnly:
		return time.Time{}, false
	case m.size.Elastic:
		return w.Since.Add(m.wait.Start), true
	case m.Joined.IsZero():
		return w.Since.Add(m.wait.Start), w.pid == 0
	case m.Joined.After(w.Since):
		return m.Joined.Add(m.wait.Start), true
	}
	return w.Since.Add(m.wait.Start), true
}

// notStarted describes what a worker has failed to do by its deadline.
func (m *Machine) notStarted(w *Worker) string {
	if w.pid == 0 {
		return fmt.Sprintf("has no process %v after it was to start (--start-timeout)", m.wait.Start)
	}
	return fmt.Sprintf("did not join within %v of its start (--start-timeout)", m.wait.Start)
}

// waitsForDone calls each for the waits of a job whose training is done.
func (m *Machine) waitsForDone(each func(wait)) {
	for _, w := range m.workers {
		switch {
		case w.Phase == stopping:
		case !w.Done:
			each(wait{forDone, m.doneBy(w), w})
		default:
			if !w.Reminded {
				each(wait{forReminder, w.DoneFrom.Add(m.wait.Exit / 2), w})
			}
			each(wait{forExit, w.DoneFrom.Add(m.wait.Exit), w})
		}
	}
}

// clocks returns the start times of all waits, which resume shifts.
func (m *Machine) clocks() []*time.Time {
	all := []*time.Time{
		&m.Joined, &m.ShortFrom, &m.ResetFrom, &m.ChangeFrom, &m.DoneFrom, &m.EndFrom, &m.StartsFrom, &m.DeadFrom,
		&m.partings.From,
	}
	for i := range m.Taken {
		all = append(all, &m.Taken[i].Until)
	}
	for _, w := range m.workers {
		all = append(all, &w.Since, &w.Begun, &w.WroteAt, &w.DoneFrom, &w.MovedFrom)
	}
	return slices.DeleteFunc(all, func(t *time.Time) bool { return t.IsZero() })
}

// due is the earliest deadline of the waits. It does not change between two steps.
type due struct {
	known bool // a step has computed it
	any   bool // there is a deadline
	at    time.Time
}

func (d due) passed(now time.Time) bool { return d.any && !now.Before(d.at) }

func (m *Machine) nextDue() due {
	d := due{known: true}
	m.waits(func(w wait) {
		if !d.any || w.until.Before(d.at) {
			d.any, d.at = true, w.until
		}
	})
	return d
}

// Deadline returns when the machine must be stepped even without an event; false: never.
func (m *Machine) Deadline() (time.Time, bool) {
	d := m.due
	if !d.known { // the machine was restored, so no step has computed it
		d = m.nextDue()
	}
	return d.at, d.any
}

// endWaits handles the waits whose deadlines have passed.
func (m *Machine) endWaits(now time.Time) {
	var ended []wait
	m.waits(func(w wait) {
		if !now.Before(w.until) {
			ended = append(ended, w)
		}
	})
	slices.SortStableFunc(ended, func(a, b wait) int { return int(a.kind) - int(b.kind) })
	for _, w := range ended {
		m.endWait(now, w)
	}
}

// endWait handles a wait whose deadline has passed.
func (m *Machine) endWait(now time.Time, w wait) {
	if m.Decided && w.kind < forEnds {
		return // a previous wait has ended the job
	}
	switch w.kind {
	case forSlots:
		m.decide(now, m.notEnough(now))
	case forShort:
		m.remindOfShort(now)
	case forLateStart:
		m.remindOfStarts(now)
	case forReset:
		m.remindOfReset(now)
	case forJoin:
		m.stop(now, w.who, m.notStarted(w.who))
	case forMember:
		m.stop(now, w.who, fmt.Sprintf("did not come to the next world within %v", m.wait.Join))
	case forLeave:
		m.stop(now, w.who, "")
	case forLoss:
		m.spreadLoss()
	case forDone:
		m.stopsUndone(now, w.who)
	case forReminder:
		m.remindOfExit(now) // one line names all late workers
	case forExit:
		m.log(Warn, "%s has not exited %v after it reported done (--exit-timeout), stopping it", w.who, m.wait.Exit)
		m.stop(now, w.who, "")
	case forEnds:
		m.Reminded = true
		m.remindOf(func(w *Worker) bool { return w.Phase == stopping }, "end", "--drain-timeout",
			m.EndFrom.Add(m.wait.Drain).Sub(now))
	case forProcess:
		m.giveUpProcess(now, w.who)
	case forReturn, forTaken, forRamp, forStarts: // reconcile evaluates them in each step
	}
}

// shownWaits returns the waits that a status shows, earliest deadline first. Waits of one kind are
// shown once, with the earliest deadline.
func (m *Machine) shownWaits(now time.Time) []job.Wait {
	first := map[waitKind]time.Time{}
	m.waits(func(w wait) {
		kind, until := w.kind, w.until
		switch kind {
		case forProcess:
			kind, until = forLeave, until.Add(-killGrace) // show when the worker is killed
		case forDone:
			until = m.DoneFrom.Add(m.wait.Finish)
		case forMember:
			until = m.ResetFrom.Add(m.wait.Join)
		}
		if t, is := first[kind]; !is || until.Before(t) {
			first[kind] = until
		}
	})
	var all []job.Wait
	for _, kind := range []waitKind{forDone, forExit, forSlots, forMember, forStarts, forJoin, forLeave} {
		until, is := first[kind]
		if what := m.waitWords(now, kind); is && what != "" {
			all = append(all, job.Wait{For: what, Until: until.UTC()})
		}
	}
	slices.SortStableFunc(all, func(a, b job.Wait) int { return a.Until.Compare(b.Until) })
	return all
}

// waitWords describes a kind of wait; empty: a status does not show it.
func (m *Machine) waitWords(now time.Time, kind waitKind) string {
	switch kind {
	case forSlots:
		need := m.size.NP
		if m.Started {
			need = m.size.Min
		}
		there := len(m.withoutTaken(now, m.hosts.Available(now)))
		if m.Started && there >= need {
			return fmt.Sprintf("%d workers, %d joined", need, m.joinedSoFar())
		}
		return fmt.Sprintf("%d slots, %d there%s", need, there, m.lackWords())
	case forMember:
		return m.someNames(training) + " to come to the next world"
	case forStarts:
		if m.queued > 0 {
			return fmt.Sprintf("%d more slots, whose workers start by and by", m.queued)
		}
	case forJoin:
		if m.Joined.IsZero() && !m.size.Elastic {
			return m.namesOf(func(w *Worker) bool { return w.Phase == starting && w.pid == 0 }) + " to start"
		}
		return m.someNames(starting) + " to join"
	case forDone:
		return "the others to be done"
	case forExit:
		return m.namesOf((*Worker).lingers) + ", which reported done, to exit"
	case forLeave:
		return m.someNames(leaving, stopping) + " to end"
	}
	return ""
}
