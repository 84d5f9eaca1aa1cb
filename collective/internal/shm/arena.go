package shm

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNoArena says that this process has no memory that others could map: the system refuses it.
var ErrNoArena = errors.New("shm: no memory that other processes could map")

// arena is the memory of this process that others of the host can map: one memfd as large as the
// machine's memory. Only pages that were written take any of it.
var arena struct {
	mu     sync.Mutex
	failed error
	free   []extent       // ascending, with used memory between any two
	used   map[uint64]int // bytes by where they begin
}

// region is the arena's memory, once there is any.
var region atomic.Pointer[mapping]

// extent is from, until but without to, from the beginning of the region.
type extent struct{ from, to uint64 }

func up(n, align uint64) uint64 { return (n + align - 1) &^ (align - 1) }

// room is the size of e after its first address with this alignment.
func (e extent) room(align uint64) uint64 { return e.to - min(up(e.from, align), e.to) }

const (
	arenaMagic = 0x6876644172650001
	maxArena   = 1 << 42 // bytes
)

// arenaHeader is the first page of the region.
type arenaHeader struct {
	magic uint64
	nonce [16]byte
}

// Alloc returns n zero bytes, aligned for every element and to a page, in memory that the other
// processes of this host can map. AllReduce of large data that all lies in such memory copies less.
// From 2 MiB on it has huge pages, if there are any, and takes its memory at once. It is not
// collected as garbage: [Free] gives it back. The error is [ErrNoArena] where the system refuses
// such memory.
func Alloc(n int) ([]byte, error) {
	if n < 0 || n > math.MaxInt-page {
		return nil, fmt.Errorf("shm: no %d bytes", n)
	}
	arena.mu.Lock()
	defer arena.mu.Unlock()
	own, err := openArena()
	if err != nil {
		return nil, err
	}
	size := uint64(max(pages(n), page))
	align := uint64(page)
	if size >= hugePage {
		align = hugePage
	}
	i := slices.IndexFunc(arena.free, func(e extent) bool { return e.room(align) >= size })
	if i < 0 {
		return nil, fmt.Errorf("shm: no place for %d bytes in an arena of %d", n, len(own.memory))
	}
	e := arena.free[i]
	from := up(e.from, align)
	arena.free = slices.Delete(arena.free, i, i+1)
	for _, rest := range [...]extent{{from + size, e.to}, {e.from, from}} {
		if rest.from < rest.to {
			arena.free = slices.Insert(arena.free, i, rest)
		}
	}
	enlarge(own.memory[from : from+size])
	arena.used[from] = int(size)
	return own.memory[from : from+uint64(n) : from+uint64(n)], nil
}

// enlarge makes huge pages of memory that is aligned for them. Whatever the system's setting for
// shared memory is, it makes them when told to, of pages of which one must be there. Address
// translation is much faster in huge pages. Without them nothing is lost.
func enlarge(b []byte) {
	b = b[:len(b)&^(hugePage-1)]
	for i := 0; i < len(b); i += hugePage {
		b[i] = 0
	}
	if len(b) > 0 {
		unix.Madvise(b, unix.MADV_COLLAPSE)
	}
}

// Owns reports whether b begins in memory of [Alloc].
func Owns(b []byte) bool {
	_, ok := arenaOffset(b)
	return ok
}

// Free gives back what [Alloc] has returned; b must begin where that did. It must not be used
// afterwards. It panics on other memory.
func Free(b []byte) {
	arena.mu.Lock()
	defer arena.mu.Unlock()
	from, ok := arenaOffset(b)
	size, used := arena.used[from]
	if !ok || !used {
		panic("shm: Free of memory that is not of Alloc")
	}
	delete(arena.used, from)
	e := extent{from, from + uint64(size)}
	// Other processes may have it mapped. The next one that gets it finds zeros.
	own := region.Load()
	if unix.Fallocate(own.file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(e.from), int64(size)) != nil {
		clear(own.memory[e.from:e.to])
	}
	i, _ := slices.BinarySearchFunc(arena.free, e.from, func(f extent, at uint64) int {
		if f.from < at {
			return -1
		}
		return 1
	})
	arena.free = slices.Insert(arena.free, i, e)
	if i+1 < len(arena.free) && arena.free[i+1].from == e.to {
		arena.free[i].to = arena.free[i+1].to
		arena.free = slices.Delete(arena.free, i+1, i+2)
	}
	if i > 0 && arena.free[i-1].to == e.from {
		arena.free[i-1].to = arena.free[i].to
		arena.free = slices.Delete(arena.free, i, i+1)
	}
}

// openArena makes the region at its first use. It stays until the process ends.
func openArena() (*mapping, error) {
	if m := region.Load(); m != nil || arena.failed != nil {
		return m, arena.failed
	}
	m, err := newArena()
	if err != nil {
		arena.failed = fmt.Errorf("%w: %v", ErrNoArena, err)
		return nil, arena.failed
	}
	arena.free = []extent{{page, m.size}}
	arena.used = make(map[uint64]int)
	region.Store(m)
	return m, nil
}

func newArena() (*mapping, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return nil, err
	}
	size := uint64(info.Totalram) * uint64(info.Unit)
	m, err := newMapping("hvdrun-arena", int(min(size, maxArena))&^(page-1))
	if err != nil {
		return nil, err
	}
	h := (*arenaHeader)(unsafe.Pointer(unsafe.SliceData(m.memory)))
	h.magic, h.nonce = arenaMagic, m.nonce
	return m, nil
}

// arenaOffset is where b begins in this process's region, if it lies in there.
func arenaOffset(b []byte) (uint64, bool) {
	own := region.Load()
	if own == nil || len(b) == 0 {
		return 0, false
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(own.memory)))
	if at < base || at-base >= uintptr(len(own.memory)) {
		return 0, false
	}
	return uint64(at - base), true
}

// openArenaOf maps the region of another process.
func openArenaOf(invite []byte) (*mapping, error) {
	var v invitation
	if err := v.decode(invite); err != nil {
		return nil, err
	}
	m, err := openMapping(&v, maxArena)
	if err != nil {
		return nil, err
	}
	h := *(*arenaHeader)(unsafe.Pointer(unsafe.SliceData(m.memory)))
	if h.magic != arenaMagic || h.nonce != v.nonce {
		m.close()
		return nil, errors.New("shm: the invitation's file is not an arena")
	}
	return m, nil
}
