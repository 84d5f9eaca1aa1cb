package elastictest

import (
	"fmt"

	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// Moment is a point in the progress of a worker.
type Moment struct {
	// Rank is the worker's rank in the world that it entered last; -1 before the first.
	Rank  int
	Phase Phase
	// Commit is the number of the last commit begun. A sync sets it to the root's number.
	Commit uint64
	// Generation is that of the world.
	Generation uint64
	// Slot is the worker's slot.
	Slot plan.SlotID
}

// String returns a description like "rank 1, saving, commit 5, generation 2".
func (m Moment) String() string {
	return fmt.Sprintf("rank %d, %v, commit %d, generation %d", m.Rank, m.Phase, m.Commit, m.Generation)
}

// is reports whether m matches d.
func (m Moment) is(d Moment) bool {
	return m.Rank == d.Rank && m.Phase == d.Phase && m.Commit == d.Commit &&
		(d.Generation == 0 || d.Generation == m.Generation) && (d.Slot == plan.SlotID{} || d.Slot == m.Slot)
}

// Phase says what a worker begins at a moment.
type Phase uint8

// The phases of a worker: of its start, of each world and of each commit.
const (
	// Joining: the worker joins the next world.
	Joining Phase = iota + 1
	// Connecting: it connects to the other ranks of its world.
	Connecting
	// Connected: it is connected; in the first world elastic.Init returns.
	Connected
	// Resetting: it calls the State.OnReset functions.
	Resetting
	// Syncing: it synchronises its state.
	Syncing
	// Synced: it has synchronised and saved its state.
	Synced
	// Training: it calls the training function.
	Training

	// Saving: it saves its state in a commit.
	Saving
	// Saved: it has saved; no other rank knows it yet.
	Saved
	// Committed: all ranks have saved; Commit is about to return.
	Committed

	// Leaving: elastic.Run is about to return.
	Leaving

	// Fetching: a newcomer fetches the newest commit of other workers, if there is one, before it
	// joins.
	Fetching
)

var phaseNames = [...]string{"starting", "joining", "connecting", "connected", "resetting", "syncing", "synced", "training",
	"saving", "saved", "committed", "leaving", "fetching"}

// String returns the phase's name in lower case.
func (p Phase) String() string {
	if int(p) < len(phaseNames) {
		return phaseNames[p]
	}
	return fmt.Sprintf("phase %d", p)
}

// phaseOf returns the phase that begins with moment m after phase before; 0: none that has a name.
func phaseOf(before line.Phase, m fakeproc.Moment) Phase {
	if m.Committed {
		return Committed
	}
	switch m.Phase {
	case line.Fetches:
		if before == line.Saving || before == line.Fetches {
			return 0 // save of the fetched state, or a second way to fetch it
		}
		return Fetching
	case line.Joins:
		if before == line.Joins || before == line.Saving { // the worker follows a commit while it waits
			return 0
		}
		return Joining
	case line.Connecting:
		return Connecting
	case line.Outside:
		switch before {
		case line.Connecting:
			return Connected
		case line.Saving:
			return 0 // save of the initial state
		}
		return Leaving
	case line.Resetting:
		return Resetting
	case line.Syncing:
		if before == line.Saving {
			return Synced
		}
		return Syncing
	case line.Training:
		if before == line.Saving {
			return Saved
		}
		return Training
	case line.Saving:
		if before == line.Training {
			return Saving
		}
	}
	return 0
}
