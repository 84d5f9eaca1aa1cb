package shm

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	leadStep             = 8                    // turns of beforeLook by which a too early look increases the lead; each other look decreases it by 1
	mostLead             = 400                  // about 100 ns
	tryAll               = 64                   // one in this many waits spins for the whole budget
	betweenMoves         = 512                  // number of waits between two changes of core
	yields               = 20                   // turns in which a waiting thread yields its core before it sleeps
	oversubscribedYields = 16                   // few, so that working threads can be moved to the cores of sleeping ones
	napWithContext       = 2 * time.Millisecond // how late members may see the end of a context, if they are few
	sleepersPerCore      = 8                    // with more sleepers per core they see it later, see meet
	napWithoutContext    = time.Second
	looksElsewhere       = 8000 // polls, about as long as a switch of threads takes
	glances              = 500  // polls before Meanwhile's function is called
	movingTurns          = 32   // polls before naps, while there is something else to move
)

// publish stores a word of this member and wakes the members that sleep until it changes.
//
// A member that is about to sleep increments sleepers, makes that visible to all, and only then
// checks the word for the last time. So either the sleeper sees the new value, or this member sees
// the sleeper, provided that the store of the value is not still in the store buffer when sleepers
// is read. An atomic store ensures that, but stalls this processor until the others have released
// the line. If all members can, the sleeper instead drains the others' store buffers (membarrier).
func (m *Member) publish(word *uint64, value uint64) {
	if m.relaxed {
		storeRelease(word, value, m.next())
	} else {
		atomic.StoreUint64(word, value)
	}
	if atomic.LoadUint32(&m.own.sleepers) != 0 {
		futexWakeAll(low(word))
	}
}

// next returns the cell that this member writes after the next one. No member reads it before.
func (m *Member) next() *cell { return &m.own.cells[(m.op+2)%cells].cell }

// Awaits reports whether another member has already called this member's next operation. It must
// not overlap with operations of this member.
func (m *Member) Awaits(member int) bool {
	next := m.op + 1
	return !m.closed && atomic.LoadUint64(&m.areas[member].cells[next%cells].cell.seq) >= next
}

// wait waits until a member's word is at least value.
func (m *Member) wait(ctx context.Context, of int, word *uint64, value uint64) error {
	if atomic.LoadUint64(word) >= value {
		return nil
	}
	return m.waitLong(ctx, of, word, value)
}

// beforeLook delays the first read of the others' cells after this member's arrival by some tens of
// nanoseconds. A read takes the cache line from the core that is about to write it, and the write
// then waits until the line is back. So a member that reads too early learns of the other's arrival
// a whole transfer later, and is itself late the next time: two members of equal pace would read
// too early in turns for ever. The delay grows with reads that were too early, and shrinks with
// others, see looked.
func (m *Member) beforeLook() {
	for range m.lead {
		atomic.LoadUint32(&m.turn) // a load that the compiler does not remove, of a line that only this member uses
	}
}

// looked adapts the delay of beforeLook.
func (m *Member) looked(early bool) {
	switch {
	case !early:
		m.lead = max(0, m.lead-1)
	case !m.oversubscribed:
		m.lead = min(m.lead+leadStep, mostLead)
	}
}

// waitLong is like wait, for a word that has not had the value at the first look.
func (m *Member) waitLong(ctx context.Context, of int, word *uint64, value uint64) error {
	before := m.in(Waiting)
	done, err := false, error(nil)
	if m.other != nil && m.glance(word, value) {
		done = true
	} else if m.other != nil {
		done, err = m.awaitMoving(ctx, of, word, value)
	}
	if !done && err == nil {
		_, err = m.await(ctx, of, word, value, 0)
	}
	m.in(before)
	return err
}

// glance polls a word for about as long as a call of Meanwhile's function takes.
func (m *Member) glance(word *uint64, value uint64) bool {
	if m.oversubscribed {
		return false
	}
	for range glances {
		if atomic.LoadUint64(word) >= value {
			return true
		}
	}
	return false
}

// spins polls a word for the budget, if every member has a core.
func (m *Member) spins(word *uint64, value uint64) bool {
	if m.oversubscribed {
		return false
	}
	budget := m.budget()
	for range budget {
		if atomic.LoadUint64(word) >= value {
			m.spin = min(2*budget, spins)
			return true
		}
		if m.aborted() {
			return false
		}
	}
	return false
}

