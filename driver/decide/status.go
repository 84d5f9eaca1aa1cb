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
	if s := m.doing(); s != m.State {
		m.State, m.StateFrom = s, now
	}
}

func (m *Machine) doing() job.State {
	switch {
	case m.Over && m.Result.Err == nil:
		return job.Done
	case m.Over:
		return job.Failed
	case m.Decided:
		return job.Stopping
	case !m.DoneFrom.IsZero():
		return job.Finishing
	case !m.Started, !m.ShortFrom.IsZero():
		return job.Waiting
	case m.size.TasksOnly && len(m.workers) > 0:
		return job.Running
	case m.Current.Generation == 0:
		return job.Starting
	case !m.ResetFrom.IsZero():
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

// Beat is what the heartbeats of a worker show.
type Beat struct {
	// What describes what the worker is doing, and Where where in the user's code it is if it holds
	// up others; empty: unknown.
	What, Where string
	// Commits is the number of its last commit in its generation; 0: unknown.
	Commits uint64
	// Straggler describes how late it arrives at operations; nil: unknown.
	Straggler *job.Straggler
	// Usage is what its processes use, and Figures are the numbers that its program has reported;
	// nil: unknown.
	Usage   *job.Usage
	Figures []job.Figure
}

// Status returns the status of the job, without its name, driver and events. beats returns what the
// heartbeats of a worker in a generation show; nil: no heartbeats are known.
func (m *Machine) Status(now time.Time, beats func(id string, generation uint64) Beat) job.Status {
	if beats == nil {
		beats = func(string, uint64) Beat { return Beat{} }
	}
	s := job.Status{
		Time: now, State: m.State, Since: m.StateFrom, Last: m.Stepped,
		Generation: m.Current.Generation, Size: m.Current.Size(),
		NP: m.size.NP, MinNP: m.size.Min, MaxNP: m.size.Max, Elastic: m.size.Elastic, Resets: m.Resets,
		Goodput: m.ledger.Until(now),
		Hosts:   []job.Host{}, Waits: []job.Wait{}, Events: []json.RawMessage{},
	}
	if m.State == "" { // before the first input
		s.State = job.Waiting
	}
	if m.Over {
		s.Message, s.Stopped = m.remark(), job.Stopped(job.ExitStatus(m.Result.Err))
	}
	if m.Result.Err != nil {
		s.Message = strings.TrimPrefix(m.Result.Err.Error(), "driver: ")
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
	if !m.Over {
		s.Waits = append(s.Waits, m.shownWaits(now)...)
	}
	return s
}

func (m *Machine) slotStatus(now time.Time, id plan.SlotID, w *Worker, beats func(id string, generation uint64) Beat) job.Slot {
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
	var b Beat
	if w.Phase == training {
		b = beats(w.id, w.Generation)
	}
	if w.Phase == waiting || w.Generation != 0 { // the worker has joined at least once
		s.Commits = new(w.join.Commits)
	}
	if w.Generation != 0 && w.Generation == m.Current.Generation {
		s.Rank = new(w.Rank)
		if w.Phase == training {
			*s.Commits = max(w.join.Commits, m.Commits, b.Commits)
		}
	}
	s.State = slotStates[w.Phase]
	s.What = m.whatOf(now, w)
	s.Straggler, s.Where, s.Usage, s.Figures = b.Straggler, b.Where, b.Usage, b.Figures
	if does := b.What; does != "" && !w.Done {
		if s.What != "" {
			does = s.What + ", " + does
		}
		s.What = does
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
	case w.Done:
		return "is done"
	case w.Phase == stopping:
		return w.Reason
	case m.Reminded && m.owesCommit(w):
		return fmt.Sprintf("has not left at a commit for %v since it was told that the hosts changed", job.Round(now.Sub(m.ChangeFrom)))
	case w.Asked:
		return "was asked to leave"
	case w.Phase == training && !m.ResetFrom.IsZero():
		return fmt.Sprintf("has not left generation %d", w.Generation)
	case w.Spare:
		return "is a spare"
	case w.Phase == waiting && w.Generation == 0:
		return "waits for the next world"
	}
	return ""
}

// someNames lists the slots of workers in one of the phases, at most eight.
func (m *Machine) someNames(phases ...phase) string {
	return m.namesOf(func(w *Worker) bool { return slices.Contains(phases, w.Phase) })
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
