package decide

import (
	"fmt"
	"time"
)

// A connection between two workers can break while both live. The world ends then, and both join
// the next one. Neither is to blame, because the next world may use other connections. If that
// happens repeatedly without a commit in between, the two cannot reach each other, and one of them
// has to leave.

// mostPartings is the number of consecutive worlds without a commit after which a live worker that
// the others have lost is blamed. The worlds must also have taken --join-timeout in total, because
// a network that restarts is down for a while.
const mostPartings = 5

// partings counts consecutive worlds that ended without a commit although all members that the
// others had lost are alive.
type partings struct {
	Worlds int       `json:"partings,omitempty"`
	From   time.Time `json:"part_from,omitzero"` // when the first of them ended
}

// part examines the world that ends, once its members have joined. It returns the worker to blame
// and the reason, or nil. The worker to blame is the one that was lost most often; of several such
// workers, the one with the highest rank.
func (m *Machine) part(now time.Time) (worst *Worker, why string) {
	lost := make([]bool, len(m.Current.Slots)) // by rank
	some := false
	left := func(w *Worker) bool {
		return w.Phase == waiting && w.Generation != 0 && w.Generation == m.Current.Generation
	}
	for _, w := range m.workers {
		if left(w) && w.join.After == w.Generation {
			for _, rank := range w.join.Lost {
				if rank >= 0 && rank < len(lost) {
					lost[rank], some = true, true
				}
			}
		}
	}
	if !some {
		return nil, ""
	}
	for _, w := range m.workers {
		if !left(w) || !lost[w.Rank] {
			continue
		}
		m.log(Info, "%s lives, and its connection to another worker has broken", w)
		if m.Committed {
			continue
		}
		w.Parted++
		if worst == nil || w.Parted > worst.Parted || w.Parted == worst.Parted && w.Rank > worst.Rank {
			worst = w
		}
	}
	if worst == nil {
		return nil, ""
	}
	if m.partings.Worlds == 0 {
		m.partings.From = now
	}
	m.partings.Worlds++
	if worlds := m.partings.Worlds; worlds >= mostPartings && !now.Before(m.partings.From.Add(m.wait.Join)) {
		m.rejoined()
		return worst, fmt.Sprintf("and others did not reach each other in %d worlds in a row, without a commit between them", worlds)
	}
	return nil, ""
}

// rejoined resets the count of part.
func (m *Machine) rejoined() {
	if m.partings.Worlds == 0 {
		return
	}
	m.partings = partings{}
	for _, w := range m.workers {
		w.Parted = 0
	}
}
