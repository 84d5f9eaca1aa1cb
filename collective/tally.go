package collective

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// SizeClasses is the number of classes of the sizes of tensors: class c has those of less than
// 4^(5+c) bytes that are in no lower class, so the first ends at 1 KiB, and the last has all that
// are larger than 64 MiB.
const SizeClasses = 10

// SizeClass returns the class of a tensor of so many bytes.
func SizeClass(bytes int) int {
	if bytes <= 0 {
		return 0
	}
	return min(max(0, (bits.Len(uint(bytes))+1)/2-5), SizeClasses-1)
}

// The backends of Operations.
const (
	// BackendMemory: the ranks are on one host, and compute in memory that they share.
	BackendMemory = "memory"
	// BackendHosts: the ranks of each host share memory, and the hosts exchange over TCP.
	BackendHosts = "hosts"
	// BackendSockets: the ranks exchange over TCP.
	BackendSockets = "sockets"
	// BackendNone: there is one rank.
	BackendNone = "none"
)

var backendNames = [...]string{BackendNone, BackendSockets, BackendMemory, BackendHosts}

// Operations are the operations of one kind, size class and backend that have succeeded on this
// rank.
type Operations struct {
	Kind, Backend string
	SizeClass     int
	// Count is how many there were, Duration is how long they took together, waits for other ranks
	// included, and Bytes is the size of this rank's tensors, where known beforehand.
	Count    uint64
	Duration time.Duration
	Bytes    uint64
}

// tally counts operations. It costs an operation two looks at the clock and three additions.
type tally struct {
	origin time.Time
	cells  [actions][SizeClasses][len(backendNames)]tallied
}

type tallied struct{ count, nanoseconds, bytes atomic.Uint64 }

func newTally() *tally { return &tally{origin: time.Now()} }

// now is the time since the tally began.
func (t *tally) now() time.Duration { return time.Since(t.origin) }

// note counts an operation of a group that began then and has ended.
func (t *tally) note(g *Group, a action, bytes int, begun time.Duration) {
	cell := &t.cells[a][SizeClass(bytes)][g.backend()]
	cell.count.Add(1)
	cell.nanoseconds.Add(uint64(max(0, t.now()-begun)))
	cell.bytes.Add(uint64(max(0, bytes)))
}

// backend is the index of the group's backend in backendNames.
func (g *Group) backend() int {
	switch {
	case g.path == nil:
		return 0
	case g.levels != nil:
		return 3
	case g.host.Load() != nil:
		return 2
	}
	return 1
}

// Operations returns the operations of all groups of the endpoint so far. It may be called at any
// time, and does not block.
func (e *Endpoint) Operations() (all []Operations) {
	for a := range e.tally.cells {
		for c := range e.tally.cells[a] {
			for b := range e.tally.cells[a][c] {
				cell := &e.tally.cells[a][c][b]
				if n := cell.count.Load(); n > 0 {
					all = append(all, Operations{
						Kind: actionNames[a], Backend: backendNames[b], SizeClass: c, Count: n,
						Duration: time.Duration(cell.nanoseconds.Load()), Bytes: cell.bytes.Load(),
					})
				}
			}
		}
	}
	return all
}
