package shm

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// now returns the time of a clock that all processes of a host share.
func now() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// loopUntilAborted repeats operations on data of this size, of all kinds or only AllReduce. After a
// number of rounds, some, it also calls the function then. It returns the time when the operations
// were aborted.
func loopUntilAborted(m *Member, data []byte, all bool, some int, then func()) (time.Duration, error) {
	result, parts := aligned(len(data)), make([][]byte, m.members)
	for i := range parts {
		parts[i] = data[:len(data)/m.members/4*4]
	}
	tensor, err := Alloc(len(data))
	if err != nil {
		return 0, err
	}
	defer Free(tensor)
	for i := 0; ; i++ {
		if i == some {
			then()
		}
		err := m.AllReduce(background, Desc{1}, data, &sumOfFloats)
		if err == nil && all {
			err = m.allKinds(data, result, tensor, parts)
		}
		if err != nil {
			at := now()
			if !errors.Is(err, ErrAborted) {
				return 0, err
			}
			return at, nil
		}
	}
}

func (m *Member) allKinds(data, result, tensor []byte, parts [][]byte) error {
	return errors.Join(m.Reduce(background, Desc{2}, data, m.members-1, &sumOfFloats),
		m.Gather(background, Desc{3}, data, 4, m.members-1),
		m.ReduceScatter(background, Desc{4}, parts, result[:len(parts[m.index])], &sumOfFloats),
		m.Reduce(background, Desc{10}, tensor, m.members, &sumOfFloats),
		m.Gather(background, Desc{11}, tensor, 4, m.members),
		m.Barrier(background, Desc{5}),
		m.Broadcast(background, Desc{6}, result, 0),
		m.AllGather(background, Desc{7}, parts[0], buffersFor),
		m.AllToAll(background, Desc{8}, parts, buffersFor),
		m.reduceTensor(tensor))
}

// reduceTensor checks the result. After an abort it overwrites the tensor at once, while others may
// still read it.
func (m *Member) reduceTensor(tensor []byte) error {
	floats := unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(tensor))), len(tensor)/4)
	for i := range floats {
		floats[i] = float32(m.index + 1)
	}
	if err := m.AllReduce(background, Desc{9}, tensor, &sumOfFloats); err != nil {
		clear(floats)
		return err
	}
	want := float32(m.members*(m.members+1)) / 2
	for _, f := range floats {
		if f != want {
			return fmt.Errorf("an element is %v, not %v", f, want)
		}
	}
	return nil
}

// mortalRole calls operations until it or another member is killed. In the latter case it prints
// when it learned of that, and which member was lost.
func mortalRole(m *Member) error {
	resident, err := unix.Mmap(-1, 0, max(number("SHM_TEST_RESIDENT")<<20, page), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return err
	}
	defer unix.Munmap(resident)
	at, err := loopUntilAborted(m, aligned(number("SHM_TEST_BYTES")), number("SHM_TEST_ALL") == 1, -1, nil)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "%d %d\n", at, <-lostMembers)
	return nil
}

// lostMembers receives the members that the tripwire of this process's member has reported as lost.
var lostMembers = make(chan int, maxMembers)

// kill runs members that call operations on bytesMoved bytes. During an operation it kills the
// member with the highest index, which has resident MiB of additional memory, and returns how long
// each of the others took to notice.
func kill(tb testing.TB, n, bytesMoved, all, resident, roundsBefore int) []time.Duration {
	tb.Helper()
	lost := make(chan int, n)
	c := perform(tb, "mortal", n, func(i int) { lost <- i },
		"SHM_TEST_BYTES="+strconv.Itoa(bytesMoved), "SHM_TEST_RESIDENT="+strconv.Itoa(resident), "SHM_TEST_ALL="+strconv.Itoa(all))
	defer c.stop()
	type end struct {
		at  time.Duration
		err error
	}
	ended := make(chan end, 1)
	under := make(chan struct{})
	go func() {
		at, err := loopUntilAborted(c.member, aligned(bytesMoved), all == 1, roundsBefore, func() { close(under) })
		ended <- end{at, err}
	}()
	<-under
	victim := c.processes[n-2]
	at := now()
	if err := victim.Process.Kill(); err != nil {
		tb.Fatal(err)
	}
	e := <-ended
	if e.err != nil {
		tb.Fatal(e.err)
	}
	times := []time.Duration{e.at - at}
	if i := <-lost; i != n-1 {
		tb.Errorf("lost %d, not %d", i, n-1)
	}
	victim.Wait()
	for i, cmd := range c.processes[:n-2] {
		line, err := bufio.NewReader(c.outputs[i]).ReadString('\n')
		if err != nil {
			tb.Fatal(err)
		}
		var when time.Duration
		var who int
		if _, err := fmt.Sscan(line, &when, &who); err != nil || who != n-1 {
			tb.Fatalf("member %d says %q", i+1, line)
		}
		times = append(times, when-at)
		io.Copy(io.Discard, c.outputs[i])
		if err := cmd.Wait(); err != nil {
			tb.Errorf("member %d: %v", i+1, err)
		}
	}
	if err := c.member.Barrier(background, Desc{}); !errors.Is(err, ErrAborted) {
		tb.Errorf("after the death: %v", err)
	}
	return times
}

