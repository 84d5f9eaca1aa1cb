package collective

import (
	"cmp"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
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

// backends are those of the methods.
var backends = [operation.Methods]string{
	operation.AloneOnly: BackendNone, operation.OverSockets: BackendSockets, operation.InMemory: BackendMemory, operation.BetweenHosts: BackendHosts,
	operation.ByDoubling: BackendSockets, operation.ByRabenseifner: BackendSockets, operation.ByRing: BackendSockets, operation.ByDirect: BackendSockets,
	operation.ByLeaders: BackendHosts, operation.ByWaves: BackendHosts, operation.ByRings: BackendHosts, operation.ByAdasum: BackendHosts,
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
	// included, and Bytes is the size of this rank's tensors, where known beforehand. One of 16
	// AllReduces in memory of less than 1 KiB is timed, and counts for those after it; long waits
	// always count.
	Count    uint64
	Duration time.Duration
	Bytes    uint64
}

const (
	// leastTimed is the least size of an AllReduce in memory that is always timed, in bytes. Two
	// looks at the clock are a fifth of the time of the smallest ones, so one of timedOf is timed.
	// Others count as long as that one, and as long as they have slept.
	leastTimed = 1 << 10
	timedOf    = 16
)

// tally counts operations. It costs an operation two looks at the clock, at most, and three
// additions.
type tally struct {
	origin time.Time
	cells  [operation.Actions][SizeClasses][operation.Methods]tallied
}

type tallied struct {
	count, nanoseconds, bytes atomic.Uint64
	usual                     atomic.Int64 // nanoseconds of the last one that was timed, less what it waited; 0: none was
}

func newTally() *tally { return &tally{origin: time.Now()} }

// now is the time since the tally began.
func (t *tally) now() time.Duration { return time.Since(t.origin) }

// note counts an operation that began then and has ended.
func (t *tally) note(a operation.Action, bytes int, begun time.Duration, by operation.Method) {
	t.cell(a, bytes, by).note(bytes, t.now()-begun)
}

func (t *tally) cell(a operation.Action, bytes int, by operation.Method) *tallied {
	return &t.cells[a][SizeClass(bytes)][by]
}

// due reports whether the nth operation of a group is timed, which is done in memory.
func (cell *tallied) due(d operation.Descriptor, n uint64) bool {
	return d.Action != operation.AllReduce || d.Bytes() >= leastTimed || n%timedOf == 0 || cell.usual.Load() == 0
}

func (cell *tallied) note(bytes int, took time.Duration) {
	cell.count.Add(1)
	cell.nanoseconds.Add(uint64(max(0, took)))
	cell.bytes.Add(uint64(max(0, bytes)))
}

// backend is the method of operations that have no other.
func (g *Group) backend() operation.Method {
	switch {
	case g.call.Path == nil:
		return operation.AloneOnly
	case g.call.TwoLevels():
		return operation.BetweenHosts
	case g.call.Here() != nil:
		return operation.InMemory
	}
	return operation.OverSockets
}

// ran is the method of the operation that has ended.
func (g *Group) ran() operation.Method { return cmp.Or(g.call.Method, g.backend()) }

// Operations returns the operations of all groups of the endpoint so far. It may be called at any
// time, and does not block.
func (e *Endpoint) Operations() (all []Operations) {
	for a := range e.tally.cells {
		for c := range e.tally.cells[a] {
			for b := range e.tally.cells[a][c] {
				cell := &e.tally.cells[a][c][b]
				if n := cell.count.Load(); n > 0 {
					all = append(all, Operations{
						Kind: operation.Action(a).String(), Backend: backends[b], Algorithm: operation.Method(b).String(), SizeClass: c, Count: n,
						Duration: time.Duration(cell.nanoseconds.Load()), Bytes: cell.bytes.Load(),
					})
				}
			}
		}
	}
	return all
}
