package decide

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// noteState records when the job's state changes.
func (m *Machine) noteState(now time.Time) {
	if s := m.doing(); s != m.state {
		m.state, m.stateFrom = s, now
	}
}

func (m *Machine) doing() job.State {
	switch {
	case m.finished && m.result == nil:
		return job.Done
	case m.finished:
		return job.Failed
	case m.decided:
		return job.Stopping
	case !m.doneFrom.IsZero():
		return job.Finishing
	case !m.started, !m.shortFrom.IsZero():
		return job.Waiting
	case m.size.TasksOnly && len(m.workers) > 0:
		return job.Running
	case m.world.Generation == 0:
		return job.Starting
	case !m.resetFrom.IsZero():
		return job.Resetting
	}
	return job.Running
}

// forgetFailures deletes the counts of unlisted hosts, so that they do not accumulate when hosts
// come and go under new names.
func (m *Machine) forgetFailures() {
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

// Beats gives access to the workers' heartbeats.
type Beats interface {
	// What describes what a worker is doing; empty: unknown.
	What(now time.Time, id string) string
	// Commits is the number of a worker's last commit in a generation; 0: unknown.
	Commits(id string, generation uint64) uint64
	// Straggler describes how late a worker arrives at operations; nil: unknown.
	Straggler(now time.Time, id string) *job.Straggler
	// Usage is what a worker's processes use. Figures are the numbers that its program has
	// reported; nil: unknown.
	Usage(id string) *job.Usage
	Figures(id string) []job.Figure
	// Where is where in the user's code a worker that holds up others is; empty: unknown.
	Where(id string) string
}

// Status returns the status of the job, without its name, driver and events. beats gives access to
// the workers' heartbeats; nil: no heartbeats are known.
func (m *Machine) Status(now time.Time, beats Beats) job.Status {
	s := job.Status{
		Time: now, State: m.state, Since: m.stateFrom, Last: m.last,
		Generation: m.world.Generation, Size: m.world.Size(),
		NP: m.size.NP, MinNP: m.size.Min, MaxNP: m.size.Max, Elastic: m.size.Elastic, Resets: m.resets,
		Goodput: m.ledger.Until(now),
		Hosts:   []job.Host{}, Waits: []job.Wait{}, Events: []json.RawMessage{},
	}
	if m.state == "" { // before the first input
		s.State = job.Waiting
	}
	if m.finished {
		s.Message, s.Stopped = m.remark(), job.Stopped(job.ExitStatus(m.result))
	}
	if m.result != nil {
		s.Message = strings.TrimPrefix(m.result.Error(), "driver: ")
	}
	in := maps.Clone(m.bySlot)
	at := make(map[string]int)
	for _, h := range m.hosts.Listed() {
		at[h.Name] = len(s.Hosts)
		host := job.Host{Host: h.Name, Listed: true, Draining: h.Draining, Slots: make([]job.Slot, h.Slots)}
		for i := range h.Slots {
			id := plan.SlotID{Host: h.Name, Index: i}
			host.Slots[i] = m.slotStatus(now, id, in[id], beats)
			delete(in, id)
		}
		s.Hosts = append(s.Hosts, host)
	}
	for _, w := range m.workers { // workers in slots that are not listed
		if in[w.slot] == nil {
			continue
		}
		i, ok := at[w.slot.Host]
		if !ok {
			i = len(s.Hosts)
			at[w.slot.Host] = i
			s.Hosts = append(s.Hosts, job.Host{Host: w.slot.Host})
		}
		s.Hosts[i].Slots = append(s.Hosts[i].Slots, m.slotStatus(now, w.slot, w, beats))
	}
	if !m.finished {
		s.Waits = append(s.Waits, m.shownWaits(now)...)
	}
	return s
}

func (m *Machine) slotStatus(now time.Time, id plan.SlotID, w *Worker, beats Beats) job.Slot {
	s := job.Slot{Slot: id.Index, State: job.SlotFree, Failures: m.failures[id].all}
	until := func(t time.Time) {
		if !t.IsZero() {
			s.Until = new(t.UTC())
		}
	}
	if hold, is := m.hosts.Held(now, id); is {
		s.Out = job.SlotHeld
		if hold.WhileListed {
			s.Out = job.SlotDrained
		} else if !hold.Until.IsZero() {
			s.Out = job.SlotExcluded
		}
		until(hold.Until)
	} else if x, is := m.hosts.Excluded(now, id); is {
		s.Out = job.SlotExcluded
		until(x.Until)
	}
	if s.Out != "" {
		s.State = s.Out
	}
	if w == nil {
		return s
	}
	s.PID = w.pid
	if w.phase == waiting || w.generation != 0 { // the worker has joined at least once
		s.Commits = new(w.join.Commits)
	}
	if w.generation != 0 && w.generation == m.world.Generation {
		s.Rank = new(w.rank)
		if w.phase == training {
			*s.Commits = max(w.join.Commits, m.commits)
			if beats != nil {
				*s.Commits = max(*s.Commits, beats.Commits(w.id, w.generation))
			}
		}
	}
	s.State = slotStates[w.phase]
	s.What = m.whatOf(now, w)
	if beats != nil && w.phase == training {
		s.Straggler = beats.Straggler(now, w.id)
		s.Where = beats.Where(w.id)
		s.Usage, s.Figures = beats.Usage(w.id), beats.Figures(w.id)
	}
	if beats != nil && w.phase == training && !w.done {
		if does := beats.What(now, w.id); s.What == "" {
			s.What = does
		} else if does != "" {
			s.What += ", " + does
		}
	}
	return s
}

var slotStates = [...]job.SlotState{
	starting: job.SlotStarting, waiting: job.SlotReady, training: job.SlotTraining,
	leaving: job.SlotLeaving, stopping: job.SlotStopping,
}

// whatOf describes what a worker is doing beyond its phase, as far as the machine knows.
func (m *Machine) whatOf(now time.Time, w *Worker) string {
	switch {
	case w.done:
		return "is done"
	case w.phase == stopping:
		return w.reason
	case m.reminded && m.owesCommit(w):
		return fmt.Sprintf("has not left at a commit for %v since it was told that the hosts changed", job.Round(now.Sub(m.changeFrom)))
	case w.asked:
		return "was asked to leave"
	case w.phase == training && !m.resetFrom.IsZero():
		return fmt.Sprintf("has not left generation %d", w.generation)
	case w.spare:
		return "is a spare"
	case w.phase == waiting && w.generation == 0:
		return "waits for the next world"
	}
	return ""
}

// someNames lists the slots of workers in one of the phases, at most eight.
func (m *Machine) someNames(phases ...phase) string {
	return m.namesOf(func(w *Worker) bool { return slices.Contains(phases, w.phase) })
}

func (m *Machine) namesOf(is func(*Worker) bool) string {
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
