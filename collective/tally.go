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

// SizeClass returns the size class of a tensor with the given number of bytes.
func SizeClass(bytes int) int {
	if bytes <= 0 {
		return 0
	}
	return min(max(0, (bits.Len(uint(bytes))+1)/2-5), SizeClasses-1)
}

// The backends of Operations.
const (
	BackendMemory  = "memory"  // the ranks are on one host and compute in shared memory
	BackendHosts   = "hosts"   // the ranks of each host share memory, and the hosts exchange data over TCP
	BackendSockets = "sockets" // the ranks exchange data over TCP
	BackendNone    = "none"    // there is only one rank
)

// backends has the backend of each method.
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
	// Algorithm is the algorithm of an AllReduce: over sockets, the result of [Algorithm.String];
	// between hosts, by the hosts' first ranks (leaders), in waves through both levels, in rings of
	// the ranks with the same position in each host, or adasum. It is empty if the backend has only
	// one algorithm for the kind.
	Algorithm string
	// Count is the number of operations, Duration their total time including waits for other ranks,
	// and Bytes the total size of this rank's tensors, as far as it is known beforehand. Only one
	// in 16 AllReduces in memory of less than 1 KiB is timed; its time stands for those that
	// follow, with their long waits added.
	Count    uint64
	Duration time.Duration
	Bytes    uint64
}

const (
	// leastTimed is the size, in bytes, from which an AllReduce in memory is always timed. Reading
	// the clock twice takes a fifth of the time of the smallest ones, so only one in timedOf of
	// these is timed. The others count with its time plus the time that they slept.
	leastTimed = 1 << 10
	timedOf    = 16
)

// tally counts operations. It costs an operation at most two readings of the clock and three
// additions.
type tally struct {
	origin time.Time
	cells  [operation.Actions][SizeClasses][operation.Methods]tallied
}

type tallied struct {
	count, nanoseconds, bytes atomic.Uint64
	usual                     atomic.Int64 // nanoseconds of the last operation that was timed, without its waits; 0 before that
}

func newTally() *tally { return &tally{origin: time.Now()} }

// now returns the time since the tally began.
func (t *tally) now() time.Duration { return time.Since(t.origin) }

// note counts an operation that began at begun and ends now.
func (t *tally) note(a operation.Action, bytes int, begun time.Duration, by operation.Method) {
	t.cell(a, bytes, by).note(bytes, t.now()-begun)
}

// cell returns the counts of operations of one kind, size class and method.
func (t *tally) cell(a operation.Action, bytes int, by operation.Method) *tallied {
	return &t.cells[a][SizeClass(bytes)][by]
}

// due reports whether the nth operation of a group in shared memory is timed.
func (cell *tallied) due(d operation.Descriptor, n uint64) bool {
	return d.Action != operation.AllReduce || d.Bytes() >= leastTimed || n%timedOf == 0 || cell.usual.Load() == 0
}

// note counts an operation.
func (cell *tallied) note(bytes int, took time.Duration) {
	cell.count.Add(1)
	cell.nanoseconds.Add(uint64(max(0, took)))
	cell.bytes.Add(uint64(max(0, bytes)))
}

// backend returns the default method of the group's operations.
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

// ran returns the method of the operation that has just ended.
func (g *Group) ran() operation.Method { return cmp.Or(g.call.Method, g.backend()) }

// Operations returns the counts of the operations of all groups of the endpoint so far. It may be
// called at any time and does not block.
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
