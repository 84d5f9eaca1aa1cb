package exchange

import "github.com/hvdrun/hvdrun/collective/internal/frame"

// Transport moves frames from one rank of a group to the others, and delivers theirs to the group's
// inboxes. Frames to one rank arrive in the order of their sends. It detects the loss of a peer
// itself and calls fail.
type Transport interface {
	// Send starts to move a frame to another rank. It does not block.
	Send(to int, o *frame.Outgoing)
	// Flood tells every other rank why the group has ended. It blocks briefly at most.
	Flood(n *frame.Notice)
	// Release ends all movement at once; it may be called more than once.
	Release()
	// Quiesce blocks, after Release, until nothing touches a buffer of a request any more.
	Quiesce()
	// Leave tells every rank that this one sends no more operations, and blocks until all that it
	// has sent is read or a bound has passed.
	Leave()
	// Nudge tells another rank that the group's engine begins a cycle. It does not block for long,
	// and an error does no harm.
	Nudge(to int, cycle uint64)
}
