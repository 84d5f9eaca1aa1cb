package exchange

import "github.com/hvdrun/hvdrun/collective/internal/frame"

// Transport moves frames from one rank of a group to the others, and delivers theirs to the group's
// inboxes. Frames to one rank arrive in the order of their sends. If a peer is lost, the transport
// ends the group.
type Transport interface {
	// Send starts to move a frame to another rank. It does not block.
	Send(to int, o *frame.Outgoing)
	// Flood sends the reason why the group has ended to every other rank. It blocks only briefly.
	Flood(n *frame.Notice)
	// Release stops all transfers. If the group has failed, it blocks until every rank has been
	// notified. It may be called more than once.
	Release()
	// Quiesce blocks, after Release, until nothing accesses a buffer of a request any more.
	Quiesce()
	// Leave notifies every rank that this one calls no more operations, and blocks until the others
	// have read everything that it has sent, or a time limit has passed.
	Leave()
	// Nudge notifies another rank that the group's engine begins a cycle. It does not block for
	// long. Errors are ignored.
	Nudge(to int, cycle uint64)
}
