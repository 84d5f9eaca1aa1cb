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
// segment is of no more use.
var ErrAborted = errors.New("shm: aborted")

// errClosed is returned by operations after Close.
var errClosed = errors.New("shm: the member has left")

// MismatchError says that two members have called different operations. Both get one; others get
// either.
type MismatchError struct {
	Member int  // who has
	Desc   Desc // what it has called
}

// Error names the member.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("shm: member %d has called another operation (%x)", e.Member, e.Desc)
}

// LeftError says that a member has left without having called the operation.
type LeftError struct{ Member int }

// Error names the member.
func (e *LeftError) Error() string { return fmt.Sprintf("shm: member %d has left", e.Member) }

// Desc identifies what a member has called, in two words that the caller chooses. It must tell
// everything in which the members' calls have to be equal, the lengths of data and the reduction
// included.
type Desc [2]uint64

// Reduction says how data is combined.
type Reduction struct {
	// Size is that of an element, in bytes: 1, 2, 4 or 8. Data holds whole elements and is aligned
	// for them.
	Size int
	// Combine sets dst[i] to a[i] combined with b[i], a being of lower members. dst may be a or b.
	// The lengths are equal.
	Combine func(dst, a, b []byte)
	// Finish, if not nil, is run once over each element of a finished reduction.
	Finish func(b []byte)
	// Mean, if not nil, stands for both where there are several members: it sets dst to what the
	// operands of all members make, in their order. dst may be one of them.
	Mean func(dst []byte, operands [][]byte)
}

// all sets dst to the reduction of the members' operands. Partial results go to partial, which may
// be dst where that is no operand but the first or the second.
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

// Member is this process's part in a segment, or one of them. Operations of one member must not
// overlap; Abort may be called at any time.
type Member struct {
	*Segment
	position
	wire  tripwire
	other func() (moved, due bool, within time.Duration) // see Meanwhile; nil: none
	met   func()                                         // see Met; nil: none
	pace
	stopwatch
	progress

	underWay

	thread uintptr // see shortenSlices; 0: none yet

	gone       [maxMembers]atomic.Bool // members that have left, as this process was told
	departures uint32                  // how many times; sleepers wake when it changes

	life   sync.RWMutex // held for reading while Abort touches the memory
	closed bool
}

// underWay is of the operation, or block, under way, kept for its memory.
type underWay struct {
	regions  regions
	lengths  []int
	operands [][]byte // of the block, by member
	src, dst [][]byte // by member
}

// position is which member this one is. It does not change.
type position struct {
	index, members int
	areas          []area // by member
	own            area
	watched        []int // members whose deaths this one sees, and that see its own
}

// pace is how a member waits for others.
type pace struct {
	oversubscribed bool          // more members than cores
	sleepFactor    int           // factor of the length of a sleep, see sleep
	relaxed        bool          // see publish
	spin           int           // see budget
	lead           int           // see beforeLook
	turn           uint32        // see beforeLook
	waited         time.Duration // see Waited
	waits          uint
	moved          uint // waits when moveApart moved this member
	far            bool // moveApart is to move it to any memory node the next time
}

// stopwatch measures the phases of operations.
type stopwatch struct {
	times *Times // see Watch
	phase Phase  // under way
	since time.Time
}

// progress counts what a member has done.
type progress struct {
	round  int // most bytes of one part that move in one round
	op     uint64
	rounds uint64 // of all operations so far

	streams bool // see copyOut
}

// Join makes this process the member with this index, 0 to the number of members − 1, which no
// other process uses. It starts a thread that calls lost, which may be nil, once for each member
// that dies, one after another; the members' operations have been released then. Join does not wait
// for the other members. It fails where the kernel has no futex_waitv (before Linux 5.16). The
// segment is closed by Close of the member or by Join's failure.
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
		return nil, fmt.Errorf("shm: no member %d of %d", index, n)
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

// Index is the member's number.
func (m *Member) Index() int { return m.index }

// Members is how many there are.
func (m *Member) Members() int { return m.members }

// Meanwhile makes the member call move again and again while it waits for others in an operation:
// it is for what they may need of this process, besides the operation, before they come to theirs.
// It moves what can be moved at once, and reports whether that was anything, whether more may be
// due at any moment, and within what time it is to be called again: 0 where nothing is left. No
// operation may be under way.
func (m *Member) Meanwhile(move func() (moved, due bool, within time.Duration)) { m.other = move }

// Waited returns for how long the member has waited since the last call of Waited, in waits in
// which it gave its core away and moved nothing. No operation may be under way.
func (m *Member) Waited() time.Duration {
	waited := m.waited
	m.waited = 0
	return waited
}

// Met makes the member call met whenever all members have called the operation under way. None may
// be under way at the call of Met.
func (m *Member) Met(met func()) { m.met = met }

// Abort makes the operations under way and all later ones of every member return [ErrAborted]. It
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

// Gone says that another member has called Close, or will, and calls no more operations: those that
// need it, the one under way too, return a [*LeftError]. What it has called before can still be
// finished. It may be called from any goroutine; after Close it does nothing.
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

// Close leaves. The others do not take that for a death, and it releases none that wait for this
// member, which is what Gone is for. No operation of this member may be under way. It waits for the
// member's thread; from within lost it must not be called.
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

// coresOf finds on which cores this process may run.
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

// begin starts an operation: the member's own cell, to be filled and given to arrive.
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

// arrive publishes the cell and waits for all others'. When it returns, all members have called
// this operation, have done with the one before, and have told what is in their cells, which stay
// as they are until this member has arrived at three more.
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

// cellOf is a member's cell of the operation under way.
func (m *Member) cellOf(i int) *cell { return &m.areas[i].cells[m.op%cells].cell }

// meet compares the members' cores and abilities, once all have arrived. All get the same result.
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
