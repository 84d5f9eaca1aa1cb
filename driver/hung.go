package driver

import (
	"fmt"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
)

// What workers say of themselves finds its way here only where somebody holds up the others: see stalls.
type (
	// workerStalled: the others of its world wait for it, and for how long and what it does instead is told in words.
	workerStalled struct {
		id         string
		generation uint64
		what       string
	}
	// workerStirred: they do not any more.
	workerStirred struct {
		id         string
		generation uint64
	}
	// workerHung: they have for too long.
	workerHung struct {
		id         string
		generation uint64
		what       string
	}
	// workerMoved: one that has not come to the next world was on its way there so long ago: it has
	// connected to another one, or has begun to join.
	workerMoved struct {
		id         string
		generation uint64
		ago        time.Duration
	}
	// workerDying: it is as good as dead, as is told in words, though its process is still there.
	workerDying struct{ id, what string }
	// worldJammed: all wait, and for nobody.
	worldJammed struct {
		generation uint64
		what       string
	}
)

// remind names workers that are late, and what they do, if that is known.
type remind struct {
	late  []*worker
	to    string        // what they are to do
	limit string        // the flag that bounds it; empty: nothing does
	left  time.Duration // until then
}

// member returns a worker that trains in the current world while that is of interest; nil: it does not.
func (m *machine) member(id string, generation uint64) *worker {
	w := m.find(id)
	if w == nil || w.phase != training || generation != m.world.Generation || m.decided || !m.doneFrom.IsZero() {
		return nil
	}
	return w
}

func (m *machine) stalled(now time.Time, e workerStalled) {
	w := m.member(e.id, e.generation)
	if w == nil || !w.stalledFrom.IsZero() {
		return
	}
	w.stalledFrom = now
	m.emit(now, Stalled, append(w.fields(), Field{"generation", e.generation}, Field{"what", e.what})...)
	switch n := m.holdUp(); {
	case n <= mostNamed:
		m.log(logrus.WarnLevel, "%s holds up the job: %s", w, e.what)
	case n == mostNamed+1:
		m.log(logrus.WarnLevel, "more than %d workers hold up the job; hvdrun status tells what each does", mostNamed)
	}
}

// holdUp is how many workers hold up the job.
func (m *machine) holdUp() (n int) {
	for _, w := range m.workers {
		if !w.stalledFrom.IsZero() {
			n++
		}
	}
	return n
}

// stirred notes that a worker holds up nobody any more: it goes on, or has come to a reset.
func (m *machine) stirred(now time.Time, w *worker) {
	if w == nil || w.stalledFrom.IsZero() {
		return
	}
	held, few := now.Sub(w.stalledFrom), m.holdUp() <= mostNamed
	w.stalledFrom = time.Time{}
	m.emit(now, StallEnded, append(w.fields(), Field{"generation", w.generation}, Field{"seconds", held.Seconds()})...)
	if few {
		m.log(logrus.WarnLevel, "%s goes on, %v after it was named", w, round(held))
	}
}

// moved notes when a worker has last been seen on its way to the next world.
func (m *machine) moved(now time.Time, e workerMoved) {
	w, at := m.member(e.id, e.generation), now.Add(-e.ago)
	if w != nil && !m.resetFrom.IsZero() && at.After(w.movedFrom) {
		w.movedFrom = at
	}
}

// joinBy is until when a member must have come to the next world.
func (m *machine) joinBy(w *worker) time.Time {
	if w.movedFrom.After(m.resetFrom) {
		return w.movedFrom.Add(m.wait.Join)
	}
	return m.resetFrom.Add(m.wait.Join)
}

// hung stops a worker that the others have waited for too long, and tells them at once that it is lost: it may be long
// before its process ends.
func (m *machine) hung(now time.Time, e workerHung) {
	w := m.member(e.id, e.generation)
	if w == nil {
		return
	}
	m.stop(now, w, "held up the job: "+e.what)
	m.lose(now, w)
	m.deadFrom = now.Add(-lossAfter)
}

// dying gives a worker up before its process has ended, which can take as long as writing its memory to a core file.
func (m *machine) dying(now time.Time, e workerDying) {
	w := m.find(e.id)
	if w == nil || w.done || w.phase == stopping {
		return
	}
	member := m.member(e.id, w.generation) != nil
	m.stop(now, w, e.what)
	if member {
		m.lose(now, w)
		m.deadFrom = now.Add(-lossAfter)
	}
}

func (m *machine) jammed(now time.Time, e worldJammed) {
	if e.generation != m.world.Generation || !m.resetFrom.IsZero() || m.decided || !m.doneFrom.IsZero() {
		return
	}
	m.emit(now, Stalled, Field{"host", nil}, Field{"slot", nil}, Field{"generation", e.generation}, Field{"what", e.what})
	m.log(logrus.WarnLevel, "%s", e.what)
}

