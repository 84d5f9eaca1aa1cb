// Package sockets connects the ranks of a generation over TCP. An [Endpoint] accepts and dials
// connections, chooses their routes and watches them; a [Path] moves the frames of one group over
// them. The group, a [Group], defines the meaning of the frames.
package sockets

import (
	"errors"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// Group is the group of a path on this rank. Its methods may be called by any goroutine.
type Group interface {
	frame.Group

	// Enroll adds the group to its generation. It returns false if its lane is taken.
	Enroll() bool
	// FailAll is like Fail, with a notice that names ranks as numbered in the generation.
	FailAll(n frame.Notice)
	// Failure returns the reason why the group has failed, with ranks as numbered in the
	// generation.
	Failure() (n frame.Notice, failed bool)
	// Failed returns a channel that is closed once the group has failed and every rank has been
	// notified.
	Failed() <-chan struct{}
	// Wake returns a flag that is set when something has changed for the operation in progress.
	Wake() wake.Flag
	// Finished returns the number of successful operations.
	Finished() uint64
	// Closing reports whether this rank leaves the group.
	Closing() bool
	// Left is called when a rank calls no more operations.
	Left(rank int)
	// Nudged is called when another rank's engine begins a cycle.
	Nudged(cycle uint64)
}

// Groups are the groups of one generation in this process. They fail together.
type Groups interface {
	// Path returns the path of the group of a lane, nil if the group has none, and whether the
	// group exists.
	Path(lane uint64) (path *Path, there bool)
	// Paths returns the paths of all groups.
	Paths() []*Path
	// Demand is called when another rank wants to connect a lane that does not exist on this rank;
	// the lane may be made later. An error, which that rank gets, is the reason why the lane will
	// not be made.
	Demand(lane uint64) error
	// Failure returns the first failure, or nil.
	Failure() *frame.Notice
	// FailAll ends all groups.
	FailAll(n frame.Notice)
}

// ErrEnded reports that the group has failed.
var ErrEnded = errors.New("collective: the group has ended")

// Late notifies other ranks of something that they may not know yet, if it is time to do so at now.
// It returns the time until it must be called again, or 0 if it need not be.
type Late func(now time.Time) time.Duration
