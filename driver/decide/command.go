package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

func refuse(format string, args ...any) error {
	return &job.RefusedError{Reason: fmt.Sprintf(format, args...)}
}

// command validates a command and records its request in the facts; reconcile does the rest.
func (m *Machine) command(now time.Time, c job.Command) {
	done, err := m.carryOut(now, c)
	if c.By != (audit.Who{}) {
		outcome := audit.Done
		if err != nil {
			outcome = audit.Refused(err)
		}
		m.do(EmitEvent{job.AuditEvent(now, c.Record(outcome))})
	}
	m.do(Answer{done, err})
}

func (m *Machine) carryOut(now time.Time, c job.Command) (string, error) {
	switch {
	case m.Decided:
		return "", refuse("the job is ending: its workers are being stopped")
	case !m.DoneFrom.IsZero():
		return "", refuse("the job is ending: training is done")
	case !m.size.Elastic:
		return "", refuse("the job is not elastic: it has the same %d workers from its beginning to its end", m.size.NP)
	}
	switch c.Verb {
	case job.Drain:
		return m.drain(now, c)
	case job.Exclude:
		return m.excludeTarget(now, c)
	case job.Readmit:
		return m.readmit(now, c)
	case job.Scale:
		return m.scale(now, c)
	}
	return "", refuse("a job cannot %s", c.Verb)
}

// target names the slot or host of a command.
func target(c job.Command) string { return targetName(c.Host, c.Slot) }

func covers(c job.Command, id plan.SlotID) bool {
	return id.Host == c.Host && (c.Slot == nil || *c.Slot == id.Index)
}

// lookUp refuses a command about a host or slot that is neither listed nor has a worker.
func (m *Machine) lookUp(c job.Command) error {
	if slices.ContainsFunc(m.workers, func(w *Worker) bool { return covers(c, w.slot) }) {
		return nil
	}
	const most = 12
	var names []string
	for _, h := range m.hosts.Listed() {
		switch {
		case h.Name != c.Host:
			names = append(names, h.Name)
		case c.Slot == nil || *c.Slot < h.Slots:
			return nil
		case h.Slots == 0:
			return refuse("host %s has no slots", h.Name)
		default:
			return refuse("host %s has no slot %d; its slots are 0 to %d", h.Name, *c.Slot, h.Slots-1)
		}
	}
	if len(names) == 0 {
		return refuse("host %s is unknown; no host is listed", c.Host)
	}
	if n := len(names); n > most {
		names = append(names[:most], fmt.Sprintf("and %d others", n-most))
	}
	return refuse("host %s is unknown; the hosts are %s", c.Host, strings.Join(names, " "))
}

// drain keeps workers out of a slot or host. Workers there leave as if it were no longer listed.
func (m *Machine) drain(now time.Time, c job.Command) (string, error) {
	if err := m.lookUp(c); err != nil {
		return "", err
	}
	if hold, is := m.held(now, c); is && hold.WhileListed {
		return target(c) + " is drained already", nil
	} else if is {
		return "", refuse("%s is excluded already", target(c))
	}
	left, loses := 0, false
	for _, id := range m.withoutAsked(m.hosts.Available(now)) {
		if covers(c, id) {
			loses = true
		} else {
			left++
		}
	}
	if m.Started && loses && left < m.size.Min {
		return "", refuse("without %s the job has %d of the %d slots it needs at least (--min-np): find others first, or ask for fewer with scale",
			target(c), left, m.size.Min)
	}
	m.hosts.Hold(hosts.Hold{Host: c.Host, Slot: c.Slot, WhileListed: true})
	m.emit(now, job.DrainAsked, field("host", c.Host), field("slot", c.Slot))
	leave := 0
	for _, w := range m.workers {
		if covers(c, w.slot) && w.live() {
			leave++
		}
	}
	switch leave {
	case 0:
		return target(c) + " is drained; no worker was there", nil
	case 1:
		return target(c) + " is drained: its worker leaves at the next commit", nil
	}
	return fmt.Sprintf("%s is drained: its %d workers leave at the next commit", target(c), leave), nil
}

