package dirtypages

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/test/calls"
)

const asksFor = "WRITTEN_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(asksFor) {
	case "":
		os.Exit(m.Run())
	case "write":
		writeFor(os.Stdin, os.Stdout)
	default:
		os.Exit(live(os.Getenv(asksFor)))
	}
}

// need skips the test if the kernel does not support watching.
func need(t *testing.T) *Watcher {
	t.Helper()
	w, err := Open()
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(w.Close)
	return w
}

// order tells another process what to write to this one's memory.
type order struct {
	Address uint64
	Length  uint64
	Byte    uint64
}

// writeFor executes orders on its parent's memory.
func writeFor(in io.Reader, out io.Writer) {
	for {
		var o order
		if binary.Read(in, binary.LittleEndian, &o) != nil {
			return
		}
		b := bytes.Repeat([]byte{byte(o.Byte)}, int(o.Length))
		local, remote := unix.Iovec{Base: &b[0]}, unix.RemoteIovec{Base: uintptr(o.Address), Len: len(b)}
		local.SetLen(len(b))
		n, err := unix.ProcessVMWritev(os.Getppid(), []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
		answer := []byte{1}
		if err != nil || n != len(b) {
			answer[0] = 0
		}
		if _, err := out.Write(answer); err != nil {
			return
		}
	}
}

// stranger is a process that writes to this one's memory.
type stranger struct {
	in  io.Writer
	out io.Reader
}

func newStranger(t *testing.T) *stranger {
	t.Helper()
	_ = unix.Prctl(unix.PR_SET_PTRACER, unix.PR_SET_PTRACER_ANY, 0, 0, 0) // required by the Yama module
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asksFor+"=write")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	return &stranger{in, out}
}

// write makes the stranger set b to v, and reports whether the kernel permitted it.
func (s *stranger) write(b []byte, v byte) bool {
	o := order{uint64(uintptr(unsafe.Pointer(&b[0]))), uint64(len(b)), uint64(v)}
	answer := make([]byte, 1)
	if binary.Write(s.in, binary.LittleEndian, o) != nil {
		return false
	}
	_, err := io.ReadFull(s.out, answer)
	return err == nil && answer[0] == 1
}

// writers are the ways to set all bytes of b to v.
func writers(t *testing.T) map[string]func(b []byte, v byte) {
	fill := func(b []byte, v byte) {
		for i := range b {
			b[i] = v
		}
	}
	other := newStranger(t)
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	return map[string]func(b []byte, v byte){
		"stores": fill,
		"copy":   func(b []byte, v byte) { copy(b, bytes.Repeat([]byte{v}, len(b))) },
		"another goroutine": func(b []byte, v byte) {
			var g sync.WaitGroup
			g.Go(func() { fill(b, v) })
			g.Wait()
		},
		"a pipe": func(b []byte, v byte) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			var g sync.WaitGroup
			g.Go(func() {
				_, _ = w.Write(bytes.Repeat([]byte{v}, len(b)))
				_ = w.Close()
			})
			if _, err := io.ReadFull(r, b); err != nil {
				t.Error(err)
			}
			g.Wait()
		},
		"/proc/self/mem": func(b []byte, v byte) {
			if _, err := mem.WriteAt(bytes.Repeat([]byte{v}, len(b)), int64(uintptr(unsafe.Pointer(&b[0])))); err != nil {
				fill(b, v)
			}
		},
		"another process": func(b []byte, v byte) {
			if !other.write(b, v) {
				fill(b, v)
			}
		},
	}
}

// mapped returns new memory outside of the Go heap, with the given advice.
func mapped(t *testing.T, n, flags, advice int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Madvise(b, advice); err != nil {
		t.Fatal(err)
	}
	return b
}

// model records the chunks at their last Keep, as a user of Memory does.
type model struct {
	live, kept []byte
	memory     *Memory
	size       int
}

// changed reports whether chunk i can have changed since Keep: its unwatched bytes differ, or the
// memory says so.
func (m *model) changed(i int) bool {
	head, tail := m.memory.Edges()
	a, b := i*m.size, min((i+1)*m.size, len(m.live))
	if h := min(head, b); a < h && !bytes.Equal(m.live[a:h], m.kept[a:h]) {
		return true
	}
	if e := max(len(m.live)-tail, a); e < b && !bytes.Equal(m.live[e:b], m.kept[e:b]) {
		return true
	}
	return m.memory.Changed(i)
}

