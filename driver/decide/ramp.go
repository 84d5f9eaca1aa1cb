package decide

import (
	"cmp"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// The ramp bounds how many workers start at the same time: a few hundred on one host load it so
// much that none joins in time, and a job of ten thousand hosts would need memory for all starts at
// once. A worker counts from its start until it has joined or ended, or until rampHold has passed,
// because a plain command never joins.
const (
	defaultStarts = 32               // per host
	rampOfAll     = 512              // of the job
	rampLeast     = 32               // started at once, unless fewer are left, because each evaluation of the slots takes time
	plainHold     = 5 * time.Second  // rampHold while no worker has joined
	joiningHold   = 15 * time.Second // rampHold once a worker has joined, because then the others can join too
)

// ramp counts how many more workers may start now.
type ramp struct {
	all   int
	each  int            // limit per host
	hosts map[string]int // starting workers per host
	next  time.Time      // when the next rampHold ends; zero: never
}

// room returns how many more workers may start, given those that are starting now.
func (m *Machine) room(now time.Time) ramp {
	r := ramp{all: rampOfAll, each: cmp.Or(m.size.Starts, defaultStarts), hosts: map[string]int{}}
	hold := m.rampHold()
	for _, w := range m.workers {
		if w.Generation != 0 || w.Phase == waiting {
			continue
		}
		held := w.Begun.Add(hold)
		if w.Phase == starting && now.Before(held) {
			r.hosts[w.slot.Host]++
			if r.next.IsZero() || held.Before(r.next) {
				r.next = held
			}
		} else if !m.size.Elastic {
			continue // a command that may never join is not limited
		}
		r.all--
	}
	return r
}

// rampHold is the longest time for which a starting worker counts against its host.
func (m *Machine) rampHold() time.Duration {
	if m.joins() {
		return joiningHold
	}
	return plainHold
}

// joins reports whether the job's command is known to join.
func (m *Machine) joins() bool { return m.size.Elastic && !m.Joined.IsZero() }

// take uses up one start on the host and returns true, or returns false if none is left.
func (r *ramp) take(host string) bool {
	if r.all <= 0 || r.hosts[host] >= r.each {
		return false
	}
	r.all--
	r.hosts[host]++
	return true
}

// mayStart reports whether a worker may be started in a slot. A job that is not elastic starts one
// worker per slot. A command that exited with 0 is not run again unless the command is known to
// join.
func (m *Machine) mayStart(id plan.SlotID) bool {
	if m.bySlot[id] != nil {
		return false
	}
	return !m.ran[id] || m.joins()
}

// newcomers reports whether a world waits for starting workers, including those still to be
// started. Workers in slots that failed before and workers that the ramp delays count only while
// some worker joins within the start timeout, because thousands of slots may all be unusable.
func (m *Machine) newcomers(now time.Time) bool {
	patient := !m.size.Elastic || now.Before(m.StartsFrom.Add(m.wait.Start))
	if m.queued > 0 && patient {
		return true
	}
	for _, w := range m.workers {
		switch {
		case !w.Wanted || w.live() && w.Phase != starting:
		case m.size.Elastic && w.Phase == starting && m.overdue(now, w):
		case w.Phase != starting, patient, m.failures[w.slot].all == 0: // its own deadline bounds this wait
			return true
		}
	}
	return false
}
