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
	leadStep             = 8   // turns of beforeLook: one look of so many and one may be too early
	mostLead             = 400 // about 100 ns
	tryAll               = 64  // of so many waits one spins as long as it may
	betweenMoves         = 512 // waits from one change of core to the next
	yields               = 20
	oversubscribedYields = 16                   // few, so that working threads can be moved to the cores of sleeping ones
	napWithContext       = 2 * time.Millisecond // how late a few members may see the end of a context
	sleepersPerCore      = 8                    // with more sleepers for each core, they see it later, see meet
	napWithoutContext    = time.Second
	looksElsewhere       = 8000 // about as long as a change of threads takes
	glances              = 500  // looks before what else is to be moved is looked for
	movingTurns          = 32   // looks before naps, while something else is to be moved
)

// publish stores a word of this member and wakes those that sleep until it has changed.
//
// A member that is about to sleep counts itself as a sleeper, makes sure that all see that, and
// only then looks at the word for a last time. So either it sees the new value there or this one
// sees the sleeper here, provided that the store does not linger in the store buffer while the
// sleepers are read. An atomic store does not, but it holds up this processor until the others have
// given up the line. Where all members can, the sleeper empties the others' store buffers instead.
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

// next is the cell that this member will write after the next one. No member looks at it before.
func (m *Member) next() *cell { return &m.own.cells[(m.op+2)%cells].cell }

// Awaits reports whether another member has called the next operation of this one already. It
// belongs to this member's operations, which do not overlap.
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

// beforeLook lets some ten nanoseconds pass between this member's arrival and its first look at the
// others' cells. A look takes the line from the core that is about to write it, and the write then
// waits for the line to come back: a member that looks too early learns of the other's arrival a
// whole transfer later, and is late itself the next time. So two members of equal pace would look
// too early in turns for ever. The time grows with looks that were too early, and shrinks with
// others, see looked.
func (m *Member) beforeLook() {
	for range m.lead {
		atomic.LoadUint32(&m.turn) // a turn that no compiler removes: a load of a line that only this member uses
	}
}

// looked adapts the time of beforeLook.
func (m *Member) looked(early bool) {
	switch {
	case !early:
		m.lead = max(0, m.lead-1)
	case !m.oversubscribed:
		m.lead = min(m.lead+leadStep, mostLead)
	}
}

// waitLong waits until a word has a value that it did not have at the first look.
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

// glance waits for a word for about as long as it takes to find what else is to be moved.
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

// spins looks at a word for as long as the budget says, where every member has a core.
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

// awaitMoving waits as await does, and moves what Meanwhile was given. It is done where the word
// has its value; otherwise nothing is left to move.
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

// await waits until the word has its value, or, if within is not 0, no longer than that once it
// sleeps.
func (m *Member) await(ctx context.Context, of int, word *uint64, value uint64, within time.Duration) (done bool, err error) {
	if m.spins(word, value) {
		return true, nil
	}
	begun := time.Now()
	done, err = m.idle(ctx, of, word, value, within)
	m.waited += time.Since(begun)
	return done, err
}

// idle is await without looks that keep the core.
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
			runtime.Gosched() // members of one process, and the program's other goroutines
			if m.dead() {
				m.abort()
			}
		} else {
			schedYield()
		}
		if atomic.LoadUint64(word) >= value {
			if i == 0 && !m.oversubscribed { // the other one has waited for this core all the time
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

// spinsForCore looks at the word of a member that runs on another core, for about as long as a
// change of threads takes, if no member that shares this one's core has to be waited for: such a
// member needs the core. It reports whether the word has its value.
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

// shortenSlices gives this thread short time slices, where there are more members than cores. Since
// Linux 6.18 a thread that yields forfeits what is left of its slice, and falls behind by as much.
// Among members that all yield that has no effect, but when one of them dies, taking down its
// memory occupies a core, and the others would wait for milliseconds before they learn of it. The
// thread has its own slice back when the members of this process that share cores have left.
func (m *Member) shortenSlices() {
	if tid := gettid(); tid != m.thread {
		borrowed.borrow(m.thread == 0)
		m.thread = tid
	}
}

// budget is how often to look at a word before the core is given away. Programs beside this one may
// take a core, and two members share another one then: one that spins only keeps the other from its
// work. Where that is seen, the budget falls; it is tried whole from time to time.
func (m *Member) budget() int {
	m.waits++
	if m.waits%tryAll == 0 {
		return spins
	}
	return m.spin
}

// moveApart moves this thread to another core where two members take turns on one. Left alone they
// stay there, also beside a core that is free: neither of them is ready to run and kept waiting for
// long enough to be moved by the system. The higher one moves, and not too often, since the other
// cores may be taken by others; every other time within its memory node.
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
	m.far = !m.far // the node's other cores may be taken
	if others.Count() > 0 {
		ownAffinity.move(&others, &all)
	}
}

// spreadOut moves this thread to another core, where there are more members than cores, if that has
// at least two members fewer than this one. The system leaves them as they are, since they sleep
// and wake too often to be counted: four members on two cores take half as long again when three of
// them are on one. The highest member of a core moves, within its memory node if that has room.
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

// sleepUntil sleeps until the word has its value, or once within a bound, if that is not 0.
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

// sleepOn makes another member wake this one when it changes a word, until the returned function is
// called.
func (m *Member) sleepOn(of int) (end func()) {
	sleepers := &m.areas[of].sleepers
	atomic.AddUint32(sleepers, 1)
	if m.relaxed {
		membarrierGlobal()
	}
	return func() { atomic.AddUint32(sleepers, ^uint32(0)) }
}

// sleep waits in the kernel, once, until something has changed or for a nap; done where the word
// has its value. It stands between sleepOn and what that returns.
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

// aborted is checked between blocks of work.
func (m *Member) aborted() bool { return atomic.LoadUint32(&m.header.abort) != 0 }
