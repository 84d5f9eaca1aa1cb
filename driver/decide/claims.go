package decide

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// The root of a sync is chosen by the commit numbers that workers report. Commits are collective: a
// rank begins a commit only when all ranks have completed the previous one, and counts it when it
// begins. So the numbers of the survivors of a world differ by at most one, except that workers
// that did not complete the sync of that world have lower numbers. A number that exceeds another
// worker's by more than one is false, or counts commits of something other than the job.

// checkJoin returns the join without claims that cannot be true. If the join claims to have left a
// generation that does not exist, checkJoin stops the worker and returns false.
func (m *Machine) checkJoin(now time.Time, w *Worker, j Join) (Join, bool) {
	switch {
	case j.After > m.Current.Generation:
		m.stop(now, w, fmt.Sprintf("asked for a world after generation %d, but the newest is %d", j.After, m.Current.Generation))
		return j, false
	case w.Generation == 0 && (j.HoldsState || j.Commits > 0):
		m.log(Warn, "%s has been in no world, and its join claims to have the state of commit %d: the claim is ignored", w.slot, j.Commits)
		j.HoldsState, j.Commits = false, 0
	case w.Generation == m.Current.Generation && j.HoldsState && j.Commits < m.leastCommits(w):
		m.log(Warn, "%s (rank %d) claims to have the state of commit %d, but has been at commit %d: the claim is ignored",
			w.slot, w.Rank, j.Commits, m.leastCommits(w))
		j.HoldsState = false
	}
	return j, true
}

// leastCommits returns the lowest commit number that a member of the current world can have if it
// holds the state.
func (m *Machine) leastCommits(w *Worker) uint64 {
	if w.join.HoldsState {
		return min(m.Base, w.join.Commits)
	}
	return m.Base
}

// credible returns the highest commit number that can be true among the workers that hold the
// state. It considers pairs of adjacent commit numbers, and returns the higher number of the pair
// that most workers have; of several such pairs, the lowest. A member of the current world without
// the state counts as having the commit at which the world began: it has not completed the sync, so
// no commit has been made in this world.
func (m *Machine) credible(workers []*Worker) uint64 {
	type claim struct {
		commits uint64
		holds   bool
	}
	var claims []claim
	for _, w := range workers {
		switch {
		case w.Holds:
			claims = append(claims, claim{w.join.Commits, true})
		case w.unsynced(m.Current.Generation):
			claims = append(claims, claim{m.Base, false})
		}
	}
	slices.SortFunc(claims, func(a, b claim) int { return cmp.Compare(a.commits, b.commits) })
	most, best, from, holds := 0, uint64(0), 0, 0 // holds: workers of the pair with the state
	for i, c := range claims {
		if c.holds {
			holds++
		}
		for ; c.commits-claims[from].commits > 1; from++ {
			if claims[from].holds {
				holds--
			}
		}
		n := 2 * (i - from + 1)
		if holds > 0 {
			n++ // a number that no worker with the state has is useless
		}
		if n > most {
			most, best = n, c.commits
		}
	}
	return best
}

// state returns the number of the commit whose state the worker holds, as it has reported; 0: none.
func (w *Worker) state() uint64 {
	if !w.Holds {
		return 0
	}
	return w.join.Commits
}

// unsynced reports whether the worker has left that generation without having received the state.
func (w *Worker) unsynced(generation uint64) bool {
	return w.Phase == waiting && w.Generation != 0 && w.Generation == generation && !w.join.HoldsState
}

// rootOf returns the rank of the member from which the others take the state. It ignores, and logs,
// commit numbers that cannot be true.
func (m *Machine) rootOf(members []*Worker) int {
	most, root := m.credible(members), 0
	for r, w := range members {
		if w.Holds && w.join.Commits > most {
			m.log(Warn, "%s (rank %d) claims to have the state of commit %d, but the others are at most at commit %d: the claim is ignored",
				w.slot, w.Rank, w.join.Commits, most)
			w.Holds, w.join.HoldsState, w.join.Commits = false, false, 0
		}
		if better(w, members[root]) {
			root = r
		}
	}
	return root
}

// better reports whether a is preferred to b as the source of the state.
func better(a, b *Worker) bool {
	if a.Holds != b.Holds {
		return a.Holds
	}
	return a.Holds && a.join.Commits > b.join.Commits
}

func workerError(w *Worker, reason string) *job.WorkerError {
	return &job.WorkerError{Slot: w.slot, Rank: w.Rank, Reason: reason}
}
