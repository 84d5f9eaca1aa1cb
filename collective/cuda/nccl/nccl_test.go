package nccl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// fake builds the NCCL and the driver of testdata in a new folder, and returns the path of NCCL.
func fake(t *testing.T, flags ...string) string {
	t.Helper()
	driver := cudatest.Library(t)
	folder, path := filepath.Dir(driver), cudatest.NCCL(t, driver, flags...)
	t.Cleanup(func() {
		if text, err := os.ReadFile(filepath.Join(folder, "wrong")); err == nil {
			t.Errorf("what no program may do:\n%s", text)
		}
		for _, pattern := range []string{"live.*", "comm.*"} {
			if left, _ := filepath.Glob(filepath.Join(folder, pattern)); len(left) > 0 {
				t.Errorf("left over: %v", left)
			}
		}
	})
	return path
}

// cuda contains the functions of the driver that these tests call.
type cuda struct {
	retain     func(*uintptr, int32) int32
	setCurrent func(uintptr) int32
	alloc      func(*uint64, uint64) int32
	newStream  func(*uintptr, uint32) int32
	newEvent   func(*uintptr, uint32) int32
	record     func(event, stream uintptr) int32
	query      func(event uintptr) int32
	free       func(uint64) int32
}

func driver(t *testing.T, nccl string) *cuda {
	t.Helper()
	handle, err := dlopen.Open(filepath.Join(filepath.Dir(nccl), "libfakecuda.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	c := &cuda{}
	var start func(uint32) int32
	if _, err := dlopen.Bind(handle, []dlopen.Symbol{
		{"cuInit", &start}, {"cuDevicePrimaryCtxRetain", &c.retain}, {"cuCtxSetCurrent", &c.setCurrent},
		{"cuMemAlloc_v2", &c.alloc}, {"cuMemFree_v2", &c.free}, {"cuStreamCreate", &c.newStream}, {"cuEventCreate", &c.newEvent},
		{"cuEventRecord", &c.record}, {"cuEventQuery", &c.query},
	}); err != nil {
		t.Fatal(err)
	}
	if start(0) != 0 {
		t.Fatal("cuInit")
	}
	return c
}

// rank is a rank on its own thread.
type rank struct {
	t     *testing.T
	cuda  *cuda
	lib   *Library
	rank  int
	event uintptr
	freed []uint64

	stream uintptr
}

// ranks runs f for all ranks concurrently, and waits for them.
func ranks(t *testing.T, lib *Library, path string, n int, f func(r *rank) error) {
	t.Helper()
	c := driver(t, path)
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			runtime.LockOSThread()
			r := &rank{t: t, cuda: c, lib: lib, rank: i}
			var context uintptr
			if c.retain(&context, 7)+c.setCurrent(context)+c.newStream(&r.stream, 1)+c.newEvent(&r.event, 2) != 0 {
				errs[i] = errors.New("the driver fails")
				return
			}
			errs[i] = f(r)
			for _, a := range r.freed {
				c.free(a)
			}
		})
	}
	all.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
}

// memory allocates n bytes on the fake device, which the host can access too.
func (r *rank) memory(n int) (uint64, []byte) {
	var address uint64
	if r.cuda.alloc(&address, uint64(n)) != 0 {
		panic("no memory")
	}
	r.freed = append(r.freed, address)
	return address, unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
}

// wait polls until the communicator is no longer busy.
func wait(c *Comm, err error) error {
	for err == nil {
		if err = c.Poll(); err == nil {
			return nil
		}
		if errors.Is(err, ErrInProgress) {
			err = nil
			runtime.Gosched()
		}
	}
	return err
}

// done waits until an operation has also ended on the device.
func (r *rank) done(c *Comm, err error) error {
	if err := wait(c, err); err != nil {
		return err
	}
	r.cuda.record(r.event, r.stream)
	for r.cuda.query(r.event) != 0 {
		runtime.Gosched()
	}
	return nil
}

func end(c *Comm) error {
	if err := wait(c, c.Finalize()); err != nil {
		return err
	}
	return c.Destroy()
}

// TestLoad: a loaded library reports its version and the functions that it lacks. An unusable
// library is an error that names the reason.
func TestLoad(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "libnccl.so.2")); !errors.Is(err, errUnavailable) {
		t.Error(err)
	}
	for _, c := range []struct{ flags, want string }{
		{"-DVERSION=21200", "is version 2.12.0; 2.14.0 is the oldest that can be used"},
		{"-DVERSION=2804", "is version 2.8.4; 2.14.0 is the oldest"},
		{"-DncclAllGather=ncclAllGatherings", "is version 2.30.7, but lacks ncclAllGather"},
		{"-DncclGetVersion=version", "has no ncclGetVersion"},
	} {
		if _, err := Load(fake(t, c.flags)); !errors.Is(err, errUnavailable) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.flags, err)
		}
	}
	all := []string{"ncclCommInitRankScalable", "ncclCommShrink", "ncclCommRevoke", "ncclCommGetUniqueId", "ncclCommGrow"}
	for _, c := range []struct {
		version Version
		lacks   []string
	}{{21403, all}, {22304, all[1:]}, {22703, all[2:]}, {22807, all[3:]}, {22902, nil}} {
		path := fake(t, fmt.Sprint("-DVERSION=", int(c.version)))
		l, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Load(path); again != l || err != nil {
			t.Error("loaded twice", err)
		}
		if l.Version() != c.version || !slices.Equal(l.Lacks(), c.lacks) || l.CanGrow() != (c.lacks == nil) ||
			l.CanShrink() != (c.version >= 22703) || l.CanRevoke() != (c.version >= 22807) || l.Path() != path {
			t.Errorf("%v lacks %v", l.Version(), l.Lacks())
		}
	}
}

