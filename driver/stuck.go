package driver

import (
	"fmt"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// Where every rank of a world waits in an operation and none is missing, the program has its ranks wait for each other, or the
// operation takes very long. Nobody is to blame then: the world as a whole is given up, and its workers go on from their
// last commit in the next one.

// worldStuck: all have waited, and for nobody, for too long; which operation each of them was in is told in words.
type worldStuck struct {
	generation uint64
	what       string
}

// mostStuck is how many worlds in a row may get stuck without a commit between them before the job ends: a program that waits
// at the same place each time would do so for ever.
const mostStuck = 3

// stuck gives up a world in which all wait.
func (m *machine) stuck(now time.Time, e worldStuck) {
	if e.generation != m.world.Generation || !m.resetFrom.IsZero() || m.decided || !m.doneFrom.IsZero() {
		return
	}
	m.emit(now, Stalled, Field{"host", nil}, Field{"slot", nil}, Field{"generation", e.generation}, Field{"what", e.what})
	m.given = true
	m.tellGiven() // whatever comes of it: those who wait for each other hear nothing else
	if m.stucks++; m.stucks == mostStuck {
		m.decide(now, fmt.Errorf("driver: in %d worlds in a row, without a commit between them, all workers waited for each other "+
			"for longer than %v (--stall-timeout); the last time %s", m.stucks, m.wait.Stall, e.what))
		return
	}
	m.log(logrus.WarnLevel, "generation %d is given up, its workers go on from their last commit: they waited for each other for "+
		"longer than %v (--stall-timeout), %s", e.generation, m.wait.Stall, e.what)
	m.beginReset(now)
}

// tellGiven tells the members that still train in a world that was given up. A loss that names no dead says that.
func (m *machine) tellGiven() {
	var members []*worker
	for _, w := range m.workers {
		if w.phase == training {
			members = append(members, w)
		}
	}
	if m.given && len(members) > 0 {
		m.do(tellLoss{notify.Loss{Generation: m.world.Generation}, members})
	}
}

// longest returns the operation that a member has waited in longest, nil where it waits in none or says nothing.
func (s *stalls) longest(seat *seat) (in *rendezvous.Lane) {
	if b := s.fresh(seat); b != nil {
		for i := range b.Lanes {
			if l := &b.Lanes[i]; l.Waiting && (in == nil || l.For > in.For) {
				in = l
			}
		}
	}
	return in
}

// jammed tells, once when the warning is due and once at the limit, that all ranks wait and nobody is missing.
func (s *stalls) jammed() []event {
	if len(s.world) < 2 {
		return nil
	}
	all := make([]*rendezvous.Lane, len(s.world))
	var long time.Duration // that all have waited at least
	for r, seat := range s.world {
		in := s.longest(seat)
		if in == nil {
			return nil
		}
		if all[r] = in; r == 0 || in.For < long {
			long = in.For
		}
	}
	var changes []event
	if s.warning > 0 && long >= s.warning && s.jam < jamNamed {
		s.jam = jamNamed
		threat := ", and nobody is stopped (--stall-timeout 0)"
		if s.limit > 0 {
			threat = fmt.Sprintf("; they are sent back to their last commit in %v (--stall-timeout)", round(max(0, s.limit-long)))
		}
		changes = append(changes, worldJammed{s.number, fmt.Sprintf("all %d ranks wait, and none is missing: %s%s",
			len(s.world), whoIsWhere(all), threat)})
	}
	if s.limit > 0 && long >= s.limit && s.jam < jamEnded {
		s.jam = jamEnded
		changes = append(changes, worldStuck{s.number, whoIsWhere(all)})
	}
	return changes
}

// stuckIn is an operation that ranks wait in.
type stuckIn struct {
	lane, operation uint64
	what            string
}

// whoIsWhere names the operation that each rank waits in: "ranks 0 1 in AllReduce (operation 7) for 2m0s; rank 2 in …". Groups
// of some ranks have no names, so they are counted.
func whoIsWhere(all []*rendezvous.Lane) string {
	in, long := map[stuckIn][]int{}, map[stuckIn]time.Duration{}
	var order []stuckIn
	groups := map[uint64]int{}
	for r, l := range all {
		at := stuckIn{l.ID, l.Operation, l.What}
		if in[at] == nil {
			order = append(order, at)
		}
		if l.ID != 0 && groups[l.ID] == 0 {
			groups[l.ID] = len(groups) + 1
		}
		in[at], long[at] = append(in[at], r), max(long[at], l.For)
	}
	parts := make([]string, 0, mostNamed+1)
	for _, at := range order[:min(len(order), mostNamed)] {
		name := operation(at.what, at.lane, at.operation)
		if at.lane != 0 && len(groups) > 1 {
			name = fmt.Sprintf("%s (operation %d of group %d of %d)", at.what, at.operation, groups[at.lane], len(groups))
		}
		parts = append(parts, fmt.Sprintf("%s in %s for %v", ranks(in[at]), name, round(long[at])))
	}
	if more := len(order) - mostNamed; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more operations", more))
	}
	return strings.Join(parts, "; ")
}
