package discovery

import (
	"slices"

	"github.com/hvdrun/hvdrun/plan"
)

// emptyAfter is how many empty lists in a row it takes to remove all hosts: a source that has a
// moment of trouble often prints nothing, and ends well.
const emptyAfter = 2

// settle decides which hosts a list stands for: one that the list lacks goes only when it was
// missing from so many lists in a row. It reads no clock and is for one goroutine.
type settle struct {
	after   int            // lists from which a host must be missing
	stands  []plan.Host    // what counts, as of the last list
	missing map[string]int // from how many lists in a row a host of these was
}

// take returns what counts when the source has said that list, and how many hosts of it the list
// lacks. Those stand at its end, with the slots that they had.
func (s *settle) take(said []plan.Host) (stands []plan.Host, kept int) {
	need := max(1, s.after)
	if len(said) == 0 {
		need = max(need, emptyAfter)
	}
	listed := make(map[string]bool, len(said))
	for _, h := range said {
		listed[h.Name] = true
	}
	missing := map[string]int{}
	stands = slices.Clone(said)
	for _, h := range s.stands {
		if listed[h.Name] {
			continue
		}
		if n := s.missing[h.Name] + 1; n < need {
			missing[h.Name] = n
			stands = append(stands, h)
			kept++
		}
	}
	s.stands, s.missing = stands, missing
	return stands, kept
}