// TestOperations tests all operations, with communicators made in every possible way.
func TestOperations(t *testing.T) {
	const n = 3
	path := fake(t)
	lib, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, begin := range map[string]func(ID, int, int) (*Comm, error){"by pointer": lib.Init, "by value": lib.InitByValue} {
		id, err := lib.NewID()
		if err != nil {
			t.Fatal(err)
		}
		ranks(t, lib, path, n, func(r *rank) error {
			c, err := begin(id, n, r.rank)
			if err != nil {
				return err
			}
			if err := wait(c, nil); err != nil {
				return err
			}
			from, v := r.memory(n * 8)
			to, w := r.memory(n * 8)
			for i := range v {
				v[i] = byte(r.rank*50 + i)
			}
			const all = n * 8
			expect := func(what string, got []byte, of func(i int) byte) error {
				for i, b := range got {
					if b != of(i) {
						return fmt.Errorf("%s, %s: byte %d is %d, not %d", name, what, i, b, of(i))
					}
				}
				return nil
			}
			sum := func(i int) byte { return byte(0 + i + 50 + i + 100 + i) }
			return errors.Join(
				r.done(c, c.AllReduce(from, to, all, Uint8, Sum, r.stream)), expect("AllReduce", w, sum),
				r.done(c, c.Broadcast(from, to, all, Uint8, 1, r.stream)), expect("Broadcast", w, func(i int) byte { return byte(50 + i) }),
				r.done(c, c.AllGather(from, to, 8, Uint8, r.stream)), expect("AllGather", w, func(i int) byte { return byte(i/8*50 + i%8) }),
				r.done(c, c.ReduceScatter(from, to, 8, Uint8, Sum, r.stream)), expect("ReduceScatter", w[:8], func(i int) byte { return sum(r.rank*8 + i) }),
				r.done(c, lib.Group(func() error {
					return errors.Join(c.Broadcast(from, to, 8, Uint8, 0, r.stream), c.AllReduce(from+8, to+8, 16, Uint8, Max, r.stream))
				})), expect("a group", w, func(i int) byte {
					if i < 8 {
						return byte(i)
					}
					return byte(100 + i)
				}),
				end(c))
		})
	}
}

// TestElastic: communicators shrink, with and without an operation in progress, and grow.
func TestElastic(t *testing.T) {
	path := fake(t)
	lib, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	id, err := lib.NewID()
	if err != nil {
		t.Fatal(err)
	}
	var growth ID
	told := make(chan struct{})
	ranks(t, lib, path, 4, func(r *rank) error {
		a, v := r.memory(8)
		check := func(c *Comm, want byte) error {
			v[0] = 1
			if err := r.done(c, c.AllReduce(a, a, 1, Uint8, Sum, r.stream)); err != nil || v[0] != want {
				return fmt.Errorf("the sum is %d, not %d: %w", v[0], want, err)
			}
			return nil
		}
		if r.rank == 3 { // joins later
			<-told
			c, err := lib.Join(growth, 3, 2)
			if err != nil {
				return err
			}
			return errors.Join(wait(c, nil), check(c, 3), end(c))
		}
		c, err := lib.Init(id, 3, r.rank)
		if err != nil {
			return err
		}
		if err := errors.Join(wait(c, nil), check(c, 3)); err != nil {
			return err
		}
		if r.rank == 1 { // is lost while the others are in an operation
			return c.Abort()
		}
		if err := wait(c, c.AllReduce(a, a, 1, Uint8, Sum, r.stream)); err != nil {
			return err
		}
		if r.rank == 0 { // the other rank revokes while it shrinks
			if err := wait(c, c.Revoke()); err != nil {
				return err
			}
		}
		two, err := c.Shrink([]int{1}, true)
		if err != nil {
			return err
		}
		if err := errors.Join(wait(two, nil), c.Abort(), check(two, 2)); err != nil {
			return err
		}
		var grow *ID
		if r.rank == 0 {
			if growth, err = two.GrowID(); err != nil {
				return err
			}
			close(told)
			grow = &growth
		}
		three, err := two.Grow(grow, 3)
		if err != nil {
			return err
		}
		return errors.Join(wait(three, nil), check(three, 3), end(two), end(three))
	})
}

// TestErrors: errors contain NCCL's names and messages. A communicator can be aborted in any state
// after an error.
func TestErrors(t *testing.T) {
	path := fake(t)
	lib, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ fault, want string }{
		{"init-fails 1", "nccl: ncclCommGetAsyncError: ncclSystemError (unhandled system error): the fake has no route"},
		{"breaks 1", "nccl: ncclCommGetAsyncError: ncclRemoteError (remote process exited): the fake's network is gone"},
	} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), "fault"), []byte(c.fault), 0o600); err != nil {
			t.Fatal(err)
		}
		id, err := lib.NewID()
		if err != nil {
			t.Fatal(err)
		}
		over := make(chan struct{})
		ranks(t, lib, path, 2, func(r *rank) error {
			comm, err := lib.Init(id, 2, r.rank)
			if err != nil {
				return err
			}
			defer comm.Abort()
			if r.rank == 0 {
				if strings.HasPrefix(c.fault, "breaks") {
					wait(comm, nil)
					a, _ := r.memory(4)
					wait(comm, comm.AllReduce(a, a, 1, Int32, Sum, r.stream))
				}
				<-over
				return nil
			}
			defer close(over)
			if err = wait(comm, nil); err == nil {
				a, _ := r.memory(4)
				for err = wait(comm, comm.AllReduce(a, a, 1, Int32, Sum, r.stream)); err == nil; err = comm.Poll() {
				}
			}
			var told *Error
			if !errors.As(err, &told) || err.Error() != c.want {
				return fmt.Errorf("%s: %w", c.fault, err)
			}
			return nil
		})
	}
}