// awaitMoving is like await, but also calls Meanwhile's function. If done is false and err nil,
// nothing is left to move.
func (m *Member) awaitMoving(ctx context.Context, of int, word *uint64, value uint64) (done bool, err error) {
	sleeps, idle := false, 0
	for {
		moved, due, within := m.other()
		switch {
		case atomic.LoadUint64(word) >= value:
			return true, nil
		case m.aborted():
			return false, ErrAborted
		case within == 0:
			return false, nil
		case moved:
			idle = 0
		case !due:
			if done, err = m.await(ctx, of, word, value, within); done || err != nil {
				return done, err
			}
		case idle < movingTurns:
			idle++
			schedYield()
		default:
			if !sleeps {
				sleeps = true
				defer m.sleepOn(of)()
			}
			if done, err = m.sleep(ctx, of, word, value, within); done || err != nil {
				return done, err
			}
		}
	}
}

// await waits until the word has its value. If within is not 0, it sleeps once, for at most that
// time, and done reports whether the word has its value.
func (m *Member) await(ctx context.Context, of int, word *uint64, value uint64, within time.Duration) (done bool, err error) {
	if m.spins(word, value) {
		return true, nil
	}
	begun := time.Now()
	done, err = m.idle(ctx, of, word, value, within)
	m.waited += time.Since(begun)
	return done, err
}

// idle is like await, without polls that occupy the core.
func (m *Member) idle(ctx context.Context, of int, word *uint64, value uint64, within time.Duration) (done bool, err error) {
	turns := yields
	if m.oversubscribed {
		turns = oversubscribedYields
		m.spreadOut()
		m.shortenSlices()
		if m.spinsForCore(of, word, value) {
			return true, nil
		}
	}
	for i := range turns {
		if i%8 == 7 {
			runtime.Gosched() // for members in the same process, and the program's other goroutines
			if m.dead() {
				m.abort()
			}
		} else {
			schedYield()
		}
		if atomic.LoadUint64(word) >= value {
			if i == 0 && !m.oversubscribed { // the other member has waited for this core all the time
				m.spin = max(m.spin/2, fewSpins)
				m.moveApart(of)
			}
			return true, nil
		}
		if m.aborted() {
			return false, ErrAborted
		}
	}
	return m.sleepUntil(ctx, of, word, value, within)
}

// spinsForCore polls the word of a member that runs on another core, for about as long as a switch
// of threads takes. It does not poll if it has to wait for a member on its own core, which needs
// the core. It reports whether the word has its value.
func (m *Member) spinsForCore(of int, word *uint64, value uint64) bool {
	here := atomic.LoadUint32(&m.own.core)
	if here == 0 || atomic.LoadUint32(&m.areas[of].core) == here {
		return false
	}
	at := uintptr(unsafe.Pointer(word)) - uintptr(unsafe.Pointer(m.areas[of].control))
	for i := range m.areas {
		other := m.areas[i].control
		if i != m.index && atomic.LoadUint32(&other.core) == here && atomic.LoadUint64((*uint64)(unsafe.Add(unsafe.Pointer(other), at))) < value {
			return false
		}
	}
	for range looksElsewhere {
		if atomic.LoadUint64(word) >= value {
			return true
		}
	}
	return false
}

// shortenSlices gives this thread short time slices, if there are more members than cores. Since
// Linux 6.18 a thread that yields forfeits the rest of its slice and falls behind by as much. Among
// members that all yield that has no effect, but when one of them dies, freeing its memory occupies
// a core, and the others would wait for milliseconds before they learn of the death. The slice is
// restored when the members of this process that share cores have left.
func (m *Member) shortenSlices() {
	if tid := gettid(); tid != m.thread {
		borrowed.borrow(m.thread == 0)
		m.thread = tid
	}
}

// budget returns the number of polls of a word before the member yields its core. Other programs
// may occupy a core, so that two members share another one: if one of them spins, it only delays
// the other. The budget falls when that is observed; from time to time the whole budget is tried
// again.
func (m *Member) budget() int {
	m.waits++
	if m.waits%tryAll == 0 {
		return spins
	}
	return m.spin
}

