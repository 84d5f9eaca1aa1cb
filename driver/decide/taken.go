package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// A slot that has a worker of another job is nobody's failure. The job continues without the slot
// and tries it again, so that jobs queue for the slots of agents. Before the first world, the job
// waits for --np slots.

// takenBackoff is the pause before the next try of a taken slot.
var takenBackoff = retry.Backoff{First: time.Second, Most: 8 * time.Second}

// takenSlot is a slot that had another job's worker when it was last tried.
type takenSlot struct {
	Slot  plan.SlotID   `json:"slot"`
	Run   string        `json:"run,omitempty"`
	Until time.Time     `json:"until,omitzero"`  // time of the next try
	Pause time.Duration `json:"pause,omitempty"` // pause before that try
}

// slotTaken records that a worker was not started because its slot has a worker of another job.
func (m *Machine) slotTaken(now time.Time, w *Worker, x job.Exit) {
	delete(m.ran, w.slot)
	i := slices.IndexFunc(m.Taken, func(t takenSlot) bool { return t.Slot == w.slot })
	if i < 0 {
		m.Taken, i = append(m.Taken, takenSlot{Slot: w.slot}), len(m.Taken)
	}
	t := &m.Taken[i]
	if t.Run != x.TakenBy {
		t.Run = x.TakenBy
		m.log(Info, "slot %s is taken by run %s, and is tried again", w.slot, t.Run)
	}
	t.Pause = takenBackoff.Next(t.Pause)
	t.Until = now.Add(t.Pause)
	if m.Current.Generation == 0 {
		m.Started, m.fixed = false, nil
	}
}

// slotFree records that a worker of this job runs in the slot, so that the slot is no longer taken.
func (m *Machine) slotFree(id plan.SlotID) {
	if len(m.Taken) == 0 {
		return
	}
	m.Taken = slices.DeleteFunc(m.Taken, func(t takenSlot) bool { return t.Slot == id })
	if len(m.Taken) == 0 && m.Started && m.Current.Generation == 0 {
		m.ShortFrom = time.Time{}
	}
}

// withoutTaken returns the free slots without those that must not be tried yet. It forgets taken
// slots that are no longer in free.
func (m *Machine) withoutTaken(now time.Time, free []plan.SlotID) []plan.SlotID {
	if len(m.Taken) == 0 {
		return free
	}
	m.Taken = slices.DeleteFunc(m.Taken, func(t takenSlot) bool { return !slices.Contains(free, t.Slot) })
	return slices.DeleteFunc(slices.Clone(free), func(id plan.SlotID) bool {
		return slices.ContainsFunc(m.Taken, func(t takenSlot) bool { return t.Slot == id && now.Before(t.Until) })
	})
}

// nextTry returns when the next taken slot is tried; false: no slot is taken.
func (m *Machine) nextTry() (next time.Time, ok bool) {
	for _, t := range m.Taken {
		if t.Until.After(m.Stepped) && (!ok || t.Until.Before(next)) {
			next, ok = t.Until, true
		}
	}
	return next, ok
}

// lackWords returns text that says why there are not more slots, as far as the list of hosts and
// other runs show: no host or no slot is listed, or other runs have some of them. Empty: unknown.
func (m *Machine) lackWords() string {
	listed := m.hosts.Listed()
	if len(listed) == 0 {
		return ", no host is listed"
	}
	if !slices.ContainsFunc(listed, func(h plan.Host) bool { return h.Slots > 0 }) {
		return ", no listed host has slots"
	}
	var runs []string
	count := make(map[string]int)
	for _, t := range m.Taken {
		if count[t.Run]++; count[t.Run] == 1 {
			runs = append(runs, t.Run)
		}
	}
	words := make([]string, len(runs))
	for i, run := range runs {
		words[i] = fmt.Sprintf("%d taken by run %s", count[run], run)
	}
	if len(words) == 0 {
		return ""
	}
	return ", " + strings.Join(words, ", ")
}
