package shm

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The tripwire notifies the members when one of them dies. Each member has a thread that owns a
// word for each of the others and has registered these words with the kernel as robust futexes.
// When the thread ends, the kernel walks this list before it frees the memory of the process: it
// marks each word with futexDied and wakes one waiter. Therefore each watching member has its own
// word, and the others learn of a death within a fraction of a millisecond, however large the
// process was.
//
// If there are many members, a few watch each of them, and report to the others, by a word of the
// header, which member died first.
//
// See the kernel's Documentation/locking/robust-futex-ABI.rst.

// robustHead is struct robust_list_head.
type robustHead struct {
	next    uintptr
	offset  uintptr
	pending uintptr
}

// wire is struct robust_list with the futex of that entry. The word is 0 while no thread holds it,
// otherwise the holder's thread with futexWaiters, which makes the kernel wake, or futexDied.
type wire struct {
	next uintptr
	word uint32
	_    uint32
}

// tripwire is the thread of one member.
type tripwire struct {
	m    *Member
	lost func(int)
	stop uint32
	done chan struct{}
	seen [maxMembers]bool // members whose deaths were reported
}

// fewWatched is the largest number of members for which each watches all others: a thread can wait
// for at most 128 words. Tests set it.
var fewWatched = 120

// watched returns the members that a member watches: all others or, if there are many, those at a
// distance of a power of two on the ring.
func watched(index, members int) []int {
	var all []int
	for i := range members {
		there := (i - index + members) % members
		back := members - there
		if there > 0 && (members <= fewWatched || there&(there-1) == 0 || back&(back-1) == 0) {
			all = append(all, i)
		}
	}
	return all
}

// start starts the thread. When it returns nil, the others would notice this process's death.
func (t *tripwire) start() error {
	armed := make(chan error)
	t.done = make(chan struct{})
	go t.run(armed)
	return <-armed
}

// close blocks until the thread has removed its list and nothing calls lost any more. The others do
// not count it as a death.
func (t *tripwire) close() {
	atomic.StoreUint32(&t.stop, 1)
	futexWakePrivate(&t.stop)
	<-t.done
}

func (t *tripwire) run(armed chan<- error) {
	defer close(t.done)
	runtime.LockOSThread()
	before, err := robustList()
	if err == nil {
		err = t.arm()
	}
	if err != nil {
		runtime.UnlockOSThread()
		armed <- err
		return
	}
	armed <- nil
	// With a short slice this thread, which is awake for only microseconds, runs as soon as it
	// wakes, to die or to report a death, even if other threads keep the cores busy.
	usual := withSlice(wireSlice)
	t.watch()
	t.set(0)
	if setRobustList(before) == nil && (usual == nil || unix.SchedSetAttr(0, usual, 0) == nil) {
		runtime.UnlockOSThread()
	} // otherwise the thread ends with this goroutine, with none of its words in the list
}

// arm registers the words. It runs on the locked thread that owns them. A C library uses the
// thread's list for its own robust mutexes, but none of those is locked on this thread meanwhile.
func (t *tripwire) arm() error {
	own := t.m.own
	own.robust.offset = unsafe.Offsetof(wire{}.word)
	next := &own.robust.next
	for _, i := range t.m.watched {
		*next = uintptr(unsafe.Pointer(&own.wires[i]))
		next = &own.wires[i].next
	}
	*next = uintptr(unsafe.Pointer(&own.robust))
	if err := setRobustList(uintptr(unsafe.Pointer(&own.robust))); err != nil {
		return err
	}
	t.set(uint32(unix.Gettid()) | futexWaiters)
	return nil
}

// set writes all words of this member, and wakes the others so that they wait on the new value.
func (t *tripwire) set(value uint32) {
	for _, i := range t.m.watched {
		word := &t.m.own.wires[i].word
		atomic.StoreUint32(word, value)
		futexWakeAll(word)
	}
}

// watch waits for deaths until it is stopped.
func (t *tripwire) watch() {
	words := make([]awaited, 1, 2+len(t.m.watched))
	words[0].set(&t.stop, 0, futexPrivate)
	for atomic.LoadUint32(&t.stop) == 0 {
		words = words[:1]
		if first, is := t.m.firstDead(); is {
			t.m.abort()
			t.tell(first)
		} else if atomic.LoadUint32(&t.m.header.first) == 0 {
			words = words[:2]
			words[1].set(&t.m.header.first, 0, 0)
		}
		for _, i := range t.m.watched {
			if t.seen[i] {
				continue
			}
			word := t.m.wireOf(i)
			value := atomic.LoadUint32(word)
			if value&futexDied != 0 {
				t.m.abort()
				if first, is := t.m.firstDead(); is {
					t.tell(first)
				}
				t.tell(i)
				continue
			}
			words = words[:len(words)+1]
			words[len(words)-1].set(word, value, 0)
		}
		futexWaitAny(words, 0)
	}
}

// tell reports a death once.
func (t *tripwire) tell(i int) {
	if !t.seen[i] {
		t.seen[i] = true
		t.lost(i)
	}
}

// wireOf returns the word by which this member sees the death of member i.
func (m *Member) wireOf(i int) *uint32 { return &m.areas[i].wires[m.index].word }

// Dead returns the member that died first, if one has died. The result is the same for all living
// members. It reads the words directly, so that a thread that waits in an operation, or has just
// been aborted, need not wait until its tripwire thread is scheduled. Like Abort, it may be called
// at any time.
func (m *Member) Dead() (index int, is bool) {
	m.life.RLock()
	defer m.life.RUnlock()
	if m.closed {
		return 0, false
	}
	return m.firstDead()
}

// firstDead returns the member that died first. The first member that sees a death records it in
// the header for all, since it may itself die next.
func (m *Member) firstDead() (index int, is bool) {
	first := &m.header.first
	for _, i := range m.watched {
		if atomic.LoadUint32(first) != 0 {
			break
		}
		if atomic.LoadUint32(m.wireOf(i))&futexDied != 0 && atomic.CompareAndSwapUint32(first, 0, uint32(i)+1) {
			futexWakeAll(first)
		}
	}
	i := int(atomic.LoadUint32(first)) - 1
	return i, i >= 0 && i < m.members && i != m.index
}

func (m *Member) dead() bool {
	_, is := m.firstDead()
	return is
}

func robustList() (uintptr, error) {
	var head, size uintptr
	_, _, e := unix.RawSyscall(unix.SYS_GET_ROBUST_LIST, 0, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&size)))
	if e != 0 {
		return 0, fmt.Errorf("shm: get_robust_list: %w", e)
	}
	return head, nil
}

func setRobustList(head uintptr) error {
	if _, _, e := unix.RawSyscall(unix.SYS_SET_ROBUST_LIST, head, unsafe.Sizeof(robustHead{}), 0); e != 0 {
		return fmt.Errorf("shm: set_robust_list: %w", e)
	}
	return nil
}

var errOldKernel = errors.New("shm: the kernel has no futex_waitv")
