package shm

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSlicesGivenBack: threads that were given short time slices get their previous slices back, as
// do the threads that they have started. A thread whose slice has changed meanwhile keeps it.
func TestSlicesGivenBack(t *testing.T) {
	usual, err := unix.SchedGetAttr(0, 0)
	if err != nil || usual.Policy != unix.SCHED_NORMAL {
		t.Skip("threads of this program are not scheduled as usual")
	}
	var b threads
	const n = 3
	tids, more, ended := make(chan int, n), make(chan struct{}), make(chan struct{})
	for i := range n {
		go func() {
			defer func() { ended <- struct{}{} }()
			runtime.LockOSThread()
			b.borrow(true)
			if i > 0 {
				b.borrow(false)
			}
			tids <- int(gettid())
			<-more
		}()
	}
	var all []int
	slice := func(tid int) uint64 {
		attr, err := unix.SchedGetAttr(tid, 0)
		if err != nil {
			t.Fatal(err)
		}
		return attr.Runtime
	}
	for range n {
		tid := <-tids
		all = append(all, tid)
		if got := slice(tid); got != userSlice {
			t.Skipf("the kernel has a slice of %d for one of %d", got, userSlice)
		}
	}
	foreign := *usual
	foreign.Runtime = 3_000_000
	if err := unix.SchedSetAttr(all[0], &foreign, 0); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	delete(b.usual, all[1]) // as if another thread had started it
	b.mu.Unlock()
	for i := range n {
		if got := slice(all[1]); got != userSlice {
			t.Errorf("%d of %d members have ended, and a slice is %d", i, n, got)
		}
		b.giveBack()
	}
	for i, want := range []uint64{foreign.Runtime, usual.Runtime, usual.Runtime} {
		if got := slice(all[i]); got != want {
			t.Errorf("thread %d has a slice of %d, want %d", i, got, want)
		}
	}
	close(more)
	for range n {
		<-ended
	}
}

// TestAffinityOfOthers: cores that others assign to a thread while it is moved remain its cores.
func TestAffinityOfOthers(t *testing.T) {
	var before, to, others unix.CPUSet
	before.Set(0)
	before.Set(1)
	to.Set(1)
	others.Set(0)
	for _, test := range []struct {
		name  string
		after int // the number of calls after which others set theirs
		want  unix.CPUSet
		moved bool
	}{
		{"no other", -1, before, true},
		{"before", 0, others, false},
		{"during the move", 2, others, true},
	} {
		now, calls := before, 0
		step := func() {
			if calls == test.after {
				now = others
			}
			calls++
		}
		a := affinity{
			get: func(s *unix.CPUSet) error { step(); *s = now; return nil },
			set: func(s *unix.CPUSet) error { step(); now = *s; return nil },
		}
		if moved := a.move(&to, &before); moved != test.moved || now != test.want {
			t.Errorf("%s: moved %v, and now %v", test.name, moved, now)
		}
	}
}
