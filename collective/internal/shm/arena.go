package shm

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNoArena reports that the system refuses memory that other processes could map.
var ErrNoArena = errors.New("shm: memory cannot be shared with other processes")

// arena is the memory of this process that other processes of the host can map: one memfd as large
// as the machine's memory. Only pages that were written use memory.
var arena struct {
	mu     sync.Mutex
	failed error
	free   []extent       // in the order of their addresses, with used memory between any two
	used   map[uint64]int // sizes of allocations, by offset
}

// region is the arena's memory; nil before the first use.
var region atomic.Pointer[mapping]

// extent is the bytes [from, to) of the region.
type extent struct{ from, to uint64 }

// up returns n rounded up to a multiple of align, a power of two.
func up(n, align uint64) uint64 { return (n + align - 1) &^ (align - 1) }

// room returns the number of bytes of e after its first address with the given alignment.
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

// Alloc returns n zero bytes, aligned to a page, in memory that the other processes of this host
// can map. AllReduce copies less if all data is large and in such memory. From 2 MiB on, the memory
// has huge pages if there are any, and is allocated at once. It is not garbage collected: [Free]
// releases it, for which n must be at least 1. The error is [ErrNoArena] if the system refuses such
// memory.
func Alloc(n int) ([]byte, error) {
	if n < 0 || n > math.MaxInt-page {
		return nil, fmt.Errorf("shm: %d bytes cannot be allocated", n)
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
		return nil, fmt.Errorf("shm: no room for %d bytes is left in the arena of %d", n, len(own.memory))
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

// enlarge converts memory that is aligned for it to huge pages, in which address translation is
// much faster. The kernel does this on request whatever the system's setting for shared memory is,
// if at least one page of each is present. Failures have no effect.
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

// Free releases memory that [Alloc] returned; b must begin at the same address. It must not be used
// afterwards. Free panics on other memory.
func Free(b []byte) {
	arena.mu.Lock()
	defer arena.mu.Unlock()
	from, ok := arenaOffset(b)
	size, used := arena.used[from]
	if !ok || !used {
		panic("shm: Free of memory that Alloc has not returned")
	}
	delete(arena.used, from)
	e := extent{from, from + uint64(size)}
	// Other processes may have the pages mapped. The next allocation of them must be zero.
	own := region.Load()
	if unix.Fallocate(own.file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(e.from), int64(size)) != nil {
		clear(own.memory[e.from:e.to])
	}
	i, _ := slices.BinarySearchFunc(arena.free, e.from, func(f extent, at uint64) int { return cmp.Compare(f.from, at) })
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

// openArena makes the region at its first use. It exists until the process ends.
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

// arenaOffset returns the offset of b in this process's region, if b is in the region.
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
