package shm

import (
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Time slices, in nanoseconds, which Linux supports since 6.12. They differ so that the two kinds
// of threads can be distinguished.
const (
	wireSlice = 100_000 // of a tripwire's thread
	userSlice = 101_000 // of a thread that waits for members, if members share cores
)

// withSlice sets the time slice of this thread, and returns the thread's previous attributes, or
// nil if it changed nothing.
func withSlice(slice uint64) *unix.SchedAttr {
	usual, err := unix.SchedGetAttr(0, 0)
	if err != nil || usual.Policy != unix.SCHED_NORMAL || usual.Runtime == slice {
		return nil
	}
	short := *usual
	short.Runtime = slice
	if unix.SchedSetAttr(0, &short, 0) != nil {
		return nil
	}
	return usual
}

// borrowed is the threads of this process whose time slices are short while there are members that
// share cores. The threads belong to the program, and their slices are restored afterwards.
var borrowed threads

type threads struct {
	mu    sync.Mutex
	users int                     // number of members that have borrowed
	usual map[int]*unix.SchedAttr // by thread
}

// borrow gives this thread a short slice on behalf of a member. first reports whether this is the
// member's first call.
func (b *threads) borrow(first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if first {
		b.users++
	}
	if usual := withSlice(userSlice); usual != nil {
		if b.usual == nil {
			b.usual = map[int]*unix.SchedAttr{}
		}
		b.usual[int(gettid())] = usual
	}
}

// giveBack is called when a member that has borrowed ends. When the last one ends, it restores the
// slices of the threads, and of threads that they have started, which inherit the slice.
func (b *threads) giveBack() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.users--; b.users > 0 || len(b.usual) == 0 {
		return
	}
	var any *unix.SchedAttr
	for thread, usual := range b.usual {
		restore(thread, usual)
		any = usual
	}
	b.usual = nil
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return // then only the known threads are restored
	}
	for _, task := range all {
		if thread, err := strconv.Atoi(task.Name()); err == nil {
			restore(thread, any)
		}
	}
}

// restore gives a thread its usual slice back, unless the slice was changed otherwise meanwhile.
func restore(thread int, usual *unix.SchedAttr) {
	now, err := unix.SchedGetAttr(thread, 0)
	if err == nil && now.Policy == unix.SCHED_NORMAL && now.Runtime == userSlice {
		back := *now // keep a niceness that was set meanwhile
		back.Runtime = usual.Runtime
		_ = unix.SchedSetAttr(thread, &back, 0) // the thread may have ended
	}
}

// affinity reads and sets the cores of this thread.
type affinity struct {
	get, set func(*unix.CPUSet) error
}

var ownAffinity = affinity{
	get: func(s *unix.CPUSet) error { return unix.SchedGetaffinity(0, s) },
	set: func(s *unix.CPUSet) error { return unix.SchedSetaffinity(0, s) },
}

// move moves this thread to one of the cores in the set to, and then allows it all the cores in the
// set all again. If someone else has changed the thread's cores meanwhile, move keeps that change.
func (a affinity) move(to, all *unix.CPUSet) bool {
	var now unix.CPUSet
	if a.get(&now) != nil || now != *all || a.set(to) != nil {
		return false
	}
	if a.get(&now) == nil && now == *to {
		_ = a.set(all)
	}
	return true
}