// Whatever writes to the memory, a chunk that is not Changed is equal to its value at Keep.
func TestEveryWriteIsSeen(t *testing.T) {
	w := need(t)
	ways := writers(t)
	names := make([]string, 0, len(ways))
	for name := range ways {
		names = append(names, name)
	}
	slices.Sort(names)
	const chunk = 128 << 10
	backing := map[string][]byte{
		"heap":        make([]byte, 3<<20),
		"fresh pages": mapped(t, 3<<20, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, unix.MADV_NOHUGEPAGE),
		"huge pages":  mapped(t, 8<<20, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, unix.MADV_HUGEPAGE),
	}
	clear(backing["huge pages"][4<<20:])
	for where, all := range backing {
		t.Run(where, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				// Two slices of the same memory, which mostly share a page.
				cut := rapid.IntRange(1<<20, 2<<20).Draw(t, "cut")
				parts := [][]byte{all[rapid.IntRange(0, 5000).Draw(t, "from"):cut], all[cut : len(all)-rapid.IntRange(0, 5000).Draw(t, "to")]}
				watch := w.Watch
				if rapid.Bool().Draw(t, "calm") {
					watch = w.WatchCalm
				}
				memories, errs := watch(parts, chunk)
				models := make([]*model, len(parts))
				for i, m := range memories {
					if m == nil {
						t.Fatal(errs[i])
					}
					defer m.Close()
					models[i] = &model{parts[i], bytes.Clone(parts[i]), m, chunk}
				}
				for range rapid.IntRange(1, 30).Draw(t, "steps") {
					m := rapid.SampledFrom(models).Draw(t, "part")
					switch what := rapid.SampledFrom([]string{"write", "write", "write", "scan", "scan", "give back"}).Draw(t, "what"); what {
					case "write":
						n := rapid.SampledFrom([]int{1, 100, 5000, 200_000}).Draw(t, "length")
						at := rapid.IntRange(0, len(m.live)-n).Draw(t, "at")
						ways[rapid.SampledFrom(names).Draw(t, "by")](m.live[at:at+n], byte(rapid.IntRange(0, 255).Draw(t, "value")))
					case "give back": // as a runtime does with memory that it returns to the system
						if where != "heap" {
							from := rapid.IntRange(0, len(all)/4096-10).Draw(t, "page") * 4096
							if err := unix.Madvise(all[from:from+10*4096], unix.MADV_DONTNEED); err != nil {
								t.Fatal(err)
							}
						}
					case "scan":
						if err := m.memory.Scan(); err != nil {
							t.Fatal(err)
						}
						for i := range (len(m.live) + chunk - 1) / chunk {
							a, b := i*chunk, min((i+1)*chunk, len(m.live))
							if !m.changed(i) && !bytes.Equal(m.live[a:b], m.kept[a:b]) {
								t.Fatalf("chunk %d of %d bytes was written to unseen", i, len(m.live))
							}
							if m.memory.Look(i) >= chunk {
								t.Fatalf("look at %d", m.memory.Look(i))
							}
							if rapid.Bool().Draw(t, "keep") {
								same := bytes.Equal(m.kept[a:b], m.live[a:b])
								copy(m.kept[a:b], m.live[a:b])
								if m.memory.Keep(i, same); rapid.IntRange(0, 9).Draw(t, "arm") == 0 {
									m.memory.Arm(i)
								}
							}
						}
					}
				}
			})
		})
	}
}

