package steplog

import (
	"fmt"
	"maps"
	"slices"
	"sync"
)

// Check checks the lines of a whole job, of rank 0 only or of all ranks, and returns the first
// violation of these rules:
//
//   - All workers enter a world at the same step, and each then completes one step after the other.
//   - No committed step is lost or repeated: a worker that enters a later world is not behind any
//     step whose Commit has returned nil, or a *HostsUpdatedError, on any worker. The first world
//     begins before the first step.
//   - No step is left out: a later world begins at most one step beyond the last one in previous
//     worlds. That step may have been saved by a rank that lost its peers before any Commit
//     returned.
//   - The chain is the one of the step.
//   - A rank of a world is one process, and all report the same size of the world.
//   - A worker that finishes has completed all steps and has their weights.
func Check(lines []Line, steps, weights int) error {
	worlds := make(map[uint64]*world)
	digest := sync.OnceValue(func() string { return Digest(Weights(steps, weights)) }) // of a finished job
	chains := []uint64{0}                                                              // by step
	first := make(map[int]int)                                                         // first rank of each process
	for i, l := range lines {
		w := worlds[l.Generation]
		if w == nil {
			w = &world{size: l.Size, begin: l.Step, ranks: make(map[int]int), at: make(map[int]int)}
			worlds[l.Generation] = w
		}
		for len(chains) <= l.Step && l.Step <= steps {
			chains = append(chains, Chain(chains[len(chains)-1], len(chains)))
		}
		var err error
		switch {
		case l.Step < 0 || l.Step > steps:
			err = fmt.Errorf("there are %d steps", steps)
		case l.Chain != FormatChain(chains[l.Step]):
			err = fmt.Errorf("the chain of step %d is %s", l.Step, FormatChain(chains[l.Step]))
		default:
			err = w.add(l)
		}
		if f, ok := first[l.PID]; err == nil && ok && f != l.First {
			err = fmt.Errorf("its first rank was %d before", f)
		}
		first[l.PID] = l.First
		if err == nil && l.Event == End && (l.Step != steps || l.Digest != digest()) {
			err = fmt.Errorf("the end is after step %d, with weights %s", steps, digest())
		}
		if err != nil {
			return fmt.Errorf("steplog: line %d, %+v: %w", i+1, l, err)
		}
	}
	return checkOrder(worlds)
}

// checkOrder checks each world against all previous ones.
func checkOrder(worlds map[uint64]*world) error {
	committed, seen := 0, -1
	for _, g := range slices.Sorted(maps.Keys(worlds)) {
		w := worlds[g]
		if w.begin < committed {
			return fmt.Errorf("steplog: generation %d begins after step %d, but step %d had been committed", g, w.begin, committed)
		}
		if w.begin > seen+1 {
			return fmt.Errorf("steplog: generation %d begins after step %d, but the last step before it was %d", g, w.begin, seen)
		}
		committed, seen = max(committed, w.committed), max(seen, w.begin, w.seen)
	}
	return nil
}

// world is the checker's state of a world.
type world struct {
	size, begin     int
	committed, seen int         // last committed step and last completed step of any worker
	ranks           map[int]int // processes by rank
	at              map[int]int // steps by process
}

func (w *world) add(l Line) error {
	if l.Size != w.size || l.Rank < 0 || l.Rank >= l.Size {
		return fmt.Errorf("rank %d of %d in a world of %d", l.Rank, l.Size, w.size)
	}
	if pid, ok := w.ranks[l.Rank]; ok && pid != l.PID {
		return fmt.Errorf("rank %d is process %d in this world", l.Rank, pid)
	}
	w.ranks[l.Rank] = l.PID
	at, entered := w.at[l.PID]
	switch l.Event {
	case Enter:
		// A world is entered twice only if a collective was aborted, and is not used after that.
		if entered {
			return fmt.Errorf("the process was in this world already, at step %d", at)
		}
		if l.Step != w.begin {
			return fmt.Errorf("others entered this world at step %d", w.begin)
		}
	case Step:
		if !entered || l.Step != at+1 {
			return fmt.Errorf("the step before this one was %d", at)
		}
		w.seen = max(w.seen, l.Step)
		if l.Outcome == OK || l.Outcome == Updated {
			w.committed = max(w.committed, l.Step)
		}
	case End:
		if entered && l.Step != at { // all ranks record their end, even if only rank 0 records the rest
			return fmt.Errorf("the step before the end was %d", at)
		}
	}
	w.at[l.PID] = l.Step
	return nil
}

// World is the expected content of the lines of rank 0 for some steps.
type World struct {
	From, To   int    // the steps
	Generation uint64 // 0: any
	Size       int
	Zero       string // slot of rank 0, "host:slot"
	First      int    // its rank in its first world
}

// CheckWorlds compares every step recorded by rank 0 with the worlds. Each step of the worlds must
// occur, and no other; a step must occur only once after it was committed.
func CheckWorlds(lines []Line, worlds []World) error {
	done := make(map[int]bool)
	for i, l := range lines {
		if l.Event != Step || l.Rank != 0 {
			continue
		}
		at := slices.IndexFunc(worlds, func(w World) bool { return w.From <= l.Step && l.Step <= w.To })
		if at < 0 {
			return fmt.Errorf("steplog: line %d: no world has step %d", i+1, l.Step)
		}
		w := worlds[at]
		got := World{w.From, w.To, l.Generation, l.Size, l.Where(), l.First}
		if w.Generation == 0 {
			got.Generation = 0
		}
		if got != w {
			return fmt.Errorf("steplog: line %d: step %d is of %+v, want %+v", i+1, l.Step, got, w)
		}
		if done[l.Step] {
			return fmt.Errorf("steplog: line %d: step %d is repeated", i+1, l.Step)
		}
		done[l.Step] = l.Outcome == OK || l.Outcome == Updated
	}
	for _, w := range worlds {
		for s := w.From; s <= w.To; s++ {
			if _, ok := done[s]; !ok {
				return fmt.Errorf("steplog: rank 0 has not recorded step %d", s)
			}
		}
	}
	return nil
}
