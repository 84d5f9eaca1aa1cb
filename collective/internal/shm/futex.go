package shm

import (
	"math"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWake     = 1
	futexWakeAny  = math.MaxInt32
	futexSize32   = 0x02
	futexPrivate  = 0x80
	futexWaiters  = 0x80000000
	futexDied     = 0x40000000
	membarrierAll = 1 << 1 // MEMBARRIER_CMD_GLOBAL_EXPEDITED
	membarrierIn  = 1 << 2 // MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED
)

// awaited is struct futex_waitv: a word, and the value on which a thread waits.
type awaited struct {
	value   uint64
	address uint64
	flags   uint32
	_       uint32
}

func (a *awaited) set(word *uint32, value uint32, flags uint32) {
	a.value, a.address, a.flags = uint64(value), uint64(uintptr(unsafe.Pointer(word))), futexSize32|flags
}

// futexWaitAny blocks until one of the words is woken or has another value, or, if the timeout is
// not 0, for at most that time. The words must not move.
func futexWaitAny(words []awaited, timeout time.Duration) unix.Errno {
	var end *unix.Timespec
	var ts unix.Timespec
	if timeout > 0 {
		unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		ts = unix.NsecToTimespec(ts.Nano() + int64(timeout))
		end = &ts
	}
	_, _, e := unix.Syscall6(unix.SYS_FUTEX_WAITV, uintptr(unsafe.Pointer(unsafe.SliceData(words))), uintptr(len(words)), 0,
		uintptr(unsafe.Pointer(end)), unix.CLOCK_MONOTONIC, 0)
	return e
}

// futexWakeAll wakes all threads that wait on a word of shared memory.
func futexWakeAll(word *uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, futexWakeAny, 0, 0, 0)
}

// futexWakePrivate wakes all threads of this process that wait on a word of its own memory.
func futexWakePrivate(word *uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake|futexPrivate, futexWakeAny, 0, 0, 0)
}

// haveFutexWaitAny reports whether the kernel has futex_waitv (Linux 5.16).
func haveFutexWaitAny() bool {
	return futexWaitAny(nil, 0) == unix.EINVAL
}

// low returns the lower half of a word, on which futexes operate.
func low(word *uint64) *uint32 { return (*uint32)(unsafe.Pointer(word)) }

func gettid() uintptr {
	tid, _, _ := unix.RawSyscall(unix.SYS_GETTID, 0, 0, 0)
	return tid
}

func schedYield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// joinBarriers lets membarrierGlobal of other processes reach this one, and reports whether the
// kernel supports that. In a process of several threads it takes long: the kernel waits for every
// core.
var joinBarriers = sync.OnceValue(func() bool {
	_, _, e := unix.Syscall(unix.SYS_MEMBARRIER, membarrierIn, 0, 0)
	return e == 0
})

// Prepare does the part of a process's first Join that takes long, about 20 ms, before an operation
// needs it.
func Prepare() { joinBarriers() }

// membarrierGlobal makes every store that a running thread of a process that has called
// joinBarriers has executed before it visible to this thread, and vice versa.
func membarrierGlobal() { unix.RawSyscall(unix.SYS_MEMBARRIER, membarrierAll, 0, 0) }