// moveApart moves this thread to another core if two members alternate on one core. The kernel
// would leave them there even if another core is idle, since neither is runnable and waiting for
// long enough to be moved. The higher member moves, but not too often, since other programs may use
// the other cores; every other time it stays within its memory node.
func (m *Member) moveApart(of int) {
	if m.index < of || m.waits-m.moved < betweenMoves {
		return
	}
	m.moved, m.spin = m.waits, spins
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, all, ok := whereabouts()
	if !ok {
		return
	}
	others := systemNodes().others(here, all, m.far)
	m.far = !m.far // the node's other cores may be busy
	if others.Count() > 0 {
		ownAffinity.move(&others, &all)
	}
}

// spreadOut moves this thread to another core, if there are more members than cores and that core
// has at least two members fewer. The kernel does not balance them, since they sleep and wake too
// often: four members on two cores take half as long again if three of them are on one core. The
// highest member of a core moves, within its memory node if there is room.
func (m *Member) spreadOut() {
	if m.waits++; m.waits%betweenMoves != 0 {
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, all, ok := whereabouts()
	if !ok {
		return
	}
	atomic.StoreUint32(&m.own.core, uint32(here)+1)
	var on [coreBits]uint16 // members by core
	for i := range m.areas {
		core := atomic.LoadUint32(&m.areas[i].core)
		if core == 0 || int(core) > len(on) || int(core) == here+1 && i > m.index {
			return
		}
		on[core-1]++
	}
	best := systemNodes().roomiest(here, all, &on)
	if best == here {
		return
	}
	var there unix.CPUSet
	if there.Set(best); ownAffinity.move(&there, &all) {
		atomic.StoreUint32(&m.own.core, uint32(best)+1)
	}
}

// whereabouts returns the core that this thread runs on, and the cores that it may run on.
func whereabouts() (here int, all unix.CPUSet, ok bool) {
	var core uint32
	_, _, e := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&core)), 0, 0)
	ok = e == 0 && unix.SchedGetaffinity(0, &all) == nil
	return int(core), all, ok
}

// sleepUntil is like await, but only sleeps.
func (m *Member) sleepUntil(ctx context.Context, of int, word *uint64, value uint64, within time.Duration) (done bool, err error) {
	nap := napWithoutContext
	if ctx.Done() != nil {
		nap = napWithContext * time.Duration(m.sleepFactor)
	}
	defer m.sleepOn(of)()
	if within > 0 {
		return m.sleep(ctx, of, word, value, min(nap, within))
	}
	for {
		if done, err := m.sleep(ctx, of, word, value, nap); done || err != nil {
			return done, err
		}
	}
}

// sleepOn makes another member wake this one when it changes a word, until end is called.
func (m *Member) sleepOn(of int) (end func()) {
	sleepers := &m.areas[of].sleepers
	atomic.AddUint32(sleepers, 1)
	if m.relaxed {
		membarrierGlobal()
	}
	return func() { atomic.AddUint32(sleepers, ^uint32(0)) }
}

// sleep waits in the kernel once, until something changes or for at most nap. done reports whether
// the word has its value. It is called between sleepOn and end.
func (m *Member) sleep(ctx context.Context, of int, word *uint64, value uint64, nap time.Duration) (done bool, err error) {
	told := atomic.LoadUint32(&m.departures)
	seen := atomic.LoadUint64(word)
	switch {
	case seen >= value:
		return true, nil
	case m.aborted():
		return false, ErrAborted
	case m.dead():
		m.abort()
		return false, ErrAborted
	case m.gone[of].Load():
		if atomic.LoadUint64(word) >= value { // it may have changed since it was read
			return true, nil
		}
		return false, &LeftError{Member: of}
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	var words [3]awaited
	words[0].set(low(word), uint32(seen), 0)
	words[1].set(&m.header.abort, 0, 0)
	words[2].set(&m.departures, told, futexPrivate)
	futexWaitAny(words[:], nap)
	return false, nil
}

// abort ends all waits of all members.
func (m *Member) abort() {
	if atomic.SwapUint32(&m.header.abort, 1) == 0 {
		futexWakeAll(&m.header.abort)
	}
}

// aborted reports whether a member has ended all waits.
func (m *Member) aborted() bool { return atomic.LoadUint32(&m.header.abort) != 0 }
