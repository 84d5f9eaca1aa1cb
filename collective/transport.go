package collective

import "github.com/hvdrun/hvdrun/collective/internal/frame"

// transport moves frames from one rank of a group to the others, and delivers theirs to the group's
// inboxes. Frames to one rank arrive in the order of their sends. It detects the loss of a peer
// itself and calls fail.
type transport interface {
	// send starts to move a frame to another rank. It does not block.
	send(to int, o *frame.Outgoing)
	// flood tells every other rank why the group has ended. It blocks briefly at most.
	flood(n *frame.Notice)
	// release ends all movement at once; it may be called more than once.
	release()
	// quiesce blocks, after release, until nothing touches a buffer of a request any more.
	quiesce()
	// leave tells every rank that this one sends no more operations, and blocks until all that it
	// has sent is read or a bound has passed.
	leave()
	// nudge tells another rank that the group's engine begins a cycle. It does not block for long,
	// and an error does no harm.
	nudge(to int, cycle uint64)
}