// Calm memory is watched only where it does not change. A chunk that changes in every step costs
// nothing: none of its pages is ever protected.
func TestCalmMemory(t *testing.T) {
	w := need(t)
	const chunk, chunks = 256 << 10, 4
	b := mapped(t, chunks*chunk, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, unix.MADV_NOHUGEPAGE)
	clear(b)
	memories, errs := w.WatchCalm([][]byte{b}, chunk)
	m := memories[0]
	if m == nil {
		t.Fatal(errs[0])
	}
	step := func(writes ...int) (changed []int) {
		t.Helper()
		for _, i := range writes {
			b[i*chunk+77]++
		}
		if err := m.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range chunks {
			if m.Changed(i) {
				changed = append(changed, i)
			}
			m.Keep(i, !slices.Contains(writes, i))
		}
		return changed
	}
	for range 20 {
		if got := step(0, 1, 2, 3); len(got) != chunks || !m.Resting() {
			t.Fatalf("all change: %v, resting %v", got, m.Resting())
		}
	}
	step(0, 1)
	if got := step(0, 1); len(got) != chunks || m.Resting() { // 2 and 3 are protected now
		t.Errorf("two are calm: %v, resting %v", got, m.Resting())
	}
	for range 10 {
		if got := step(0, 1); !slices.Equal(got, []int{0, 1}) {
			t.Errorf("two are calm: %v", got)
		}
	}
	if got := step(0, 2); !slices.Equal(got, []int{0, 1, 2}) {
		t.Errorf("one of them is written to: %v", got)
	}
	// Chunk 3 is written to each time soon after it is watched, so it is watched less and less
	// often.
	protected := 0
	for range 400 {
		write := []int{0, 1, 2}
		if m.chunks[3].mode == watched {
			protected++
			write = append(write, 3)
		}
		if got := step(write...); len(got) != chunks && m.chunks[3].mode != watched {
			t.Fatalf("%v", got)
		}
	}
	if protected > 16 {
		t.Errorf("a chunk that changes again and again was protected %d times", protected)
	}
	m.Arm(0)
	if step(); m.chunks[0].mode != watched {
		t.Error("an armed chunk is not watched")
	}
}

// Memory without writes is not Changed, and of written memory only the written chunks are.
func TestQuietMemoryIsQuiet(t *testing.T) {
	w := need(t)
	const chunk = 256 << 10
	b := mapped(t, 16*chunk, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, unix.MADV_NOHUGEPAGE)
	clear(b)
	memories, errs := w.Watch([][]byte{b}, chunk)
	m := memories[0]
	if m == nil {
		t.Fatal(errs[0])
	}
	changed := func() (which []int) {
		if err := m.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			if m.Changed(i) {
				which = append(which, i)
			}
			m.Keep(i, false)
		}
		return which
	}
	if n := len(changed()); n != 16 {
		t.Errorf("%d chunks count as written to at first", n)
	}
	if got := changed(); got != nil {
		t.Errorf("nobody has written to %v", got)
	}
	for i := range 8 {
		b[3*chunk+5*4096+7]++
		_ = b[9*chunk] // a read
		if got := changed(); !slices.Equal(got, []int{3}) || m.Look(3) != 5*4096 {
			t.Errorf("%d: written to %v, at %d", i, got, m.Look(3))
		}
	}
	// Each step rewrites a whole chunk. The chunk is watched in one step, and after that a part of
	// it in a few of the 300 steps.
	whole, samples := 0, 0
	for range 300 {
		clear(b[6*chunk : 7*chunk])
		if got := changed(); !slices.Equal(got, []int{6}) {
			t.Fatalf("written to %v", got)
		}
		switch m.chunks[6].mode {
		case watched:
			whole++
		case sampled:
			samples++
		}
	}
	if whole != 1 || samples < 5 || samples > 9 {
		t.Errorf("a chunk that is always written to was watched in %d steps of 300, and a part of it in %d", whole, samples)
	}
	// Some time after the writes have ended it is watched again.
	steps := 0
	for len(changed()) > 0 {
		steps++
	}
	if steps > 2*longest+3 {
		t.Errorf("%d steps until a chunk counts as quiet", steps)
	}
}

// Goroutines that write to the same pages beside the memory neither hide writes nor are blocked.
func TestNeighbours(t *testing.T) {
	w := need(t)
	all := make([]byte, 1<<20)
	live := all[100 : len(all)-100]
	memories, errs := w.Watch([][]byte{live}, 128<<10)
	if memories[0] == nil {
		t.Fatal(errs[0])
	}
	var stop atomic.Bool
	var others sync.WaitGroup
	for _, beside := range [][]byte{all[:100], all[len(all)-100:]} {
		others.Go(func() {
			for !stop.Load() {
				for i := range beside {
					beside[i]++
				}
				runtime.Gosched()
			}
		})
	}
	m := &model{live, bytes.Clone(live), memories[0], 128 << 10}
	for n := range 200 {
		if n%3 == 0 {
			live[n*5000]++
			live[n%100]++
			live[len(live)-1-n%50]++
		}
		if err := m.memory.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range 8 {
			a, b := i*m.size, min((i+1)*m.size, len(live))
			if !m.changed(i) && !bytes.Equal(live[a:b], m.kept[a:b]) {
				t.Fatalf("step %d: chunk %d was written to unseen", n, i)
			}
			copy(m.kept[a:b], live[a:b])
			m.memory.Keep(i, false)
		}
	}
	stop.Store(true)
	others.Wait()
}

