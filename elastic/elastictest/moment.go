package elastictest

import (
	"fmt"

	"github.com/hvdrun/hvdrun/elastic/internal/life"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// Moment is one in the life of a worker.
type Moment struct {
	// Rank is the worker's, in the world that it has entered last; -1 before the first.
	Rank  int
	Phase Phase
	// Commit is the number of the commit that the worker is in, or has begun last; a sync makes it
	// the root's.
	Commit uint64
	// Generation is that of the world.
	Generation uint64
	// Slot is where the worker runs.
	Slot plan.SlotID
}

// String says it in words: "rank 1, saving commit 5, generation 2".
func (m Moment) String() string {
	return fmt.Sprintf("rank %d, %v, commit %d, generation %d", m.Rank, m.Phase, m.Commit, m.Generation)
}

// is tells whether m is one of the moments that d means.
func (m Moment) is(d Moment) bool {
	return m.Rank == d.Rank && m.Phase == d.Phase && m.Commit == d.Commit &&
		(d.Generation == 0 || d.Generation == m.Generation) && (d.Slot == plan.SlotID{} || d.Slot == m.Slot)
}

// Phase is what a worker begins at a moment.
type Phase uint8

// The phases of a worker: first once, then from world to world, then of every commit.
const (
	// Joining: it asks for a world.
	Joining Phase = iota + 1
	// Connecting: it connects to the others of its world.
	Connecting
	// Connected: it is connected; in the first world elastic.Init returns.
	Connected
	// Resetting: it calls the functions of State.OnReset.
	Resetting
	// Syncing: it makes its state that of the others.
	Syncing
	// Synced: it has, and has saved that.
	Synced
	// Training: it calls the training function.
	Training

	// Saving: it saves its state in a commit.
	Saving
	// Saved: it has, and no other rank knows.
	Saved
	// Committed: all ranks have; Commit is about to return.
	Committed

	// Leaving: elastic.Run is about to return.
	Leaving

	// Fetching: it was given elastic.Late, and fetches the others' newest commit before it joins;
	// also where there is none yet.
	Fetching
)

var phaseNames = [...]string{"starting", "joining", "connecting", "connected", "resetting", "syncing", "synced", "training",
	"saving", "saved", "committed", "leaving", "fetching"}

// String returns its name in small letters.
func (p Phase) String() string {
	if int(p) < len(phaseNames) {
		return phaseNames[p]
	}
	return fmt.Sprintf("phase %d", p)
}

// phaseOf tells what a worker begins that does now what m says, and did something else before; 0:
// nothing that has a name.
func phaseOf(before rendezvous.Phase, m life.Moment) Phase {
	if m.Committed {
		return Committed
	}
	switch m.Phase {
	case rendezvous.Fetches:
		if before == rendezvous.Saving {
			return 0 // what has been fetched
		}
		return Fetching
	case rendezvous.Joins:
		if before == rendezvous.Joins {
			return 0
		}
		return Joining
	case rendezvous.Connecting:
		return Connecting
	case rendezvous.Outside:
		switch before {
		case rendezvous.Connecting:
			return Connected
		case rendezvous.Saving:
			return 0 // what training begins with
		}
		return Leaving
	case rendezvous.Resetting:
		return Resetting
	case rendezvous.Syncing:
		if before == rendezvous.Saving {
			return Synced
		}
		return Syncing
	case rendezvous.Training:
		if before == rendezvous.Saving {
			return Saved
		}
		return Training
	case rendezvous.Saving:
		if before == rendezvous.Training {
			return Saving
		}
	}
	return 0
}
