package driver

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/plan"
)

// noteState notes since when the job has done what it does now.
func (m *machine) noteState(now time.Time) {
	if s := m.doing(); s != m.state {
		m.state, m.stateFrom = s, now
	}
}

func (m *machine) doing() control.State {
	switch {
	case m.finished && m.result == nil:
		return control.Done
	case m.finished:
		return control.Failed
	case m.decided:
		return control.Stopping
	case !m.doneFrom.IsZero():
		return control.Finishing
	case !m.started, !m.shortFrom.IsZero():
		return control.Waiting
	case m.world.Generation == 0:
		return control.Starting
	case !m.resetFrom.IsZero():
		return control.Resetting
	}
	return control.Running
}

// forgetFailures drops the counts of hosts that are gone, so that ever new names do not pile up.
func (m *machine) forgetFailures() {
	if len(m.failures) == 0 {
		return
	}
	listed := make(map[string]bool)
	for _, h := range m.hosts.Listed() {
		listed[h.Name] = true
	}
	for id := range m.failures {
		if !listed[id.Host] {
			delete(m.failures, id)
		}
	}
}

// status tells how the job is doing, without its name, its driver and its events. Beats are what the workers have said
// of themselves; nil: nobody has heard.
func (m *machine) status(now time.Time, beats *stalls) control.Status {
	s := control.Status{
		Time: now, State: m.state, Since: m.stateFrom, Last: m.last,
		Generation: m.world.Generation, Size: m.world.Size(),
		NP: m.size.NP, MinNP: m.size.Min, MaxNP: m.size.Max, Elastic: m.size.Elastic, Resets: m.resets,
		Hosts: []control.Host{}, Waits: []control.Wait{}, Events: []json.RawMessage{},
	}
	if m.state == "" { // nothing has happened yet
		s.State = control.Waiting
	}
	if m.result != nil {
		s.Message = strings.TrimPrefix(m.result.Error(), "driver: ")
	}
	in := maps.Clone(m.bySlot)
	at := make(map[string]int)
	for _, h := range m.hosts.Listed() {
		at[h.Name] = len(s.Hosts)
		host := control.Host{Host: h.Name, Listed: true, Draining: h.Draining, Slots: make([]control.Slot, h.Slots)}
		for i := range h.Slots {
			id := plan.SlotID{Host: h.Name, Index: i}
			host.Slots[i] = m.slotStatus(now, id, in[id], beats)
			delete(in, id)
		}
		s.Hosts = append(s.Hosts, host)
	}
	for _, w := range m.workers { // those that are in no slot of the list
		if in[w.slot] == nil {
			continue
		}
		i, ok := at[w.slot.Host]
		if !ok {
			i = len(s.Hosts)
			at[w.slot.Host] = i
			s.Hosts = append(s.Hosts, control.Host{Host: w.slot.Host})
		}
		s.Hosts[i].Slots = append(s.Hosts[i].Slots, m.slotStatus(now, w.slot, w, beats))
	}
	if !m.finished {
		s.Waits = append(s.Waits, m.waits(now)...)
	}
	return s
}

func (m *machine) slotStatus(now time.Time, id plan.SlotID, w *worker, beats *stalls) control.Slot {
	s := control.Slot{Slot: id.Index, State: control.SlotFree, Failures: m.failures[id]}
	until := func(t time.Time) {
		if !t.IsZero() {
			s.Until = new(t.UTC())
		}
	}
	if hold, is := m.hosts.Held(now, id); is {
		s.Out = control.SlotHeld
		if hold.WhileListed {
			s.Out = control.SlotDrained
		} else if !hold.Until.IsZero() {
			s.Out = control.SlotExcluded
		}
		until(hold.Until)
	} else if x, is := m.hosts.Excluded(now, id); is {
		s.Out = control.SlotExcluded
		until(x.Until)
	}
	if s.Out != "" {
		s.State = s.Out
	}
	if w == nil {
		return s
	}
	s.PID = w.pid
	if w.phase == waiting || w.generation != 0 { // else it never said anything
		s.Commits = new(w.join.Commits)
	}
	if w.generation != 0 && w.generation == m.world.Generation {
		s.Rank = new(w.rank)
		if w.phase == training {
			*s.Commits = max(w.join.Commits, m.commits)
			if beats != nil {
				*s.Commits = max(*s.Commits, beats.commits(w.id, w.generation))
			}
		}
	}
	s.State = slotStates[w.phase]
	s.What = m.whatOf(w)
	if beats != nil && w.phase == training && !w.done {
		if does := beats.what(now, w.id); s.What == "" {
			s.What = does
		} else if does != "" {
			s.What += ", " + does
		}
	}
	return s
}

