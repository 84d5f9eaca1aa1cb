package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// wait is something that the machine waits for, with the end of its patience. All of them stand in
// the table that waits goes through. It says when the machine must be stepped, what is done at the
// end, and what a status tells.
type wait struct {
	kind  waitKind
	until time.Time
	who   *Worker // nil: nobody in particular
}

// waitKind is what is waited for.
type waitKind uint8

// The kinds of waits, in the order in which the machine acts on those that end at the same time.
const (
	forSlots    waitKind = iota // enough slots, or workers, for a world
	forReset                    // the log names those that do not come to the next world, or do not leave this one
	forJoin                     // a worker that starts joins
	forMember                   // a member of the world that is being left joins again
	forLeave                    // a worker that was dismissed exits, or one that left writes its last checkpoint
	forLoss                     // members notice a death by themselves
	forDone                     // the others are done after the first
	forReminder                 // the log names those that are done and do not exit
	forExit                     // a worker that is done exits
	forReturn                   // an exclusion ends
	forRamp                     // a worker that starts does not count for its host any more
	forNews                     // some worker that starts joins
	forEnds                     // the log names workers that do not end when the job does
	forProcess                  // the process of a worker that is being stopped ends
)

// waits calls each with everything that the machine waits for now.
func (m *Machine) waits(each func(wait)) {
	if m.finished {
		return
	}
	switch {
	case m.decided:
		if !m.endFrom.IsZero() && !m.reminded {
			each(wait{kind: forEnds, until: m.endFrom.Add(min(m.remindAfter(), m.wait.Drain/2))})
		}
	case !m.doneFrom.IsZero():
		m.waitsForDone(each)
	default:
		m.waitsForWorld(each)
	}
	if t, ok := m.hosts.NextReturn(); ok && !m.decided {
		each(wait{kind: forReturn, until: t})
	}
	for _, w := range m.workers {
		if w.phase == stopping {
			each(wait{forProcess, m.endsBy(w), w})
		}
	}
}

// waitsForWorld are those of a job that trains, or is about to.
func (m *Machine) waitsForWorld(each func(wait)) {
	if !m.shortFrom.IsZero() {
		each(wait{kind: forSlots, until: m.shortFrom.Add(m.wait.Elastic)})
	}
	if !m.deadFrom.IsZero() {
		each(wait{kind: forLoss, until: m.deadFrom.Add(lossAfter)})
	}
	trains, starts := false, false
	for _, w := range m.workers {
		trains = trains || w.inWorld()
		starts = starts || w.phase == starting
		switch {
		case w.phase == starting:
			if by, limited := m.startBy(w); limited {
				each(wait{forJoin, by, w})
			}
		case w.inWorld() && !m.resetFrom.IsZero():
			each(wait{forMember, m.joinBy(w), w})
		case w.phase == leaving, w.phase == training && w.left:
			each(wait{forLeave, w.graceFrom(w.since).Add(m.wait.Drain), w})
		}
	}
	if since := m.lateFrom(); trains && !m.reminded && !since.IsZero() {
		each(wait{kind: forReset, until: since.Add(m.remindAfter())})
	}
	m.waitsForStarts(each, starts)
}

// lateFrom is since when members are to come to the next world, or to leave this one; zero: they
// are to do neither.
func (m *Machine) lateFrom() time.Time {
	if !m.resetFrom.IsZero() {
		return m.resetFrom
	}
	return m.removeFrom
}

// waitsForStarts are those at whose end nothing is done but what each step does. When that was,
// they are over.
func (m *Machine) waitsForStarts(each func(wait), starts bool) {
	if m.rampUntil.After(m.last) {
		each(wait{kind: forRamp, until: m.rampUntil})
	}
	if m.newsFrom.IsZero() || m.queued == 0 && !(starts && m.size.Elastic) {
		return
	}
	if until := m.newsFrom.Add(m.wait.Start); until.After(m.last) {
		each(wait{kind: forNews, until: until})
	}
}