// TestDeath kills a member at random moments in operations that take each of the paths.
func TestDeath(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	times := 3
	if testing.Short() {
		times = 1
	}
	for _, n := range []int{2, 3} {
		for _, size := range []int{4, 8 << 10, 1 << 20, 4 << 20} {
			for range times {
				within(t, func() { kill(t, n, size, 1, 8, 1+random.IntN(5)) })
			}
		}
	}
}

// TestDeathUnwatched: members that do not watch the dying member also notice its death, even if
// they are in no operation.
func TestDeathUnwatched(t *testing.T) {
	defer func(was int) { fewWatched = was }(fewWatched)
	fewWatched = 0
	t.Setenv("SHM_TEST_WATCHED", "0")
	const n = 9
	if slices.Contains(watched(2, n), n-1) || len(watched(2, n)) != 6 {
		t.Fatalf("member 2 of %d watches %v", n, watched(2, n))
	}
	for _, size := range []int{4, 1 << 20} {
		within(t, func() { kill(t, n, size, 1, 8, 2) })
	}
	lost := make(chan int, n)
	c := perform(t, "mortal", n, func(i int) { lost <- i }, "SHM_TEST_BYTES=4", "SHM_TEST_RESIDENT=1", "SHM_TEST_ALL=0")
	defer c.stop()
	if err := c.member.AllReduce(background, Desc{1}, aligned(4), &sumOfFloats); err != nil {
		t.Error(err)
	}
	if err := c.processes[2].Process.Kill(); err != nil { // member 3
		t.Fatal(err)
	}
	if i := <-lost; i != 3 {
		t.Errorf("lost %d, not 3", i)
	}
}

// TestFirstDeath: every living member reports the member that died first as such, even after others
// have died, and gets that death reported first.
func TestFirstDeath(t *testing.T) {
	for range 3 {
		lost := make(chan int, 3)
		c := perform(t, "mortal", 4, func(i int) { lost <- i }, "SHM_TEST_BYTES=4", "SHM_TEST_RESIDENT=1", "SHM_TEST_ALL=0")
		if err := c.member.AllReduce(background, Desc{1}, aligned(4), &sumOfFloats); err != nil {
			t.Error(err)
		}
		if i, is := c.member.Dead(); is {
			t.Errorf("member %d is dead before its death", i)
		}
		var status unix.WaitStatus // member 1 must not leave when member 3 dies
		c.processes[0].Process.Signal(unix.SIGSTOP)
		if _, err := unix.Wait4(c.processes[0].Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
			t.Fatalf("a process is not stopped: %v", err)
		}
		for _, i := range []int{3, 1} {
			if err := c.processes[i-1].Process.Kill(); err != nil {
				t.Fatal(err)
			}
			if got := <-lost; got != i {
				t.Errorf("lost %d, not %d", got, i)
			}
			if first, is := c.member.Dead(); !is || first != 3 {
				t.Errorf("%d has died first (%t), not 3", first, is)
			}
		}
		c.stop()
		if i, is := c.member.Dead(); is {
			t.Errorf("member %d is dead to one that has left", i)
		}
	}
}

// TestDeathOfAll leaves nothing behind: the segments have no name.
func TestDeathOfAll(t *testing.T) {
	c := perform(t, "mortal", 3, nil, "SHM_TEST_BYTES=4000", "SHM_TEST_RESIDENT=1", "SHM_TEST_ALL=1")
	if err := c.member.AllReduce(background, Desc{1}, aligned(4000), &sumOfFloats); err != nil {
		t.Error(err)
	}
	c.stop()
	if maps, err := os.ReadFile("/proc/self/maps"); err != nil || bytes.Contains(maps, []byte("memfd:hvdrun ")) {
		t.Errorf("a segment is left: %v", err)
	}
}

// TestLeaving: members that leave do not count as dead, and the end of a thread does not count as a
// death.
func TestLeaving(t *testing.T) {
	for range 50 {
		members := gathering(t, 3, nil) // lost fails the test
		eachMust(t, members, func(m *Member) error { return m.Barrier(background, Desc{}) })
		leave(t, members[:1])
		leave(t, members[2:])
		if members[1].aborted() {
			t.Fatal("aborted by one that left")
		}
		leave(t, members[1:2])
	}
}

// BenchmarkDeath measures the time from SIGKILL to ErrAborted in the surviving members.
func BenchmarkDeath(b *testing.B) {
	for _, resident := range []int{8, 1 << 10, 4 << 10} {
		for _, size := range []int{4, 16 << 20} {
			b.Run(fmt.Sprintf("resident=%dMiB/bytes=%d", resident, size), func(b *testing.B) {
				var times []time.Duration
				for i := range b.N {
					times = append(times, kill(b, 3, size, 0, resident, 5+i%3)...)
				}
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2])/1e6, "median-ms")
				b.ReportMetric(float64(times[len(times)*99/100])/1e6, "p99-ms")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