// held returns the hold on the target of the command, or on its whole host.
func (m *Machine) held(now time.Time, c job.Command) (hosts.Hold, bool) {
	if c.Slot == nil {
		return m.hosts.HostHeld(now, c.Host)
	}
	return m.hosts.Held(now, plan.SlotID{Host: c.Host, Index: *c.Slot})
}

// excludeTarget excludes a slot or host and stops its workers at once.
func (m *Machine) excludeTarget(now time.Time, c job.Command) (string, error) {
	if err := m.lookUp(c); err != nil {
		return "", err
	}
	able, stops := false, 0
	for _, w := range m.workers {
		switch {
		case covers(c, w.slot) && w.Phase != stopping:
			stops++
		case !covers(c, w.slot):
			able = able || w.live() && (w.Holds || w.Phase == training)
		}
	}
	if m.hasState() && !able && stops > 0 {
		return "", refuse("no worker elsewhere has the job's state, which would be lost with %s", target(c))
	}
	hold, until, how := hosts.Hold{Host: c.Host, Slot: c.Slot}, any(nil), "until it is readmitted"
	if c.For > 0 {
		hold.Until = now.Add(c.For)
		until, how = hold.Until.UTC(), fmt.Sprintf("for %v", c.For)
	}
	m.hosts.Hold(hold)
	m.emit(now, job.Excluded, field("host", c.Host), field("slot", c.Slot), field("until", until))
	for _, w := range slices.Clone(m.workers) {
		if !covers(c, w.slot) || w.Phase == stopping {
			continue
		}
		m.stop(now, w, "")
		if w.Generation != 0 && w.Generation == m.Current.Generation {
			m.lose(now, w)
			m.beginReset(now)
		}
	}
	done := fmt.Sprintf("%s is excluded %s", target(c), how)
	if stops > 0 {
		done += "; workers that are stopped: " + fmt.Sprint(stops)
	}
	return done, nil
}

// readmit ends drains and exclusions of a slot or host, including exclusions for failures, and
// deletes its failure records.
func (m *Machine) readmit(now time.Time, c job.Command) (string, error) {
	if c.Slot != nil {
		id := plan.SlotID{Host: c.Host, Index: *c.Slot}
		x, excluded := m.hosts.Excluded(now, id)
		hold, held := m.hosts.Held(now, id)
		if excluded && x.Slot == nil || held && hold.Slot == nil {
			return "", refuse("host %s is out as a whole: readmit %s", c.Host, c.Host)
		}
	}
	ended := m.hosts.Readmit(now, c.Host, c.Slot)
	if len(ended) == 0 {
		if err := m.lookUp(c); err != nil {
			return "", err
		}
	}
	for id := range m.failures {
		if covers(c, id) {
			delete(m.failures, id)
		}
	}
	for _, x := range ended {
		m.emit(now, job.Returned, field("host", x.Host), field("slot", x.Slot))
	}
	if len(ended) == 0 {
		return target(c) + " was not out; its failures are forgotten", nil
	}
	return target(c) + " may be used again", nil
}

// scale changes the bounds of the job's size.
func (m *Machine) scale(now time.Time, c job.Command) (string, error) {
	next := m.size
	if c.MinNP != nil {
		next.Min = *c.MinNP
	}
	if c.MaxNP != nil {
		next.Max = *c.MaxNP
	}
	if next.Max != 0 && next.Max < next.Min {
		return "", refuse("the minimum number of workers (%d) would exceed the maximum (%d)", next.Min, next.Max)
	}
	// The number for the first start stays within the bounds.
	next.NP = max(next.NP, next.Min)
	if next.Max != 0 {
		next.NP = min(next.NP, next.Max)
	}
	was := m.size
	if next == was {
		return bounds(was) + ", as before", nil
	}
	m.size = next
	most := any(nil)
	if next.Max != 0 {
		most = next.Max
	}
	m.emit(now, job.Scaled, field("min_np", next.Min), field("max_np", most))
	return fmt.Sprintf("%s, before %s", bounds(next), bounds(was)), nil
}

// bounds describes a size.
func bounds(s job.Size) string {
	switch s.Max {
	case 0:
		return fmt.Sprintf("%d or more workers", s.Min)
	case 1:
		return "1 worker"
	case s.Min:
		return fmt.Sprintf("%d workers", s.Min)
	}
	return fmt.Sprintf("%d to %d workers", s.Min, s.Max)
}