// A write during a scan is detected by that scan or by the next.
func TestWritesDuringScans(t *testing.T) {
	w := need(t)
	b := make([]uint64, 64*512) // one page each
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&b[0])), len(b)*8)
	memories, errs := w.Watch([][]byte{raw}, 64<<10)
	m := memories[0]
	if m == nil {
		t.Fatal(errs[0])
	}
	kept := make([]uint64, len(b))
	var stop atomic.Bool
	var other sync.WaitGroup
	other.Go(func() {
		for n := uint64(1); !stop.Load(); n++ {
			atomic.StoreUint64(&b[n*7%64*512], n)
		}
	})
	scan := func(last bool) {
		if err := m.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			if last && !m.Changed(i) {
				for j := i * 8192; j < (i+1)*8192; j++ {
					if b[j] != kept[j] {
						t.Fatalf("word %d was written to unseen", j)
					}
				}
			}
			if m.Changed(i) {
				for j := i * 8192; j < (i+1)*8192; j += 512 {
					kept[j] = atomic.LoadUint64(&b[j])
				}
				m.Keep(i, false)
			}
		}
	}
	for range 500 {
		scan(false)
	}
	stop.Store(true)
	other.Wait()
	scan(true)
}

// Shared memory, files and memory that is already watched are refused.
func TestRefused(t *testing.T) {
	w := need(t)
	fd, err := unix.MemfdCreate("written", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 1<<20); err != nil {
		t.Fatal(err)
	}
	file := func(flags int) []byte {
		b, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, flags)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	ours := make([]byte, 1<<20)
	other := need(t)
	theirs := make([]byte, 1<<20)
	if _, errs := other.Watch([][]byte{theirs}, 4096); errs[0] != nil {
		t.Fatal(errs[0])
	}
	for _, c := range []struct {
		name   string
		memory []byte
		want   error
	}{
		{"a segment of several processes", file(unix.MAP_SHARED), errNotOurs},
		{"a file's", file(unix.MAP_PRIVATE), errNotOurs},
		{"shared", mapped(t, 1<<20, unix.MAP_SHARED|unix.MAP_ANONYMOUS, unix.MADV_NORMAL), errNotOurs},
		{"small", make([]byte, 5*4096), errSmall},
		{"none", nil, errSmall},
		{"another's", theirs, unix.EBUSY},
		{"ours", ours, nil},
		{"ours again", ours[300_000:], errOverlaps},
	} {
		memories, errs := w.Watch([][]byte{c.memory}, 64<<10)
		if !errors.Is(errs[0], c.want) || (memories[0] == nil) != (c.want != nil) {
			t.Errorf("%s: %v", c.name, errs[0])
		}
	}
	other.Close()
	if memories, errs := w.Watch([][]byte{theirs}, 64<<10); memories[0] == nil {
		t.Errorf("it is nobody's any more: %v", errs[0])
	}
}

// A scan fails if memory was unmapped and mapped again at the same address.
func TestReplacedMemory(t *testing.T) {
	w := need(t)
	b := mapped(t, 1<<20, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, unix.MADV_NORMAL)
	memories, errs := w.Watch([][]byte{b}, 64<<10)
	m := memories[0]
	if m == nil {
		t.Fatal(errs[0])
	}
	if err := m.Scan(); err != nil {
		t.Fatal(err)
	}
	at := unsafe.Pointer(&b[8<<12])
	if _, err := unix.MmapPtr(-1, 0, at, 4<<12, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	if err := m.Scan(); !errors.Is(err, unix.EPERM) {
		t.Errorf("scan: %v", err)
	}
}

// Child processes share the memory until they execute another program.
func TestProcessesThatAreStarted(t *testing.T) {
	w := need(t)
	b := make([]byte, 1<<20)
	memories, errs := w.Watch([][]byte{b}, 64<<10)
	m := memories[0]
	if m == nil {
		t.Fatal(errs[0])
	}
	for n := range 5 {
		if err := m.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			m.Keep(i, false)
		}
		if err := exec.Command("true").Run(); err != nil {
			t.Skip(err)
		}
		b[n*100_000]++
		if err := m.Scan(); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			if m.Changed(i) != (i == n*100_000/(64<<10)) {
				t.Errorf("%d: chunk %d changed: %v", n, i, m.Changed(i))
			}
		}
	}
}

