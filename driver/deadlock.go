package driver

import (
	"fmt"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
)

// longest returns the lane in which the member has waited longest. It returns nil if the member
// waits in no lane or its heartbeats are missing.
func (s *stalls) longest(member *member) *line.Lane {
	if b := s.fresh(member); b != nil {
		return longestWait(b)
	}
	return nil
}

// longestWait returns the lane in which the worker has waited longest, or nil if it waits in none.
func longestWait(b *line.Beat) (in *line.Lane) {
	for i := range b.Lanes {
		if l := &b.Lanes[i]; l.Waiting && (in == nil || l.For > in.For) {
			in = l
		}
	}
	return in
}

// jammed reports that all ranks wait in an operation and none is missing: once when they have
// waited for the warning time and once when they have waited for the limit.
func (s *stalls) jammed() []decide.Input {
	if len(s.world) < 2 {
		return nil
	}
	all := make([]*line.Lane, len(s.world))
	var long time.Duration // shortest of the ranks' waits
	for r, member := range s.world {
		in := s.longest(member)
		if in == nil {
			return s.unjammed()
		}
		if all[r] = in; r == 0 || in.For < long {
			long = in.For
		}
	}
	var changes []decide.Input
	if s.warning > 0 && long >= s.warning && s.jam < jamNamed {
		s.jam = jamNamed
		threat := ", and no worker is stopped (--stall-timeout 0)"
		if s.limit > 0 {
			threat = fmt.Sprintf("; they are sent back to their last commit in %v (--stall-timeout)", job.Round(max(0, s.limit-long)))
		}
		changes = append(changes, decide.WorldJammed{Generation: s.number, What: fmt.Sprintf("all %d ranks wait, and none is missing: %s%s",
			len(s.world), describeWaits(all), threat), Long: long})
	}
	if s.limit > 0 && long >= s.limit && s.jam < jamEnded {
		s.jam = jamEnded
		changes = append(changes, decide.WorldStuck{Generation: s.number, What: describeWaits(all)})
	}
	return changes
}

// unjammed reports, once, that a rank of a jammed world no longer waits. If all ranks wait again,
// jammed reports that again.
func (s *stalls) unjammed() []decide.Input {
	if s.jam != jamNamed {
		return nil
	}
	s.jam = jamNone
	return []decide.Input{decide.WorldStirred{Generation: s.number}}
}

// stuckIn identifies an operation in which ranks wait.
type stuckIn struct {
	lane, operation uint64
	what            string
}

// describeWaits lists the operation in which each rank waits: "ranks 0 1 in AllReduce (operation 7)
// for 2m0s; rank 2 in …". Groups of some ranks have no names and are numbered.
func describeWaits(all []*line.Lane) string {
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
	parts := make([]string, 0, decide.MostNamed+1)
	for _, at := range order[:min(len(order), decide.MostNamed)] {
		name := operation(at.what, at.lane, at.operation)
		if at.lane != 0 && len(groups) > 1 {
			name = fmt.Sprintf("%s (operation %d of group %d of %d)", at.what, at.operation, groups[at.lane], len(groups))
		}
		parts = append(parts, fmt.Sprintf("%s in %s for %v", ranks(in[at]), name, job.Round(long[at])))
	}
	if more := len(order) - decide.MostNamed; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more operations", more))
	}
	return strings.Join(parts, "; ")
}
