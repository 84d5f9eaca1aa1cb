package line

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/job"
)

// MaxLanes, maxWaits and maxEntered are the largest numbers of lanes, waits and phases in a Beat.
const (
	MaxLanes   = 16
	maxWaits   = 64
	maxEntered = 16
)

const maxWhat = 256 // bytes of an operation's name

// Phase is a worker's current activity.
type Phase uint8

// The phases of a worker.
const (
	// Joins: it waits in a join.
	Joins Phase = iota + 1
	// Connecting: it connects to the other ranks of its world.
	Connecting
	// Outside: it is in its world, but its program is not in elastic.Run.
	Outside
	// Syncing: it receives or sends the state.
	Syncing
	// Training: it is in the program's training function.
	Training
	// Saving: it saves its state, in a commit.
	Saving
	// Resetting: it calls the program's OnReset functions.
	Resetting
	// Fetches: it fetches the state from other workers before it joins.
	Fetches
)

// String describes the phase: "joining", "connecting", "outside of elastic.Run", "synchronising its
// state", "training", "saving its state", "in an OnReset function" or "fetching the state".
func (p Phase) String() string {
	switch p {
	case Joins:
		return "joining"
	case Connecting:
		return "connecting"
	case Outside:
		return "outside of elastic.Run"
	case Syncing:
		return "synchronising its state"
	case Training:
		return "training"
	case Saving:
		return "saving its state"
	case Resetting:
		return "in an OnReset function"
	case Fetches:
		return "fetching the state"
	}
	return fmt.Sprintf("in phase %d", uint8(p))
}

// Lane is a worker's progress in one of the groups of its world, from collective.Progress.
type Lane struct {
	// ID identifies the group; 0 is the group of all ranks. While the ranks connect, a worker waits
	// in operation 0 of that lane.
	ID uint64 `json:"id,omitempty"`
	// Operation is the number of the last operation that the worker has entered. Operations have
	// the same numbers on all ranks.
	Operation uint64 `json:"operation,omitempty"`
	Waiting   bool   `json:"waiting,omitempty"`
	// For is at least how long the worker has been in that operation, or, once that has ended, has
	// entered no other.
	For time.Duration `json:"for,omitempty"`
	// What is the operation's name. Client.Beat truncates it to 256 bytes.
	What string `json:"what,omitempty"`
}

// BeatSpacing returns the seconds between two beats of a worker in a world of this size: 1 for up
// to a hundred workers, and more in larger worlds, so that the driver receives at most about a
// hundred beats a second.
func BeatSpacing(size int) int { return max(1, (size+99)/100) }

// Beat is a worker's heartbeat, sent about once a second, or less often in a world of more than a
// hundred workers (see [BeatSpacing]).
type Beat struct {
	// Generation is the generation of the worker's current or last world.
	Generation uint64 `json:"generation,omitempty"`
	Phase      Phase  `json:"phase"`
	// Quiet is at least how long neither the phase nor any lane has changed.
	Quiet time.Duration `json:"quiet,omitempty"`
	// Lanes has at most MaxLanes elements.
	Lanes []Lane `json:"lanes,omitempty"`
	// Commits is the number of the worker's last commit in the generation; 0: none.
	Commits uint64 `json:"commits,omitempty"`
	// Written is the number of bytes on disk of the last checkpoint that the worker is writing.
	Written uint64 `json:"written,omitempty"`
	// Trained is whether the worker's training function has returned in the generation; nil:
	// unknown.
	Trained *bool `json:"trained,omitempty"`
	// Counters are what the worker has done since it began; nil: unknown.
	Counters *Counters `json:"counters,omitempty"`
	// Usage is what the worker's process uses; nil: unknown.
	Usage *proc.Usage `json:"usage,omitempty"`
	// Figures are the newest numbers that the worker's program has reported, each name once. It has
	// at most maxFigures elements.
	Figures []Figure `json:"figures,omitempty"`
	// Waits gives the durations of operations that ended recently. It has at most maxWaits
	// elements.
	Waits []Wait `json:"waits,omitempty"`
	// Entered lists, in order, the phases that the worker has entered on its way into the world of
	// the generation. Nil: they were sent before. It has at most maxEntered elements.
	Entered []Entered `json:"entered,omitempty"`
}

// Figure is a number that a program reports, such as its loss.
type Figure = job.Figure

// maxFigures is the largest number of elements of Beat.Figures.
const maxFigures = 16

// SetFigure adds f to all, or replaces the figure with its name, and returns the result. It returns
// an error if the name is not permitted or there are more than maxFigures names.
func SetFigure(all []Figure, f Figure) ([]Figure, error) {
	if err := checkWord(f.Name); err != nil {
		return all, err
	}
	if i := slices.IndexFunc(all, func(has Figure) bool { return has.Name == f.Name }); i >= 0 {
		all[i] = f
		return all, nil
	}
	if len(all) >= maxFigures {
		return all, fmt.Errorf("%q is one name too many; at most %d are allowed", f.Name, maxFigures)
	}
	return append(all, f), nil
}

// Counters count what a worker has done since it began. They never decrease.
type Counters struct {
	// Commits is the number of its commits, CommitTime their total duration, and CommitBytes the
	// bytes of tensors that they compared to find what had changed.
	Commits     uint64        `json:"commits,omitempty"`
	CommitTime  time.Duration `json:"commit_time,omitempty"`
	CommitBytes uint64        `json:"commit_bytes,omitempty"`
	// Operations counts its collective operations. It has at most MaxOperations elements.
	Operations []Operations `json:"operations,omitempty"`
}

