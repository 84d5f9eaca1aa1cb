package shm

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrAborted is returned by operations after a member has died or has called [Member.Abort]. The
// segment cannot be used any more.
var ErrAborted = errors.New("shm: aborted")

// errClosed is returned by operations after Close.
var errClosed = errors.New("shm: the member has left")

// MismatchError reports that two members have called different operations. Both get an error that
// names the other; the remaining members get either.
type MismatchError struct {
	Member int  // the other member
	Desc   Desc // the call of that member
}

// Error names the member.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("shm: member %d has called another operation (%x)", e.Member, e.Desc)
}

// LeftError reports that a member has left without calling the operation.
type LeftError struct{ Member int }

// Error names the member.
func (e *LeftError) Error() string { return fmt.Sprintf("shm: member %d has left", e.Member) }

// Desc identifies what a member has called, in two words that the caller chooses. It must contain
// everything that must be equal in the members' calls, including the lengths of data and the
// reduction.
type Desc [2]uint64

// Reduction describes how data is combined.
type Reduction struct {
	// Size is the size of an element in bytes: 1, 2, 4 or 8. Data consists of whole elements and is
	// aligned for them.
	Size int
	// Combine sets dst[i] to a[i] combined with b[i], where a is the data of lower members. dst may
	// be a or b. The lengths are equal.
	Combine func(dst, a, b []byte)
	// Finish, if not nil, is applied once to each element of a complete reduction.
	Finish func(b []byte)
	// Mean, if not nil, replaces both if there are several members: it sets dst to the reduction of
	// the operands of all members, in order. dst may be one of them.
	Mean func(dst []byte, operands [][]byte)
}

// all sets dst to the reduction of the members' operands. Partial results are written to partial,
// which may be dst unless dst is an operand other than the first or the second.
func (r *Reduction) all(dst, partial []byte, operands [][]byte) {
	last := len(operands) - 1
	if r.Mean != nil && last > 0 {
		r.Mean(dst, operands)
		return
	}
	if last == 0 {
		copy(dst, operands[0])
	}
	for i, first := 1, operands[0]; i <= last; i++ {
		into := partial
		if i == last {
			into = dst
		}
		r.Combine(into, first, operands[i])
		first = into
	}
	if r.Finish != nil {
		r.Finish(dst)
	}
}

// Member is a member of a segment in this process. Operations of one member must not overlap; Abort
// may be called at any time.
type Member struct {
	*Segment
	position
	wire  tripwire
	other func() (moved, due bool, within time.Duration) // the function of Meanwhile, or nil
	met   func()                                         // the function of Met, or nil
	pace
	stopwatch
	progress

	underWay

	thread uintptr // the thread to which shortenSlices has given short slices, or 0

	gone       [maxMembers]atomic.Bool // members that have left, as reported by Gone
	departures uint32                  // number of calls of Gone; sleepers wake when it changes

	life   sync.RWMutex // held for reading while Abort accesses the memory
	closed bool
}

// underWay is the state of the current operation or block, kept to reuse its memory.
type underWay struct {
	regions  regions
	lengths  []int
	operands [][]byte // of the block, by member
	src, dst [][]byte // by member
}

// position identifies this member. It does not change.
type position struct {
	index, members int
	areas          []area // by member
	own            area
	watched        []int // members whose deaths this member watches, and that watch its own
}

// pace determines how a member waits for others.
type pace struct {
	oversubscribed bool          // more members than cores
	sleepFactor    int           // factor of the length of a sleep, see sleep
	relaxed        bool          // see publish
	spin           int           // see budget
	lead           int           // see beforeLook
	turn           uint32        // see beforeLook
	waited         time.Duration // see Waited
	waits          uint          // number of waits
	moved          uint          // value of waits when moveApart last moved this member
	far            bool          // the next moveApart may move it to any memory node
}

// stopwatch measures the phases of operations.
type stopwatch struct {
	times *Times // see Watch
	phase Phase  // the current phase
	since time.Time
}

// progress counts the rounds of a member.
type progress struct {
	round  int    // largest number of bytes of one part that are moved in one round
	op     uint64 // number of operations begun
	rounds uint64 // number of rounds of the operations before this one

	streams bool // see copyOut
}

// Join makes this process the member with the given index, from 0 to the number of members − 1,
// which no other process uses. It starts a thread that calls lost, which may be nil, once for each
// member that dies, one call at a time, after the members' operations have been aborted. Join does
// not wait for the other members. It fails if the kernel has no futex_waitv (before Linux 5.16).
// Close of the member, or a failed Join, closes the segment.
func (s *Segment) Join(index int, lost func(index int)) (*Member, error) {
	if !s.take() {
		return nil, errors.New("shm: the segment is closed or joined")
	}
	m, err := s.join(index, lost)
	if err != nil {
		s.mapping.close()
		return nil, err
	}
	return m, nil
}

func (s *Segment) join(index int, lost func(index int)) (*Member, error) {
	n := s.layout.members
	if index < 0 || index >= n {
		return nil, fmt.Errorf("shm: member %d is not one of %d", index, n)
	}
	if !haveFutexWaitAny() {
		return nil, errOldKernel
	}
	if lost == nil {
		lost = func(int) {}
	}
	m := &Member{
		Segment:  s,
		position: position{index: index, members: n, watched: watched(index, n), areas: make([]area, n)},
		pace:     pace{oversubscribed: true, sleepFactor: 1, spin: spins},
		underWay: underWay{lengths: make([]int, n), operands: make([][]byte, n), src: make([][]byte, n), dst: make([][]byte, n)},
	}
	for i := range m.areas {
		m.areas[i] = s.layout.areaOf(s.memory, i)
	}
	m.own = m.areas[index]
	if joinBarriers() {
		atomic.StoreUint32(&m.own.relaxed, 1)
	}
	coresOf(&m.own.cores)
	m.wire = tripwire{m: m, lost: lost}
	if err := m.wire.start(); err != nil {
		return nil, err
	}
	return m, nil
}