// waitsForDone are those of a job whose training is done.
func (m *Machine) waitsForDone(each func(wait)) {
	for _, w := range m.workers {
		switch {
		case w.phase == stopping:
		case !w.done:
			each(wait{forDone, w.graceFrom(m.doneFrom).Add(m.wait.Finish), w})
		default:
			if !w.reminded {
				each(wait{forReminder, w.doneFrom.Add(m.wait.Exit / 2), w})
			}
			each(wait{forExit, w.doneFrom.Add(m.wait.Exit), w})
		}
	}
}

// clocks are the times from which waits count.
func (m *Machine) clocks() []*time.Time {
	all := []*time.Time{
		&m.joined, &m.shortFrom, &m.resetFrom, &m.removeFrom, &m.doneFrom, &m.endFrom, &m.newsFrom, &m.deadFrom,
	}
	for _, w := range m.workers {
		all = append(all, &w.since, &w.begun, &w.wroteAt, &w.doneFrom, &w.movedFrom)
	}
	return slices.DeleteFunc(all, func(t *time.Time) bool { return t.IsZero() })
}

// Deadline returns when the machine must be stepped again even if nothing happens; false: never.
func (m *Machine) Deadline() (time.Time, bool) {
	var next time.Time
	m.waits(func(w wait) {
		if next.IsZero() || w.until.Before(next) {
			next = w.until
		}
	})
	return next, !next.IsZero()
}

// endWaits acts on the waits that have ended.
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

// endWait acts on one that has ended.
func (m *Machine) endWait(now time.Time, w wait) {
	if m.decided && w.kind < forEnds {
		return // an earlier one has ended the job
	}
	switch w.kind {
	case forSlots:
		m.decide(now, m.notEnough(now))
	case forReset:
		m.remindOfReset(now)
	case forJoin:
		m.stop(now, w.who, fmt.Sprintf("did not join within %v of its start", m.wait.Start))
	case forMember:
		m.stop(now, w.who, fmt.Sprintf("did not come to the next world within %v", m.wait.Join))
	case forLeave:
		m.stop(now, w.who, "")
	case forLoss:
		m.spreadLoss()
	case forDone:
		m.stopUndone(now, w.who)
	case forReminder:
		m.remindOfExit(now) // the first names all who are late
	case forExit:
		m.log(Warn, "%s has not exited %v after it reported done (--exit-timeout), stopping it", w.who, m.wait.Exit)
		m.stop(now, w.who, "")
	case forEnds:
		m.reminded = true
		m.remindOf(func(w *Worker) bool { return w.phase == stopping }, "end", "--drain-timeout",
			m.endFrom.Add(m.wait.Drain).Sub(now))
	case forProcess:
		m.giveUpProcess(now, w.who)
	case forReturn, forRamp, forNews: // reconcile looks at what holds now
	}
}

// shownWaits are those that a status tells, the next first. What several workers are to do is told
// once, with the end of the first.
func (m *Machine) shownWaits(now time.Time) []job.Wait {
	first := map[waitKind]time.Time{}
	m.waits(func(w wait) {
		kind, until := w.kind, w.until
		switch kind {
		case forProcess:
			kind, until = forLeave, until.Add(-killGrace) // then it is killed
		case forDone:
			until = m.doneFrom.Add(m.wait.Finish)
		case forMember:
			until = m.resetFrom.Add(m.wait.Join)
		}
		if t, is := first[kind]; !is || until.Before(t) {
			first[kind] = until
		}
	})
	var all []job.Wait
	for _, kind := range []waitKind{forDone, forExit, forSlots, forMember, forNews, forJoin, forLeave} {
		until, is := first[kind]
		if what := m.waitWords(now, kind); is && what != "" {
			all = append(all, job.Wait{For: what, Until: until.UTC()})
		}
	}
	slices.SortStableFunc(all, func(a, b job.Wait) int { return a.Until.Compare(b.Until) })
	return all
}

// waitWords says what is waited for; empty: a person need not know.
func (m *Machine) waitWords(now time.Time, kind waitKind) string {
	switch kind {
	case forSlots:
		need := m.size.NP
		if m.started {
			need = m.size.Min
		}
		return fmt.Sprintf("%d slots, %d there", need, len(m.hosts.Available(now)))
	case forMember:
		return m.someNames(training) + " to come to the next world"
	case forNews:
		if m.queued > 0 {
			return fmt.Sprintf("%d more slots, whose workers start by and by", m.queued)
		}
	case forJoin:
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
