package shm

import (
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Time slices, in nanoseconds, which Linux honours since 6.12. They differ so that the threads that
// have them can be told apart.
const (
	wireSlice = 100_000 // of a tripwire's thread
	userSlice = 101_000 // of a thread that waits for members, where these share cores
)

// withSlice gives a thread, 0 for this one, a time slice and returns what it had before; nil where
// it is left as it is.
func withSlice(thread int, slice uint64) *unix.SchedAttr {
	usual, err := unix.SchedGetAttr(thread, 0)
	if err != nil || usual.Policy != unix.SCHED_NORMAL || usual.Runtime == slice {
		return nil
	}
	short := *usual
	short.Runtime = slice
	if unix.SchedSetAttr(thread, &short, 0) != nil {
		return nil
	}
	return usual
}

// borrowed is the threads of this process whose time slices are short for as long as there are
// members that share cores. They are the program's, and get back what they had.
var borrowed threads

type threads struct {
	mu    sync.Mutex
	users int                     // members
	usual map[int]*unix.SchedAttr // by thread
}

// borrow gives this thread a short slice on behalf of a member; first for the first time.
func (b *threads) borrow(first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if first {
		b.users++
	}
	if usual := withSlice(0, userSlice); usual != nil {
		if b.usual == nil {
			b.usual = map[int]*unix.SchedAttr{}
		}
		b.usual[int(gettid())] = usual
	}
}

// giveBack is the end of a member that has borrowed. With the last one the threads get back what
// they had, and so do those that they have started, which inherit the slice. A thread that has been
// given something else meanwhile keeps that.
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
		return // then there are those alone that are known
	}
	for _, task := range all {
		if thread, err := strconv.Atoi(task.Name()); err == nil {
			restore(thread, any)
		}
	}
}

func restore(thread int, usual *unix.SchedAttr) {
	now, err := unix.SchedGetAttr(thread, 0)
	if err == nil && now.Policy == unix.SCHED_NORMAL && now.Runtime == userSlice {
		back := *now // with a niceness that it has got meanwhile
		back.Runtime = usual.Runtime
		_ = unix.SchedSetAttr(thread, &back, 0) // it may have ended
	}
}

// affinity is how this thread's cores are read and set.
type affinity struct {
	get, set func(*unix.CPUSet) error
}

var ownAffinity = affinity{
	get: func(s *unix.CPUSet) error { return unix.SchedGetaffinity(0, s) },
	set: func(s *unix.CPUSet) error { return unix.SchedSetaffinity(0, s) },
}

// move brings this thread to one of the cores, and leaves it free to run on all that were its own
// before. A choice of cores that was made for the thread meanwhile holds.
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