// live runs in a process with fewer privileges: it prints the results of Open and Watch.
func live(as string) int {
	runtime.LockOSThread()
	if name, denied := strings.CutPrefix(as, "deny "); denied {
		if err := refusals[name].Enter(); err != nil {
			fmt.Println(err)
			return 1
		}
	} else if err := errors.Join(unix.Setuid(65534), unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)); err != nil {
		fmt.Println(err)
		return 1
	}
	w, err := Open()
	if err != nil {
		fmt.Println("open:", err)
		return 0
	}
	b := make([]byte, 1<<20)
	memories, errs := w.Watch([][]byte{b}, 64<<10)
	if memories[0] == nil {
		fmt.Println("watch:", errs[0])
		return 0
	}
	for range 2 {
		if err := memories[0].Scan(); err != nil {
			fmt.Println("scan:", err)
			return 0
		}
		for i := range 16 {
			memories[0].Keep(i, false)
		}
		b[70_000]++
	}
	if err := memories[0].Scan(); err != nil || !memories[0].Changed(1) || memories[0].Changed(2) {
		fmt.Println("scan:", err, memories[0].Changed(1), memories[0].Changed(2))
		return 0
	}
	fmt.Println("well")
	return 0
}

// refusals are system calls that fail, as in sandboxes and on older kernels.
var refusals = map[string]calls.Refusal{
	"userfaultfd": {Call: unix.SYS_USERFAULTFD, Errno: unix.EPERM},
	"ioctl api":   {Call: unix.SYS_IOCTL, If: &calls.Argument{Index: 1, First: uint32(ioctlAPI), Last: uint32(ioctlAPI)}, Errno: unix.EINVAL},
	"ioctl scan":  {Call: unix.SYS_IOCTL, If: &calls.Argument{Index: 1, First: uint32(ioctlScan), Last: uint32(ioctlScan)}, Errno: unix.ENOTTY},
}

// An unprivileged process can watch; if the system forbids it, Open or Watch returns an error.
func TestRights(t *testing.T) {
	need(t)
	for as, want := range map[string]string{
		"nobody":           "well",
		"deny userfaultfd": "open: userfaultfd: operation not permitted",
		"deny ioctl api":   "open: userfaultfd, asynchronous write protection: invalid argument",
		"deny ioctl scan":  "watch: pagemap scan: inappropriate ioctl for device",
	} {
		if as == "nobody" && os.Getuid() != 0 {
			continue // this process is unprivileged already
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), asksFor+"="+as)
		out, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%s: %q, %v", as, got, err)
		}
	}
}

// The request numbers equal those of the kernel's headers.
func TestRequests(t *testing.T) {
	for _, c := range []struct{ got, want uintptr }{
		{ioctlAPI, 0xc018aa3f}, {ioctlRegister, 0xc020aa00}, {ioctlUnregister, 0x8010aa01}, {ioctlScan, 0xc0606610},
		{unsafe.Sizeof(pageRegion{}), 24},
	} {
		if c.got != c.want {
			t.Errorf("%#x, want %#x", c.got, c.want)
		}
	}
}

func TestParseMaps(t *testing.T) {
	const text = `00400000-004b7000 r-xp 00000000 fe:00 131074 /usr/bin/x
00de0000-00e12000 rw-p 00000000 00:00 0 [heap]
c000000000-c000400000 rw-p 00000000 00:00 0 [anon: Go: heap]
c000400000-c004000000 rw-p 00000000 00:00 0 
c004000000-c005000000 ---p 00000000 00:00 0 
7f0000000000-7f0000100000 rw-s 00000000 00:01 2050 /memfd:hvd (deleted)
7f0000100000-7f0000200000 rw-p 00000000 fe:00 77 /data/w
7f0000200000-7f0000300000 rw-s 00000000 00:01 0 /dev/zero (deleted)
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
`
	got, err := parseMaps(strings.NewReader(text))
	want := []span{{0xde0000, 0xe12000}, {0xc000000000, 0xc004000000}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%x, %v", got, err)
	}
	if _, err := parseMaps(bufio.NewReader(strings.NewReader("what\n"))); err == nil {
		t.Error("nonsense is understood")
	}
}