// Index returns the member's index.
func (m *Member) Index() int { return m.index }

// Members returns the number of members.
func (m *Member) Members() int { return m.members }

// Meanwhile makes the member call move repeatedly while it waits for others in an operation. It is
// for data outside the segment that the others may need from this process before they can continue.
// move must not block. It reports whether it moved anything, whether more may be due at any moment,
// and within what time it must be called again, which is 0 if nothing is left to move. No operation
// may be in progress.
func (m *Member) Meanwhile(move func() (moved, due bool, within time.Duration)) { m.other = move }

// Waited returns how long the member has waited since the last call of Waited. Only waits in which
// it yielded its core and moved nothing count. No operation may be in progress.
func (m *Member) Waited() time.Duration {
	waited := m.waited
	m.waited = 0
	return waited
}

// Met makes the member call met in each operation, when all members have called it. No operation
// may be in progress.
func (m *Member) Met(met func()) { m.met = met }

// Abort makes the operations in progress and all later ones of every member return [ErrAborted]. It
// may be called from any goroutine and more than once; after Close it does nothing.
func (m *Member) Abort() {
	m.life.RLock()
	defer m.life.RUnlock()
	if !m.closed {
		m.abort()
	}
}

// Aborted reports whether operations return [ErrAborted]. It may be called from any goroutine;
// after Close it is false.
func (m *Member) Aborted() bool {
	m.life.RLock()
	defer m.life.RUnlock()
	return !m.closed && m.aborted()
}

// Gone records that another member has called Close, or will call it, and calls no more operations.
// Operations that need it, including the one in progress, return a [*LeftError]; operations that it
// has already called can still finish. It may be called from any goroutine; after Close it does
// nothing.
func (m *Member) Gone(index int) {
	m.life.RLock()
	defer m.life.RUnlock()
	if m.closed || index < 0 || index >= m.members {
		return
	}
	m.gone[index].Store(true)
	atomic.AddUint32(&m.departures, 1)
	futexWakePrivate(&m.departures)
}

// Close leaves the segment. The others do not count that as a death, and it does not wake members
// that wait for this one; that needs Gone. No operation of this member may be in progress. Close
// waits for the member's thread, so it must not be called from within lost.
func (m *Member) Close() error {
	m.life.Lock()
	was := m.closed
	m.closed = true
	m.life.Unlock()
	if was {
		return errClosed
	}
	m.wire.close()
	if m.thread != 0 {
		borrowed.giveBack()
	}
	m.regions.close()
	m.mapping.close()
	return nil
}

// cpuSet has a bit for each core.
type cpuSet [16]uint64

// coresOf sets s to the cores on which this process may run.
func coresOf(s *cpuSet) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		for i := range runtime.NumCPU() {
			set.Set(i)
		}
	}
	for i := range len(s) * 64 {
		if set.IsSet(i) {
			s[i/64] |= 1 << (i % 64)
		}
	}
}

func (s *cpuSet) count() int {
	n := 0
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// begin starts an operation. It returns the member's own cell, which the caller fills and passes to
// arrive.
func (m *Member) begin(ctx context.Context) (*cell, error) {
	if m.closed {
		return nil, errClosed
	}
	if m.aborted() {
		return nil, ErrAborted
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.op++
	return &m.own.cells[m.op%cells].cell, nil
}

// arrive publishes the cell and waits for the cells of all others. When it returns, all members
// have called this operation and finished the previous one. Their cells do not change until this
// member has arrived at three more operations.
func (m *Member) arrive(ctx context.Context, c *cell, d Desc) error {
	c.desc = d
	m.publish(&c.seq, m.op)
	m.beforeLook()
	early := false
	for i := range m.areas {
		if i == m.index {
			continue
		}
		p := m.cellOf(i)
		if atomic.LoadUint64(&p.seq) < m.op {
			early = true
			if err := m.waitLong(ctx, i, &p.seq, m.op); err != nil {
				return err
			}
		}
		if p.desc != d {
			return &MismatchError{Member: i, Desc: p.desc}
		}
	}
	m.looked(early)
	if m.round == 0 {
		m.meet()
	}
	if m.met != nil {
		m.met()
	}
	return nil
}

// cellOf returns a member's cell for the operation in progress.
func (m *Member) cellOf(i int) *cell { return &m.areas[i].cells[m.op%cells].cell }

// meet compares the members' cores and capabilities, once all have arrived. The result is the same
// on all members.
func (m *Member) meet() {
	var union cpuSet
	relaxed := true
	for i := range m.areas {
		for j := range union {
			union[j] |= m.areas[i].cores[j]
		}
		relaxed = relaxed && atomic.LoadUint32(&m.areas[i].relaxed) != 0
	}
	m.oversubscribed = m.members > union.count()
	// With many sleeping members, few wake each millisecond only to check their contexts.
	m.sleepFactor = max(1, m.members/(sleepersPerCore*max(1, union.count())))
	m.relaxed = relaxed && !m.oversubscribed
	m.round = min(m.layout.out, roomyRound)
	if m.oversubscribed {
		m.round = min(m.layout.out, oversubscribedRound)
	}
}
