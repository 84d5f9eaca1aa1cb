package decide

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// Spares are workers beyond the maximum size of the world. They have joined, follow the commits of
// the members, and wait. As soon as a wanted slot is lost, the slot of a spare is wanted instead,
// and the spare is a member of the next world. Nothing waits for a spare, and spares do not count
// towards the bounds of the size.

// startSpares chooses the slots of spares and starts workers in those that have none. Workers of
// wanted slots take precedence.
func (m *Machine) startSpares(now time.Time) {
	if m.size.Spares == 0 {
		return
	}
	for _, w := range m.workers {
		w.Spare = false
	}
	// Before the first world, a spare would wait in Init, where it cannot follow the commits.
	if m.fixed != nil || m.Current.Generation == 0 {
		return
	}
	chosen := m.spareSlots()
	missing := false
	for _, id := range chosen {
		if w := m.in(id); w != nil {
			w.Spare = true
		} else {
			missing = true
		}
	}
	if !missing || m.queued > 0 {
		return
	}
	all := m.wants
	for _, id := range chosen {
		all = m.insertByAge(all, id)
	}
	room := m.room(now)
	if room.all > 0 && m.startIn(now, all, &room, true) == 0 {
		return
	}
	m.rampUntil = room.next
}

// spareSlots returns the slots of spares: those that have a waiting worker, then slots of hosts
// without a wanted slot, then others.
func (m *Machine) spareSlots() []plan.SlotID {
	wanted, busy := make(map[plan.SlotID]bool, len(m.wants)), make(map[string]bool)
	for _, id := range m.wants {
		wanted[id], busy[id.Host] = true, true
	}
	var classes [3][]plan.SlotID
	for _, id := range m.withoutAsked(m.free) {
		if wanted[id] {
			continue
		}
		w := m.in(id)
		switch {
		case w != nil && w.live() && w.Generation == 0:
			classes[0] = append(classes[0], id)
		case w != nil: // the worker leaves, and the slot becomes free
		case !m.mayStart(id):
		case !busy[id.Host]:
			classes[1] = append(classes[1], id)
		default:
			classes[2] = append(classes[2], id)
		}
	}
	all := slices.Concat(classes[:]...)
	return all[:min(len(all), m.size.Spares)]
}
