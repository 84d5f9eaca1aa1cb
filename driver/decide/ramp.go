package decide

import (
	"cmp"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// Workers that start all at once keep each other from starting: a few hundred of them on one
// machine load it so much that none joins in time, and a driver that tries ten thousand hosts at
// once needs the memory for all. So they start by and by. A worker holds its place in the ramp from
// its start until it has joined, has ended, or has run for as long as rampHold says: a plain
// command never joins.
const (
	defaultStarts = 32               // of one host at a time
	rampOfAll     = 512              // of the job
	plainHold     = 5 * time.Second  // longest that one counts for its host while nobody has joined
	joiningHold   = 15 * time.Second // longest once one has: then the others may be expected to join
)

// ramp is how many more workers may start now.
type ramp struct {
	all   int
	each  int            // of a host, altogether
	hosts map[string]int // those that start now, by host
	next  time.Time      // when the next one of them stops to count; zero: none does by itself
}

// room counts the workers that start now.
func (m *Machine) room(now time.Time) ramp {
	r := ramp{all: rampOfAll, each: cmp.Or(m.size.Starts, defaultStarts), hosts: map[string]int{}}
	hold := m.rampHold()
	for _, w := range m.workers {
		if w.generation != 0 || w.phase == waiting {
			continue
		}
		held := w.begun.Add(hold)
		if w.phase == starting && now.Before(held) {
			r.hosts[w.slot.Host]++
			if r.next.IsZero() || held.Before(r.next) {
				r.next = held
			}
		} else if !m.size.Elastic {
			continue // it may be a command that never joins, and has no bound
		}
		r.all--
	}
	return r
}

// rampHold is the longest that a worker which starts counts for its host.
func (m *Machine) rampHold() time.Duration {
	if m.joins() {
		return joiningHold
	}
	return plainHold
}

// joins tells whether the job's command is known to join.
func (m *Machine) joins() bool { return m.size.Elastic && !m.joined.IsZero() }

// take takes a place for a worker of the host, if there is one.
func (r *ramp) take(host string) bool {
	if r.all <= 0 || r.hosts[host] >= r.each {
		return false
	}
	r.all--
	r.hosts[host]++
	return true
}

// mayStart tells whether a slot that has no worker is to get one. A job that is not elastic starts
// one in each slot, once; and a command that ended well is not run again as long as nobody knows
// whether the command ever joins.
func (m *Machine) mayStart(id plan.SlotID) bool {
	if m.bySlot[id] != nil {
		return false
	}
	return !m.ran[id] || m.joins()
}

// newcomers tells whether a world waits for workers that start, or are about to. Those in slots
// that have failed before, and those for which there is no place in the ramp yet, are waited for as
// long as one of them joins within the start timeout: there may be thousands of slots of which none
// works.
func (m *Machine) newcomers(now time.Time) bool {
	patient := !m.size.Elastic || now.Before(m.newsFrom.Add(m.wait.Start))
	if m.queued > 0 && patient {
		return true
	}
	for _, w := range m.workers {
		switch {
		case !w.wanted || w.live() && w.phase != starting:
		case w.phase != starting, patient, m.failures[w.slot] == 0: // its deadline is near, where it has one
			return true
		}
	}
	return false
}
