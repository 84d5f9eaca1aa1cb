package replay

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// state is the state of a job that follows from its events.
type state struct {
	job   job.Status  // without hosts
	hosts []*job.Host // in order of appearance, with all slots that they ever had
}

func newState(r *Recording) state {
	return state{job: job.Status{
		Job: r.Run, State: job.Waiting, Begun: r.Begun(), Since: r.Begun(), Elastic: true, Driver: 1,
		Waits: []job.Wait{},
	}}
}

// host returns the host with the name, and adds it if it is new.
func (s *state) host(name string) *job.Host {
	for _, h := range s.hosts {
		if h.Host == name {
			return h
		}
	}
	h := &job.Host{Host: name}
	s.hosts = append(s.hosts, h)
	return h
}

// slotOf returns the host's slot with the index, and adds it if it is new.
func slotOf(h *job.Host, index int) *job.Slot {
	for len(h.Slots) <= index {
		h.Slots = append(h.Slots, job.Slot{Slot: len(h.Slots), State: job.SlotFree})
	}
	return &h.Slots[index]
}

// maxSlots bounds the slots of a host: an index in a file may be any number.
const maxSlots = 4096

// apply applies the next event.
func (s *state) apply(e *job.Entry, line []byte) {
	s.job.Last = e.Time
	switch e.Name {
	case job.HostsFound:
		s.list(e.Hosts)
	case job.WorldPublished:
		s.published(e)
	case job.Reset:
		s.enter(job.Resetting, e.Time)
		s.job.Resets = e.Count
	case job.Scaled:
		if e.MinNP != nil {
			s.job.MinNP = *e.MinNP
		}
		if e.MaxNP != nil {
			s.job.MaxNP = *e.MaxNP
		}
	case job.JobDone:
		s.done(e, line)
	}
	if e.Host == "" || e.Slot != nil && (*e.Slot < 0 || *e.Slot >= maxSlots) {
		return
	}
	h := s.host(e.Host)
	if e.Slot != nil {
		slotEvent(slotOf(h, *e.Slot), e)
		return
	}
	for i := range h.Slots {
		slotEvent(&h.Slots[i], e)
	}
}

func (s *state) enter(state job.State, at time.Time) { s.job.State, s.job.Since = state, at }

// list applies a list of hosts.
func (s *state) list(found []job.FoundHost) {
	for _, h := range s.hosts {
		h.Listed = false
	}
	for _, f := range found {
		h := s.host(f.Host)
		h.Listed, h.Draining = true, f.Draining
		if f.Slots > 0 {
			slotOf(h, min(f.Slots, maxSlots)-1)
		}
	}
}

// published applies a published world.
func (s *state) published(e *job.Entry) {
	s.job.Generation, s.job.Size = e.Generation, e.Size
	s.enter(job.Running, e.Time)
	for _, h := range s.hosts {
		for i := range h.Slots {
			if slot := &h.Slots[i]; slot.Rank != nil {
				slot.Rank, slot.State = nil, job.SlotLeaving
			}
		}
	}
	for _, p := range e.Slots {
		if p.Slot < 0 || p.Slot >= maxSlots {
			continue
		}
		slot := slotOf(s.host(p.Host), p.Slot)
		slot.Rank, slot.PID, slot.State = new(p.Rank), p.PID, job.SlotTraining
	}
}

func (s *state) done(e *job.Entry, line []byte) {
	s.enter(job.Done, e.Time)
	if s.job.Message = e.Message; e.Status != 0 {
		s.job.State, s.job.Stopped = job.Failed, job.Stopped(e.Status)
	}
	var end struct {
		Goodput job.Goodput `json:"goodput"`
	}
	if json.Unmarshal(line, &end) == nil {
		s.job.Goodput = end.Goodput
	}
	s.job.Driver = 0
}

// slotEvent changes a slot according to an event.
func slotEvent(slot *job.Slot, e *job.Entry) {
	switch e.Name {
	case job.WorkerStarted:
		*slot = job.Slot{Slot: slot.Slot, State: job.SlotStarting, PID: e.PID, Failures: slot.Failures}
	case job.WorkerReady:
		slot.State = job.SlotReady
	case job.WorkerDying:
		slot.State = job.SlotStopping
	case job.WorkerExited:
		if slot.PID, slot.Rank, slot.State = 0, nil, job.SlotFree; slot.Out != "" {
			slot.State = slot.Out
		}
		if e.Cause == "failed" {
			slot.Failures++
		}
	case job.Draining:
		slot.State = job.SlotLeaving
	case job.DrainAsked:
		slot.Out = job.SlotDrained
	case job.Excluded:
		if slot.Out, slot.Until = job.SlotExcluded, e.Until; e.Until == nil {
			slot.Out = job.SlotHeld
		}
	case job.Returned:
		if slot.Out, slot.Until = "", nil; slot.PID == 0 {
			slot.State = job.SlotFree
		}
	case job.Stalled:
		slot.What = e.What
	case job.Located:
		slot.Where = e.Where
	case job.StallEnded:
		slot.What, slot.Where = "", ""
	}
	if slot.PID == 0 && slot.Out != "" {
		slot.State = slot.Out
	}
}

// status returns a copy of the status for a time at which the job had made that many commits.
func (s *state) status(at time.Time, commits uint64) job.Status {
	c := s.job
	c.Time, c.NP = at, s.job.Size
	if c.State == job.Waiting && slices.ContainsFunc(s.hosts, func(h *job.Host) bool {
		return slices.ContainsFunc(h.Slots, func(slot job.Slot) bool { return slot.PID != 0 })
	}) {
		c.State = job.Starting
	}
	c.Hosts, c.Events = []job.Host{}, []json.RawMessage{}
	for _, h := range s.hosts {
		busy := slices.ContainsFunc(h.Slots, func(slot job.Slot) bool { return slot.PID != 0 })
		if !h.Listed && !busy {
			continue
		}
		shown := *h
		shown.Slots = slices.Clone(h.Slots)
		for i := range shown.Slots {
			if slot := &shown.Slots[i]; slot.Rank != nil {
				slot.Commits = new(commits)
			}
		}
		c.Hosts = append(c.Hosts, shown)
	}
	return c
}
