// Package sockets connects the ranks of a generation over TCP. An [Endpoint] accepts and dials
// connections, chooses their routes and watches them; a [Path] moves the frames of one group over
// them. What the frames mean is the group's affair: this file has what a path needs of it.
package sockets

import (
	"errors"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// Group is the group of a path on this rank. Its methods may be called by any goroutine.
type Group interface {
	frame.Group

	// Enroll adds the group to those of its generation; false where its lane is taken.
	Enroll() bool
	// FailAll is Fail with a notice that names ranks as the generation numbers them.
	FailAll(n frame.Notice)
	// Failure is why the group has failed, as the generation numbers ranks.
	Failure() (n frame.Notice, failed bool)
	// Failed is closed once the group has failed and every rank has been told.
	Failed() <-chan struct{}
	// Wake has one token: something has changed for the operation under way.
	Wake() chan struct{}
	// Finished is how many operations went well.
	Finished() uint64
	// Closing reports whether this rank leaves the group.
	Closing() bool
	// Left says that a rank sends no more operations.
	Left(rank int)
	// Nudged says that another rank's engine begins a cycle.
	Nudged(cycle uint64)
}

// Groups are the groups of one generation in this process. They fail together.
type Groups interface {
	// Path returns the path of the group of a lane; nil where it has none, or is not there.
	Path(lane uint64) (path *Path, there bool)
	// Paths are those of all groups.
	Paths() []*Path
	// Demand is called where another rank wants to connect a lane that is not there: it may be one
	// that is yet to be made. An error tells that rank why it is not.
	Demand(lane uint64) error
	// Failure is the first one; nil before that.
	Failure() *frame.Notice
	// FailAll ends all groups.
	FailAll(n frame.Notice)
}

// ErrEnded says that the group has failed.
var ErrEnded = errors.New("collective: the group has ended")

// Late tells other ranks what they may not know yet, if it is time for that at now; otherwise it
// returns how long that takes yet. 0: there is nothing to tell.
type Late func(now time.Time) time.Duration
