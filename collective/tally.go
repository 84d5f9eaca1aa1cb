package collective

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// SizeClasses is the number of size classes of tensors. Class c contains the tensors of less than
// 4^(5+c) bytes that are in no lower class: the first class ends at 1 KiB, and the last one
// contains all tensors larger than 64 MiB.
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

// method is by which backend and algorithm an operation was computed.
type method uint8

// The methods. Those of the backends are for operations that have one algorithm there. AllReduces
// over sockets, and between hosts, have several.
const (
	aloneOnly method = iota
	overSockets
	inMemory
	betweenHosts
	byDoubling
	byRabenseifner
	byRing
	byDirect
	byLeaders
	byWaves
	byRings
	byAdasum
	methods
)

var methodNames = [methods]struct{ backend, algorithm string }{
	aloneOnly: {BackendNone, ""}, overSockets: {BackendSockets, ""}, inMemory: {BackendMemory, ""}, betweenHosts: {BackendHosts, ""},
	byDoubling:     {BackendSockets, algorithmNames[Doubling]},
	byRabenseifner: {BackendSockets, algorithmNames[Rabenseifner]},
	byRing:         {BackendSockets, algorithmNames[Ring]},
	byDirect:       {BackendSockets, algorithmNames[Direct]},
	byLeaders:      {BackendHosts, "leaders"},
	byWaves:        {BackendHosts, "waves"},
	byRings:        {BackendHosts, "rings"},
	byAdasum:       {BackendHosts, "adasum"},
}

// Operations are the operations of one kind, size class, backend and algorithm that have succeeded
// on this rank.
type Operations struct {
	Kind, Backend string
	SizeClass     int
	// Algorithm is that of an AllReduce over sockets, as [Algorithm.String], or between hosts: by
	// their first ranks (leaders), in waves through both levels, in rings of the ranks of one place
	// in each host, or as adasum. Empty: the backend has one algorithm for the kind.
	Algorithm string
	// Count is how many there were, Duration is how long they took together, waits for other ranks
	// included, and Bytes is the size of this rank's tensors, where known beforehand.
	Count    uint64
	Duration time.Duration
	Bytes    uint64
}

// tally counts operations. It costs an operation two looks at the clock and three additions.
type tally struct {
	origin time.Time
	cells  [actions][SizeClasses][methods]tallied
}

type tallied struct{ count, nanoseconds, bytes atomic.Uint64 }

func newTally() *tally { return &tally{origin: time.Now()} }

// now is the time since the tally began.
func (t *tally) now() time.Duration { return time.Since(t.origin) }

// note counts an operation that began then and has ended.
func (t *tally) note(a action, bytes int, begun time.Duration, by method) {
	cell := &t.cells[a][SizeClass(bytes)][by]
	cell.count.Add(1)
	cell.nanoseconds.Add(uint64(max(0, t.now()-begun)))
	cell.bytes.Add(uint64(max(0, bytes)))
}

// backend is the method of operations that have no other.
func (g *Group) backend() method {
	switch {
	case g.path == nil:
		return aloneOnly
	case g.levels != nil:
		return betweenHosts
	case g.host.Load() != nil:
		return inMemory
	}
	return overSockets
}

// by sets the method of the operation, unless it has one: an algorithm between hosts runs others
// among some ranks.
func (c *call) by(m method) {
	if c.method == aloneOnly {
		c.method = m
	}
}

// ran is the method of an operation that has ended.
func (c *call) ran() method {
	if c.method == aloneOnly {
		return c.g.backend()
	}
	return c.method
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
						Kind: actionNames[a], Backend: methodNames[b].backend, Algorithm: methodNames[b].algorithm, SizeClass: c, Count: n,
						Duration: time.Duration(cell.nanoseconds.Load()), Bytes: cell.bytes.Load(),
					})
				}
			}
		}
	}
	return all
}