// String names the worker for a person: by rank, slot and process.
func (w *worker) String() string { return fmt.Sprintf("rank %d (%s, pid %d)", w.rank, w.slot, w.pid) }

func (w *worker) fields() []Field {
	return []Field{{"host", w.slot.Host}, {"slot", w.slot.Index}, {"pid", w.pid}, {"rank", w.rank}}
}

// remindAfter is how long the driver waits in silence for members to come to the next world.
func (m *machine) remindAfter() time.Duration {
	if warning := m.wait.StallWarning; warning > 0 && warning < m.wait.Join {
		return warning
	}
	return m.wait.Join / 2
}

// remindOf asks for a reminder of the workers of whom that is true.
func (m *machine) remindOf(late func(*worker) bool, to, limit string, left time.Duration) {
	r := remind{to: to, limit: limit, left: left}
	for _, w := range m.workers {
		if late(w) {
			r.late = append(r.late, w)
		}
	}
	if len(r.late) > 0 {
		m.do(r)
	}
}

// remindWhenDue reminds of members that have not come to the next world, or have found no commit at which to leave this one.
func (m *machine) remindWhenDue(now time.Time) {
	if at, ok := m.remindAt(); !ok || now.Before(at) {
		return
	}
	m.reminded = true
	if m.resetFrom.IsZero() {
		m.remindOf(func(w *worker) bool { return w.phase == training && !w.wanted }, "leave at a commit", "", 0)
		return
	}
	left := m.resetFrom.Add(m.wait.Join).Sub(now)
	m.remindOf(func(w *worker) bool { return w.phase == training }, "come to the next world", "--join-timeout", left)
}

// remindAt returns when that is.
func (m *machine) remindAt() (time.Time, bool) {
	switch {
	case m.reminded || m.decided || !m.doneFrom.IsZero():
	case !m.resetFrom.IsZero():
		return m.resetFrom.Add(m.remindAfter()), true
	case !m.removeFrom.IsZero():
		return m.removeFrom.Add(m.remindAfter()), true
	}
	return time.Time{}, false
}

// remindOfEnd reminds, once, of workers that do not end when the job does.
func (m *machine) remindOfEnd(now time.Time) {
	if m.endFrom.IsZero() {
		m.endFrom, m.reminded = now, false
	}
	if at, ok := m.remindOfEndAt(); !ok || now.Before(at) {
		return
	}
	m.reminded = true
	m.remindOf(func(w *worker) bool { return w.phase == stopping }, "end", "--drain-timeout", m.endFrom.Add(m.wait.Drain).Sub(now))
}

func (m *machine) remindOfEndAt() (time.Time, bool) {
	return m.endFrom.Add(min(m.remindAfter(), m.wait.Drain/2)), !m.endFrom.IsZero() && !m.reminded
}

// lingers: it has reported done, and its process is still there.
func (w *worker) lingers() bool { return w.done && w.phase != stopping }

// remindOfExit reminds, once of each, of workers that have reported done and do not exit.
func (m *machine) remindOfExit(now time.Time) {
	var late []*worker
	left := m.wait.Exit
	for _, w := range m.workers {
		if w.lingers() && !w.reminded && !now.Before(w.doneFrom.Add(m.wait.Exit/2)) {
			w.reminded = true
			late, left = append(late, w), min(left, w.doneFrom.Add(m.wait.Exit).Sub(now))
		}
	}
	if len(late) > 0 {
		m.do(remind{late, "exit after they reported done", "--exit-timeout", left})
	}
}

// remind says who is late, with what is known of each, in one line.
func (l *loop) remind(a remind) {
	if a.limit != "" {
		l.stalls.await(l.clock.now(), a.late)
	}
	names := make([]string, 0, mostNamed+1)
	for _, w := range a.late[:min(len(a.late), mostNamed)] {
		name := w.String()
		if what := l.stalls.what(l.clock.now(), w.id); what != "" {
			name += " is " + what
		}
		names = append(names, name)
	}
	if more := len(a.late) - mostNamed; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	most := ""
	if a.limit != "" {
		most = fmt.Sprintf(", %v at most (%s),", round(a.left), a.limit)
	}
	l.cfg.Log.Warnf("still waiting%s for workers to %s: %s", most, a.to, strings.Join(names, "; "))
}

// watchStalls looks at what the workers say until ctx ends.
func (l *loop) watchStalls(done <-chan struct{}) {
	ticker := time.NewTicker(l.stalls.pause())
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-done:
			return
		}
		for _, ev := range l.stalls.look(l.clock.now()) {
			l.post(ev)
		}
	}
}
