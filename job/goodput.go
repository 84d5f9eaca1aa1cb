package job

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Part is a share of a job's time: what it was spent on.
type Part string

// The parts of a job's time. At each moment the job is in one of them.
const (
	PartTraining      Part = "training"      // a world trains, or the workers run tasks
	PartStarting      Part = "starting"      // the workers of the first world start and join
	PartWaiting       Part = "waiting"       // for enough slots, or for workers that replace failed ones
	PartRecovering    Part = "recovering"    // between two worlds, after a loss: by a death, a stall or a departure
	PartGrowing       Part = "growing"       // between two worlds, because hosts or slots came
	PartShrinking     Part = "shrinking"     // between two worlds, because hosts or slots were taken away
	PartSynchronising Part = "synchronising" // from the publication of a world until rank 0 trains in it
	PartRecomputing   Part = "recomputing"   // training that repeats what a loss has undone
	PartStalled       Part = "stalled"       // workers wait for one that holds them up, or all for each other
	PartStopping      Part = "stopping"      // from the first worker that is done, or a stop, to the end
)

// Parts returns all parts, in the order in which a Goodput lists them.
func Parts() []Part {
	return []Part{
		PartTraining, PartStarting, PartWaiting, PartRecovering, PartGrowing, PartShrinking, PartSynchronising,
		PartRecomputing, PartStalled, PartStopping,
	}
}

// Goodput reports what a job's time was spent on. The parts add up to Seconds.
type Goodput struct {
	// Seconds is the time since the job began, or its whole time if it has ended.
	Seconds float64 `json:"seconds"`
	// Parts has an element for each of Parts(), in that order.
	Parts []Spent `json:"parts"`
	// StalledBy are the slots whose workers held up the others longest, at most eight, longest
	// first. A part of the stalled time may have no slot: all workers waited for each other.
	StalledBy []StalledBy `json:"stalled_by,omitempty"`
}

// Spent is the time of a part.
type Spent struct {
	Part    Part    `json:"part"`
	Seconds float64 `json:"seconds"`
}

// StalledBy is a slot whose workers held up others.
type StalledBy struct {
	Host    string  `json:"host"`
	Slot    int     `json:"slot"`
	Seconds float64 `json:"seconds"`
}

// Of returns the seconds of a part.
func (g Goodput) Of(p Part) float64 {
	for _, s := range g.Parts {
		if s.Part == p {
			return s.Seconds
		}
	}
	return 0
}

// String returns "trained 93.1 % of 1h2m0s; recovering 2.0 %, waiting 1.9 %, …": all parts of at
// least 0.05 %, the largest first.
func (g Goodput) String() string {
	share := func(seconds float64) float64 {
		if g.Seconds <= 0 {
			return 0
		}
		return 100 * seconds / g.Seconds
	}
	long := time.Duration(g.Seconds * float64(time.Second))
	if long < 10*time.Second {
		long = long.Round(100 * time.Millisecond)
	} else {
		long = long.Round(time.Second)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "trained %.1f %% of %v", share(g.Of(PartTraining)), long)
	rest := slices.Clone(g.Parts)
	slices.SortStableFunc(rest, func(x, y Spent) int { return cmp.Compare(y.Seconds, x.Seconds) })
	before := "; "
	for _, s := range rest {
		if s.Part == PartTraining || share(s.Seconds) < 0.05 {
			continue
		}
		fmt.Fprintf(&b, "%s%s %.1f %%", before, s.Part, share(s.Seconds))
		if s.Part == PartStalled && len(g.StalledBy) > 0 {
			by := g.StalledBy[0]
			fmt.Fprintf(&b, " (most by %s:%d)", by.Host, by.Slot)
		}
		before = ", "
	}
	return b.String()
}

// Cause is the reason why a world was left, or why the first was entered.
type Cause string

// The causes, in ascending order of weight: if several apply to one reset, the last of them counts.
const (
	CauseStart     Cause = "start"     // the first world
	CauseBroken    Cause = "broken"    // a connection between workers that live
	CauseGrowth    Cause = "growth"    // hosts or slots came
	CauseRemoval   Cause = "removal"   // hosts or slots were taken away, or workers were asked to leave
	CauseDeparture Cause = "departure" // a worker left by itself
	CauseDeath     Cause = "death"     // a worker has failed
	CauseStall     Cause = "stall"     // a worker held up the others too long, or all waited for each other
)

// Causes returns the causes of resets: all but CauseStart, in the order of their weight.
func Causes() []Cause {
	return []Cause{CauseBroken, CauseGrowth, CauseRemoval, CauseDeparture, CauseDeath, CauseStall}
}