// MaxOperations is the largest number of elements of Counters.Operations.
const MaxOperations = 128

// maxSizeClass is the largest Operations.SizeClass.
const maxSizeClass = 15

// Operations counts the collective operations of one kind, backend and class of sizes, from
// collective.Operations.
type Operations struct {
	// Kind and Backend have 1 to 32 of the characters a-z, A-Z, 0-9, +, -, . and _.
	Kind      string        `json:"kind"`
	Backend   string        `json:"backend"`
	SizeClass int           `json:"size_class,omitempty"`
	Count     uint64        `json:"count,omitempty"`
	Duration  time.Duration `json:"duration,omitempty"`
	Bytes     uint64        `json:"bytes,omitempty"`
}

// check checks the bounds of the counters.
func (c *Counters) check() error {
	if n := len(c.Operations); n > MaxOperations {
		return fmt.Errorf("the heartbeat counts %d kinds of operations; at most %d are allowed", n, MaxOperations)
	}
	if c.CommitTime < 0 {
		return errOutOfRange
	}
	for i := range c.Operations {
		o := &c.Operations[i]
		if err := errors.Join(checkWord(o.Kind), checkWord(o.Backend)); err != nil {
			return err
		}
		if o.Duration < 0 || o.SizeClass < 0 || o.SizeClass > maxSizeClass {
			return errors.New("a duration or a size is out of range")
		}
	}
	return nil
}

// checkWord validates the name of a figure, a kind of operations or a backend.
func checkWord(name string) error {
	if name == "" || len(name) > maxBackend {
		return fmt.Errorf("a name has %d bytes; 1 to %d are allowed", len(name), maxBackend)
	}
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '+', c == '-', c == '.', c == '_':
		default:
			return fmt.Errorf("the name %q is not valid: only letters, digits, +, -, . and _ are allowed", name)
		}
	}
	return nil
}

// Wait is the duration of one operation on a worker, from collective.Wait.
type Wait struct {
	// Operation is the number of the operation, which is the same on all ranks.
	Operation uint64 `json:"operation,omitempty"`
	// For is the duration.
	For time.Duration `json:"for,omitempty"`
}

// Entered says which phase a worker has entered, and how long before the heartbeat.
type Entered struct {
	Phase Phase         `json:"phase"`
	Ago   time.Duration `json:"ago,omitempty"`
}

// ErrNotConnected is returned by Client.Beat if there is no connection.
var ErrNotConnected = errors.New("line: the launcher is not connected")

var errOutOfRange = errors.New("a duration is out of range")

// Pulse returns the line of a heartbeat, reduced to its bounds.
func Pulse(b Beat) []byte { return Up("pulse", b.clipped()) }

// clipped returns the beat reduced to its bounds. Durations may be negative, because the clock was
// read at different times while the beat was made; it sets them to 0.
func (b Beat) clipped() Beat {
	b.Quiet = max(0, b.Quiet)
	b.Lanes = slices.Clone(b.Lanes[:min(len(b.Lanes), MaxLanes)])
	for i := range b.Lanes {
		b.Lanes[i].What, b.Lanes[i].For = clip(b.Lanes[i].What, maxWhat), max(0, b.Lanes[i].For)
	}
	b.Waits = slices.Clone(b.Waits[:min(len(b.Waits), maxWaits)])
	for i := range b.Waits {
		b.Waits[i].For = max(0, b.Waits[i].For)
	}
	b.Entered = slices.Clone(b.Entered[:min(len(b.Entered), maxEntered)])
	for i := range b.Entered {
		b.Entered[i].Ago = max(0, b.Entered[i].Ago)
	}
	b.Figures = b.Figures[:min(len(b.Figures), maxFigures)]
	if c := b.Counters; c != nil && len(c.Operations) > MaxOperations {
		less := *c
		less.Operations, b.Counters = c.Operations[:MaxOperations], &less
	}
	return b
}

// Check checks the bounds of a heartbeat.
func (b *Beat) Check() error {
	if !b.Phase.valid() {
		return fmt.Errorf("%d is not a phase", b.Phase)
	}
	for _, list := range []struct {
		of      string
		n, most int
	}{{"lanes", len(b.Lanes), MaxLanes}, {"waits", len(b.Waits), maxWaits}, {"phases", len(b.Entered), maxEntered}} {
		if list.n > list.most {
			return fmt.Errorf("the heartbeat has %d %s; at most %d are allowed", list.n, list.of, list.most)
		}
	}
	shortest := b.Quiet
	if b.Usage != nil {
		shortest = min(shortest, b.Usage.Processor)
	}
	for _, l := range b.Lanes {
		if len(l.What) > maxWhat {
			return fmt.Errorf("the name of an operation has %d bytes; at most %d are allowed", len(l.What), maxWhat)
		}
		shortest = min(shortest, l.For)
	}
	for _, w := range b.Waits {
		shortest = min(shortest, w.For)
	}
	if shortest < 0 {
		return errOutOfRange
	}
	for _, e := range b.Entered {
		if !e.Phase.valid() || e.Ago < 0 {
			return fmt.Errorf("the phase %d, entered %d ns ago, is not valid", e.Phase, e.Ago)
		}
	}
	var figures []Figure
	for _, f := range b.Figures {
		var err error
		if figures, err = SetFigure(figures, f); err != nil {
			return err
		}
	}
	b.Figures = figures
	if b.Counters == nil {
		return nil
	}
	return b.Counters.check()
}

func (p Phase) valid() bool { return p >= Joins && p <= Fetches }