var slotStates = [...]control.SlotState{
	starting: control.SlotStarting, waiting: control.SlotReady, training: control.SlotTraining,
	leaving: control.SlotLeaving, stopping: control.SlotStopping,
}

// whatOf is what the machine knows of what a worker does that is not in the name of its phase.
func (m *machine) whatOf(w *worker) string {
	switch {
	case w.done:
		return "is done"
	case w.phase == stopping:
		return w.reason
	case w.asked:
		return "was asked to leave"
	case w.phase == training && !m.resetFrom.IsZero():
		return fmt.Sprintf("has not left generation %d", w.generation)
	case w.phase == waiting && w.generation == 0:
		return "stands at the door"
	}
	return ""
}

// waits are those that have an end, the next first.
func (m *machine) waits(now time.Time) []control.Wait {
	var all []control.Wait
	add := func(until time.Time, format string, args ...any) {
		all = append(all, control.Wait{For: fmt.Sprintf(format, args...), Until: until.UTC()})
	}
	done := !m.doneFrom.IsZero()
	switch {
	case m.decided:
	case done:
		m.finishWaits(add)
	case !m.shortFrom.IsZero():
		need, have := m.size.NP, len(m.hosts.Available(now))
		if m.started {
			need = m.size.Min
		}
		add(m.shortFrom.Add(m.wait.Elastic), "%d slots, %d there", need, have)
	}
	if !m.resetFrom.IsZero() && m.any(training) && !m.decided && !done {
		add(m.resetFrom.Add(m.wait.Join), "%s to come to the next world", m.someNames(training))
	}
	var starts, ends time.Time
	for _, w := range m.workers {
		var by time.Time
		limited := true
		switch w.phase {
		case starting:
			if by, limited = m.startBy(w); limited && (starts.IsZero() || by.Before(starts)) {
				starts = by
			}
		case leaving, stopping:
			if by = w.graceFrom(w.since).Add(m.wait.Drain); ends.IsZero() || by.Before(ends) {
				ends = by
			}
		}
	}
	if m.queued > 0 && !m.decided && !done {
		add(m.newsFrom.Add(m.wait.Start), "%d more slots, whose workers start by and by", m.queued)
	}
	if !starts.IsZero() {
		add(starts, "%s to join", m.someNames(starting))
	}
	if !ends.IsZero() {
		add(ends, "%s to end", m.someNames(leaving, stopping))
	}
	slices.SortStableFunc(all, func(a, b control.Wait) int { return a.Until.Compare(b.Until) })
	return all
}

// finishWaits are those of a job whose training is done.
func (m *machine) finishWaits(add func(until time.Time, format string, args ...any)) {
	var first time.Time
	others := false
	for _, w := range m.workers {
		switch {
		case !w.lingers():
			others = others || w.phase != stopping
		case first.IsZero() || w.doneFrom.Before(first):
			first = w.doneFrom
		}
	}
	if others {
		add(m.doneFrom.Add(m.wait.Finish), "the others to be done")
	}
	if !first.IsZero() {
		add(first.Add(m.wait.Exit), "%s, which reported done, to exit", m.namesOf((*worker).lingers))
	}
}

// someNames lists the slots whose workers are in one of the phases, or the first of them where there are many.
func (m *machine) someNames(phases ...phase) string {
	return m.namesOf(func(w *worker) bool { return slices.Contains(phases, w.phase) })
}

func (m *machine) namesOf(is func(*worker) bool) string {
	const most = 8
	var names []string
	n := 0
	for _, w := range m.workers {
		if !is(w) {
			continue
		}
		if n++; n <= most {
			names = append(names, w.slot.String())
		}
	}
	if n > most {
		names = append(names, fmt.Sprintf("and %d others", n-most))
	}
	return strings.Join(names, " ")
}

// recent holds the last events, each an Event or the text of one.
type recent []json.Marshaler

// keptEvents is how many events a status tells.
const keptEvents = 20

func (r *recent) add(e json.Marshaler) {
	if len(*r) == keptEvents {
		*r = append((*r)[:0], (*r)[1:]...)
	}
	*r = append(*r, e)
}

// texts returns them as they stand in an events file.
func (r recent) texts() ([]json.RawMessage, error) {
	all := make([]json.RawMessage, len(r))
	for i, e := range r {
		text, err := json.Marshal(e)
		if err != nil {
			return nil, fmt.Errorf("driver: %w", err)
		}
		all[i] = text
	}
	return all, nil
}
