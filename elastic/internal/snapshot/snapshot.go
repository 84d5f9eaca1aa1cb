// Package snapshot stores the bytes of commits: [Store.Begin] starts a [Snapshot] of live memory,
// and [Store.Hold] returns the newest one.
//
// A [Snapshot] contains the values of a state's parts at one commit, as blobs of 1 MiB chunks. It
// is immutable while it is held, so its holder reads one commit and never a mix of two. A [Store]
// makes snapshots from live memory and keeps the newest. A chunk that equals that of the last
// snapshot is shared with it. A changed chunk is copied over that of the last snapshot if nobody
// holds the last snapshot, which needs no memory; otherwise, and in background copies, it is copied
// to memory that no snapshot uses. A store therefore needs memory of the size of the state, and
// twice that if all of the state changes while snapshots are held.
//
// A snapshot can also lie in place, in the live memory itself, if the owner of the memory calls
// [Store.Vacate] before it changes the memory. Such a snapshot costs neither memory nor a copy
// until [Store.Hold] copies it for its holder, and is gone once the memory changes.
//
// [Store.Lend] lends the newest snapshot to readers that can do without chunks that later snapshots
// overwrite, such as other workers that fetch it. Lending costs no memory.
//
// A chunk that differs at its beginning is copied at once, so a state that changes completely costs
// one copy. For other chunks a 64-bit hash with a random per-process seed is compared, which reads
// only the live memory. Checksums that other processes can compare are computed on demand, once per
// chunk, outside the training loop.
//
// The package uses neither files nor networks.
package snapshot

import (
	"bytes"
	"errors"
	"hash/crc32"
	"hash/maphash"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ChunkSize is the size in bytes of all chunks of a blob except the last, which may be shorter.
const ChunkSize = 1 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum returns the checksum of a chunk, its CRC-32C.
func Sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// Chunks returns the number of chunks of a blob of n bytes.
func Chunks(n int) int { return (n + ChunkSize - 1) / ChunkSize }

// chunk is a range of bytes that one or more snapshots share.
type chunk struct {
	data  []byte
	owned bool // the store may overwrite data when no snapshot refers to it
	live  bool // data is live memory, until the store is vacated
	refs  int  // number of snapshots that refer to it; guarded by the store's mutex
	sum   atomic.Uint64

	busy    sync.RWMutex          // held to overwrite data, and for reading by lent blobs
	version uint64                // how often data has been overwritten; guarded by busy
	prior   atomic.Pointer[prior] // the overwritten version of which an audit still needs the checksum; nil: none

	// mark is the chunk's hash in this process if hashed; used only while copying.
	mark   uint64
	hashed bool
}

// prior is the checksum of a version of a chunk.
type prior struct {
	version uint64
	sum     uint32
}

// overwrite sets the chunk's data to src. If audited is set, it first keeps the checksum of the
// current data for an audit, unless the checksum of an earlier version is kept already.
func (c *chunk) overwrite(src []byte, audited bool) {
	c.busy.Lock()
	defer c.busy.Unlock()
	c.begin(audited)
	c.sum.Store(0)
	copy(c.data, src)
}

// retire starts a new version of the chunk, before its memory changes.
func (c *chunk) retire(audited bool) {
	c.busy.Lock()
	defer c.busy.Unlock()
	c.begin(audited)
}

// begin starts a new version; busy is held.
func (c *chunk) begin(audited bool) {
	if audited && c.prior.Load() == nil {
		c.prior.Store(&prior{c.version, c.checksum()})
	}
	c.version++
}

// free returns the memory of the chunk's whole pages to the operating system. Until the garbage
// collector frees the addresses, they hold zeros.
func (c *chunk) free() {
	size := os.Getpagesize()
	from := -int(uintptr(unsafe.Pointer(unsafe.SliceData(c.data)))) & (size - 1)
	if to := from + (len(c.data)-from)&^(size-1); to > from {
		_ = unix.Madvise(c.data[from:to], unix.MADV_DONTNEED)
	}
}

// glance is the number of bytes that are compared, at the most likely offset of a change, before a
// chunk is hashed.
const glance = 4096

var seed = maphash.MakeSeed()

// same reports whether live equals c. It compares the bytes at look first. If it has to hash live,
// it returns the hash too.
func (c *chunk) same(live []byte, look int) (same bool, mark uint64, hashed bool) {
	look = max(0, min(look, len(live)-glance))
	end := min(look+glance, len(live))
	if !bytes.Equal(c.data[look:end], live[look:end]) {
		return false, 0, false
	}
	if end-look == len(live) {
		return true, 0, false
	}
	if !c.hashed {
		c.mark, c.hashed = maphash.Bytes(seed, c.data), true
	}
	mark = maphash.Bytes(seed, live)
	return mark == c.mark, mark, true
}

// known marks a checksum as computed.
const known = 1 << 32

func (c *chunk) checksum() uint32 {
	sum := c.sum.Load()
	if sum == 0 {
		sum = known | uint64(Sum(c.data))
		c.sum.Store(sum)
	}
	return uint32(sum)
}

// Blob is a sequence of bytes of a snapshot. Its methods may be called concurrently while the
// snapshot is held. Of a lent blob, only Len, Chunks, Sum, Sums, TrySum and TryRead may be called,
// and Bytes if its source was Given.
type Blob struct {
	size     int
	chunks   []*chunk
	versions []uint64 // for a lent blob: versions of its chunks
}

// Len returns the blob's length in bytes.
func (p *Blob) Len() int { return p.size }

// Chunks returns the number of chunks; 0 for an empty blob.
func (p *Blob) Chunks() int { return len(p.chunks) }

// Chunk returns the bytes of chunk i. The caller must not write to them.
func (p *Blob) Chunk(i int) []byte { return p.chunks[i].data }

// Sum returns the checksum of chunk i. The first call computes it. For an overwritten chunk of a
// lent blob it returns 0, unless the checksum was kept.
func (p *Blob) Sum(i int) uint32 {
	sum, _ := p.TrySum(i)
	return sum
}

// TrySum is like Sum, and reports whether the chunk or its checksum still exists.
func (p *Blob) TrySum(i int) (sum uint32, ok bool) {
	c := p.chunks[i]
	if p.versions == nil {
		return c.checksum(), true
	}
	c.busy.RLock()
	defer c.busy.RUnlock()
	if c.version == p.versions[i] {
		return c.checksum(), true
	}
	if old := c.prior.Load(); old != nil && old.version == p.versions[i] {
		return old.sum, true
	}
	return 0, false
}

// TryRead copies chunk i to dst, which must have the chunk's length, and reports whether the chunk
// still exists.
func (p *Blob) TryRead(i int, dst []byte) bool {
	c := p.chunks[i]
	if p.versions != nil {
		c.busy.RLock()
		defer c.busy.RUnlock()
		if c.version != p.versions[i] {
			return false
		}
	}
	copy(dst, c.data)
	return true
}

// Sums returns the checksums of all chunks. It computes missing ones on all processors.
func (p *Blob) Sums() []uint32 {
	sums := make([]uint32, len(p.chunks))
	share(len(p.chunks), workers(p.size), func(i int) { sums[i] = p.Sum(i) })
	return sums
}

// Prepare computes, on all processors, the checksums, and the hashes that the comparison for the
// next snapshot needs. Only the goroutine that begins snapshots may call it.
func (p *Blob) Prepare() {
	share(len(p.chunks), workers(p.size), func(i int) {
		c := p.chunks[i]
		c.checksum()
		if !c.hashed {
			c.mark, c.hashed = maphash.Bytes(seed, c.data), true
		}
	})
}

// Bytes returns all bytes of the blob. The caller must not write to them.
func (p *Blob) Bytes() []byte {
	if len(p.chunks) == 1 {
		return p.chunks[0].data
	}
	b := make([]byte, p.size)
	p.CopyTo(b)
	return b
}

// Same reports whether the blob equals b. It reads all of both, on all processors if they are
// large.
func (p *Blob) Same(b []byte) bool { return p.same(b, ChunkSize) }

// Resembles reports whether the first 4 KiB of each chunk equal those of b.
func (p *Blob) Resembles(b []byte) bool { return p.same(b, glance) }

func (p *Blob) same(b []byte, each int) bool {
	if len(b) != p.size {
		return false
	}
	var differ atomic.Bool
	share(len(p.chunks), workers(p.size/ChunkSize*each), func(i int) {
		c := p.chunks[i].data
		n := min(each, len(c))
		if !differ.Load() && !bytes.Equal(c[:n], b[i*ChunkSize:i*ChunkSize+n]) {
			differ.Store(true)
		}
	})
	return !differ.Load()
}

// Differing returns the index of the first chunk that differs from b, among the chunks for which
// among returns true, or -1. b must have the blob's length. It reads all these chunks, on all
// processors if they are large.
func (p *Blob) Differing(b []byte, among func(chunk int) bool) int {
	differ := make([]bool, len(p.chunks))
	share(len(p.chunks), workers(p.size), func(i int) {
		c := p.chunks[i].data
		differ[i] = among(i) && !bytes.Equal(c, b[i*ChunkSize:i*ChunkSize+len(c)])
	})
	return slices.Index(differ, true)
}

// Restore makes dst, which must have the blob's length, equal to the blob. It reads the chunks for
// which changed is true, or all chunks if changed is nil, and writes those that differ. It uses all
// processors if they are large.
func (p *Blob) Restore(dst []byte, changed []bool) {
	var read []int
	for i := range p.chunks {
		if changed == nil || changed[i] {
			read = append(read, i)
		}
	}
	share(len(read), workers(len(read)*ChunkSize), func(n int) {
		c := p.chunks[read[n]].data
		if to := dst[read[n]*ChunkSize:]; !bytes.Equal(c, to[:len(c)]) {
			copy(to, c)
		}
	})
}

// CopyTo copies the blob to dst, which must have the blob's length, on all processors if it is
// large.
func (p *Blob) CopyTo(dst []byte) {
	share(len(p.chunks), workers(p.size), func(i int) { copy(dst[i*ChunkSize:], p.chunks[i].data) })
}

// Snapshot contains the bytes of one commit. The zero value has no blobs.
type Snapshot struct {
	store  *Store
	number uint64
	refs   int // guarded by the store's mutex
	blobs  []Blob
	live   bool // some of its chunks lie in place
}

// Number returns the number of the commit.
func (m *Snapshot) Number() uint64 { return m.number }

// Blobs returns the blobs in the order of the sources. They are valid while the snapshot is held.
func (m *Snapshot) Blobs() []Blob { return m.blobs }

// Release ends the hold of [Store.Hold]. It must be called once, by any goroutine.
func (m *Snapshot) Release() {
	m.store.mu.Lock()
	defer m.store.mu.Unlock()
	m.store.release(m)
}

// Source provides the bytes of one blob of a snapshot.
type Source struct {
	Bytes []byte
	// Given transfers Bytes to the snapshot, and nothing may write to them afterwards. Otherwise
	// they are copied.
	Given bool
	// InPlace means that the snapshot refers to Bytes, which must not change before Vacate or the
	// next snapshot. The fields below do not apply then.
	InPlace bool
	// Changed, if not nil, reports for each chunk whether it may differ from that of the last
	// snapshot. The other chunks are not read. It applies only to Bytes that are not Given.
	Changed []bool
	// Look, if not nil, is the offset in each chunk at which a change is most likely.
	Look []int
	// Same, if not nil, has an entry for each chunk. Copying sets the entry to whether the chunk
	// was read and equals that of the last snapshot.
	Same []bool
	// Later, if not nil, returns the bytes in place of Bytes, as Given. It is called in a goroutine
	// of the Pending, and may block until they are available.
	Later func() ([]byte, error)
}

// Store makes snapshots and keeps the newest. The zero value is an empty store. Begin and the
// methods of Pending must be called by one goroutine at a time; Hold and Release may be called
// concurrently.
type Store struct {
	mu      sync.Mutex
	last    *Snapshot
	spare   map[int][]*chunk // chunks that no snapshot uses, by length
	extra   int              // bytes in spare
	bank    int              // number of copied bytes of the newest snapshot, or of the next one
	slab    []byte           // memory that chunks do not use yet
	retired *Snapshot        // its slices are reused
	over    chan struct{}    // closed when the newest snapshot is no longer being overwritten; nil: it is not
	copying sync.RWMutex     // held for reading while chunks in place are copied
	freeing sync.RWMutex     // held for reading while memory is given back
	audits  int              // loans whose readers want the checksums of overwritten chunks
	pending Pending
}

// Last returns the newest snapshot, nil before the first. It is valid until the next Seal.
func (s *Store) Last() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// whole locks mu as soon as the newest snapshot is not being overwritten.
func (s *Store) whole() {
	for s.mu.Lock(); s.over != nil; s.mu.Lock() {
		over := s.over
		s.mu.Unlock()
		<-over
	}
}

// Hold returns the newest snapshot, or nil if the store has no snapshot, and keeps it until its
// Release. Later snapshots then use other memory. Hold waits while Copy overwrites the newest
// snapshot. If the snapshot lies in place, Hold makes a copy, and Vacate waits for that.
func (s *Store) Hold() *Snapshot {
	s.whole()
	m := s.last
	if m == nil || !m.live {
		if m != nil {
			m.refs++
		}
		s.mu.Unlock()
		return m
	}
	s.copying.RLock()
	defer s.copying.RUnlock()
	m.refs++ // until it has been copied
	s.mu.Unlock()
	held := m.copy()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range held.blobs {
		for _, c := range held.blobs[i].chunks {
			c.refs++
		}
	}
	s.release(m)
	return held
}

// copy returns a copy of a snapshot that lies in place.
func (m *Snapshot) copy() *Snapshot {
	held := &Snapshot{store: m.store, number: m.number, refs: 1, blobs: make([]Blob, len(m.blobs))}
	for i, b := range m.blobs {
		chunks := make([]*chunk, len(b.chunks))
		share(len(chunks), workers(b.size), func(j int) {
			if chunks[j] = b.chunks[j]; chunks[j].live {
				chunks[j] = m.store.take(len(b.chunks[j].data))
				chunks[j].overwrite(b.chunks[j].data, false)
			}
		})
		held.blobs[i] = Blob{size: b.size, chunks: chunks}
	}
	return held
}

// InPlace reports whether the newest snapshot lies in place.
func (s *Store) InPlace() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last != nil && s.last.live
}

// Vacate ends the newest snapshot if it lies in place, and reports whether it did. Its memory may
// be changed afterwards. The store then has no snapshot, and Hold, Lend and Audit wait for the next
// one, until Seal or Abandon.
func (s *Store) Vacate() bool {
	s.mu.Lock()
	m := s.last
	if m == nil || !m.live {
		s.mu.Unlock()
		return false
	}
	s.last, s.over = nil, make(chan struct{})
	audited := s.audits > 0
	s.mu.Unlock()
	s.copying.Lock() // waits for copies
	m.retire(audited)
	s.copying.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release(m)
	return true
}

// retire invalidates the lent blobs of chunks in place, before their memory changes.
func (m *Snapshot) retire(audited bool) {
	for _, b := range m.blobs {
		goroutines := 1
		if audited {
			goroutines = workers(b.size)
		}
		share(len(b.chunks), goroutines, func(i int) {
			if c := b.chunks[i]; c.live {
				c.retire(audited)
			}
		})
	}
}

// Abandon declares that no snapshot follows a Vacate for now, so that Hold, Lend and Audit no
// longer wait for one.
func (s *Store) Abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over != nil {
		close(s.over)
		s.over = nil
	}
}

// Reserve allocates the memory that the next snapshot needs if the newest is held: as much as the
// newest has copied. It also writes to that memory, which takes long if it is large; the store can
// be used meanwhile. Reserve waits for Trim, so that it does not allocate memory while other memory
// is being given back.
func (s *Store) Reserve() {
	s.freeing.Lock()
	s.freeing.Unlock() //lint:ignore SA2001 it has only waited
	s.whole()
	var lengths []int
	if s.last != nil {
		have := make(map[int]int)
		for n, free := range s.spare {
			have[n] = len(free)
		}
		for _, b := range s.last.blobs {
			for _, c := range b.chunks {
				switch n := len(c.data); {
				case !c.owned && !c.live:
				case have[n] > 0:
					have[n]--
				default:
					lengths = append(lengths, n)
				}
			}
		}
	}
	s.mu.Unlock()
	var slab []byte
	var fresh []*chunk
	for _, n := range lengths {
		if len(slab) < n {
			slab = make([]byte, max(n, min(slabChunks*ChunkSize, n*len(lengths))))
			_ = unix.Madvise(slab, unix.MADV_HUGEPAGE) // otherwise it has small pages
			for i := 0; i < len(slab); i += 4096 {
				slab[i] = 0
			}
		}
		fresh = append(fresh, &chunk{data: slab[:n:n], owned: true})
		slab = slab[n:]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range fresh {
		s.keep(c)
	}
}

// Trim frees memory that no snapshot uses. It returns whole pages to the operating system at once,
// without waiting for the garbage collector. This takes a few milliseconds for each 100 MB; the
// store can be used meanwhile.
func (s *Store) Trim() {
	s.freeing.RLock()
	defer s.freeing.RUnlock()
	s.mu.Lock()
	spare, audited := s.spare, s.audits > 0
	s.spare, s.extra, s.slab = nil, 0, nil
	s.mu.Unlock()
	for _, chunks := range spare {
		for _, c := range chunks {
			c.retire(audited) // lent blobs may still refer to it
			c.free()
		}
	}
}

// Lend returns the number and the blobs of the newest snapshot; nil before the first. Later
// snapshots may overwrite its chunks, which TrySum and TryRead report. Lend waits while Copy
// overwrites the newest snapshot.
func (s *Store) Lend() (number uint64, blobs []Blob) {
	s.whole()
	defer s.mu.Unlock()
	return s.lend(false)
}

// Audit is like Lend, for a reader that wants the checksums of all chunks: the checksum of a chunk
// is computed before the chunk is overwritten. A later Audit ends that for the blobs of this call.
// done must be called once, by any goroutine.
func (s *Store) Audit() (blobs []Blob, done func()) {
	s.whole()
	defer s.mu.Unlock()
	s.audits++
	_, blobs = s.lend(true)
	return blobs, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.audits--
	}
}

// lend makes lent blobs. The caller holds mu, and no chunk is being overwritten.
func (s *Store) lend(audit bool) (number uint64, blobs []Blob) {
	if s.last == nil {
		return 0, nil
	}
	blobs = make([]Blob, len(s.last.blobs))
	for i, p := range s.last.blobs {
		blobs[i] = Blob{p.size, slices.Clone(p.chunks), make([]uint64, len(p.chunks))}
		for j, c := range p.chunks {
			c.busy.RLock()
			blobs[i].versions[j] = c.version
			c.busy.RUnlock()
			if audit {
				c.prior.Store(nil)
			}
		}
	}
	return s.last.number, blobs
}

// release removes one reference to m. The caller holds mu.
func (s *Store) release(m *Snapshot) {
	if m.refs--; m.refs > 0 {
		return
	}
	for i := range m.blobs {
		for j, c := range m.blobs[i].chunks {
			s.drop(c)
			m.blobs[i].chunks[j] = nil
		}
	}
	s.retired = m
}

// drop removes a snapshot's reference to c. The caller holds mu.
func (s *Store) drop(c *chunk) {
	if c == nil {
		return
	}
	if c.refs--; c.refs > 0 || !c.owned || s.extra+len(c.data) > s.bank {
		return // a store never needs more than one bank besides the newest snapshot
	}
	s.keep(c)
}

// keep keeps a chunk that no snapshot uses. The caller holds mu.
func (s *Store) keep(c *chunk) {
	s.extra += len(c.data)
	if s.spare == nil {
		s.spare = make(map[int][]*chunk)
	}
	s.spare[len(c.data)] = append(s.spare[len(c.data)], c)
}

// take returns an unused chunk of n bytes.
func (s *Store) take(n int) *chunk {
	s.mu.Lock()
	free := s.spare[n]
	if len(free) == 0 {
		data := s.allocate(n)
		s.mu.Unlock()
		return &chunk{data: data, owned: true}
	}
	c := free[len(free)-1]
	free[len(free)-1] = nil
	s.spare[n] = free[:len(free)-1]
	s.extra -= n
	s.mu.Unlock()
	return c
}

// slabChunks is the number of chunks that are allocated together in a large store, so that the
// kernel can map huge pages: these cause fewer faults, and a killed process ends sooner.
const slabChunks = 16

// allocate returns n bytes. The caller holds mu.
func (s *Store) allocate(n int) []byte {
	if n != ChunkSize || s.bank < slabChunks*ChunkSize {
		return make([]byte, n)
	}
	if len(s.slab) == 0 {
		s.slab = make([]byte, slabChunks*ChunkSize)
		_ = unix.Madvise(s.slab, unix.MADV_HUGEPAGE) // otherwise it has small pages
	}
	b := s.slab[:n:n]
	s.slab = s.slab[n:]
	return b
}

// alone reports whether n bytes may be copied over c, a chunk of the last snapshot, because no
// other snapshot uses it.
func (s *Store) alone(c *chunk, n int) bool {
	if c == nil || !c.owned || len(c.data) != n {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.refs == 1
}

// Pending is an incomplete snapshot. Seal makes it the store's newest.
type Pending struct {
	store    *Store
	snapshot *Snapshot
	base     *Snapshot // the last snapshot; nil: none
	over     bool      // chunks of base are overwritten
	audited  bool      // an audit wants the checksums of overwritten chunks
	jobs     []job
	bytes    int // of the jobs
	next     atomic.Int64
	running  sync.WaitGroup

	later  []Source // by blob; empty: none has Later
	coming sync.WaitGroup
	mu     sync.Mutex
	err    error // of Later functions
}

// job is a chunk to compare and copy.
type job struct {
	src   []byte
	look  int // offset of the most likely change
	blob  int
	chunk int
	same  []bool // by chunk; nil: not wanted
	anew  bool   // copy it without comparison
}

// Begin begins a snapshot of the sources, which must not change until Copy or Wait has returned. It
// must not be called again before Seal or a failed Wait.
func (s *Store) Begin(number uint64, sources []Source) *Pending {
	p := &s.pending
	bank := 0
	inPlace := false
	for i := range sources {
		if !sources[i].Given {
			bank += len(sources[i].Bytes)
		}
		inPlace = inPlace || sources[i].InPlace
	}
	if inPlace {
		s.Vacate() // even if nothing has changed: cached checksums would hide a change that was not announced
	}
	s.mu.Lock()
	m := s.retired
	s.retired = nil
	p.base = s.last
	s.bank = bank
	p.audited = s.audits > 0
	s.mu.Unlock()
	if m == nil {
		m = &Snapshot{store: s}
	}
	m.number, m.refs, m.live = number, 1, inPlace
	for len(m.blobs) < len(sources) {
		m.blobs = append(m.blobs, Blob{})
	}
	m.blobs = m.blobs[:len(sources)]
	p.store, p.snapshot, p.jobs, p.bytes = s, m, p.jobs[:0], 0
	p.next.Store(0)
	for i := range sources {
		if sources[i].Later != nil {
			p.later = append(p.later, sources...)
			break
		}
	}
	for i := range sources {
		if sources[i].Later == nil {
			p.add(i, sources[i])
		}
	}
	return p
}

// add adds blob i with the bytes of src, and jobs for the chunks to copy.
func (p *Pending) add(i int, src Source) {
	blob, n := &p.snapshot.blobs[i], Chunks(len(src.Bytes))
	blob.size = len(src.Bytes)
	if cap(blob.chunks) < n {
		blob.chunks = make([]*chunk, n)
	}
	blob.chunks = blob.chunks[:n]
	for c := range blob.chunks {
		b := src.Bytes[c*ChunkSize : min((c+1)*ChunkSize, len(src.Bytes))]
		switch old := p.before(i, c); {
		case src.InPlace:
			blob.chunks[c] = &chunk{data: b, live: true}
		case old != nil && old.live && !src.Given: // it is the same memory: nothing to compare
			p.jobs = append(p.jobs, job{src: b, blob: i, chunk: c, same: src.Same, anew: true})
			p.bytes += len(b)
		case src.Changed != nil && !src.Changed[c] && old != nil && len(old.data) == len(b):
			blob.chunks[c] = old
		case !src.Given:
			j := job{src: b, blob: i, chunk: c, same: src.Same}
			if src.Look != nil {
				j.look = src.Look[c]
			}
			p.jobs = append(p.jobs, j)
			p.bytes += len(b)
		case old != nil && bytes.Equal(old.data, b):
			if n > 1 { // sharing the old chunk would keep its whole buffer alive
				same := &chunk{data: b}
				same.sum.Store(old.sum.Load())
				old = same
			}
			blob.chunks[c] = old
		default:
			blob.chunks[c] = &chunk{data: b}
		}
	}
}

// before returns the corresponding chunk of the last snapshot, or nil.
func (p *Pending) before(blob, chunk int) *chunk {
	if p.base == nil || blob >= len(p.base.blobs) || chunk >= len(p.base.blobs[blob].chunks) {
		return nil
	}
	return p.base.blobs[blob].chunks[chunk]
}

// copy executes jobs until none is left.
func (p *Pending) copy() {
	for {
		i := int(p.next.Add(1)) - 1
		if i >= len(p.jobs) {
			return
		}
		j := &p.jobs[i]
		c := p.before(j.blob, j.chunk)
		var same, hashed bool
		var mark uint64
		if c != nil && len(c.data) == len(j.src) && !j.anew {
			same, mark, hashed = c.same(j.src, j.look)
		}
		if !same {
			if !p.over || !p.store.alone(c, len(j.src)) {
				c = p.store.take(len(j.src))
			}
			c.overwrite(j.src, p.audited)
			c.mark, c.hashed = mark, hashed
		}
		p.snapshot.blobs[j.blob].chunks[j.chunk] = c
		if j.same != nil {
			j.same[j.chunk] = same
		}
	}
}

// fetch calls the Later functions in the background.
func (p *Pending) fetch() {
	for i, src := range p.later {
		if src.Later == nil {
			continue
		}
		p.coming.Go(func() {
			b, err := src.Later()
			if err != nil {
				p.mu.Lock()
				p.err = errors.Join(p.err, err)
				p.mu.Unlock()
				return
			}
			p.add(i, Source{Bytes: b, Given: true})
		})
	}
}

// Copy copies what has changed, on all processors if it is large, and blocks until that is done.
// Later functions run in the background. Without such functions the snapshot may overwrite the last
// one; then Wait returns no error, and the caller can seal the snapshot without waiting.
func (p *Pending) Copy() {
	s := p.store
	s.mu.Lock()
	if p.over = p.base != nil && p.base.refs == 1 && !p.HasLater(); p.over {
		s.over = make(chan struct{})
	}
	s.mu.Unlock()
	p.start(workers(p.bytes) - 1)
	p.copy()
	p.running.Wait()
}

// Bytes returns the number of bytes that are copied, or compared with those of the last snapshot.
func (p *Pending) Bytes() int { return p.bytes }

// HasLater reports whether a source has Later, so that the snapshot is not complete after Copy.
func (p *Pending) HasLater() bool { return len(p.later) > 0 }

// Start starts copying in the background with half of the processors; training uses the others.
func (p *Pending) Start() { p.start((workers(p.bytes) + 1) / 2) }

func (p *Pending) start(n int) {
	p.fetch()
	for range n {
		p.running.Go(p.copy)
	}
}

// Wait blocks until everything is copied and all Later functions have returned. After an error the
// snapshot is discarded, must not be sealed, and the previous one stays the newest.
func (p *Pending) Wait() error {
	p.running.Wait()
	p.coming.Wait()
	err := p.err
	if err != nil {
		p.end()
	}
	return err
}

// Seal atomically makes the snapshot the store's newest and releases the previous one. Copying must
// be complete.
func (p *Pending) Seal() {
	s := p.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range p.snapshot.blobs {
		for _, c := range p.snapshot.blobs[i].chunks {
			c.refs++
		}
	}
	before := s.last
	if before != nil && before.live { // its memory will change without Vacate
		before.retire(p.audited)
	}
	if s.over != nil {
		close(s.over)
		s.over = nil
	}
	s.last = p.snapshot
	if before != nil {
		s.release(before)
	}
	p.end()
}

// end clears the references to sources, so that they can be garbage collected.
func (p *Pending) end() {
	p.snapshot, p.base, p.err = nil, nil, nil
	p.over = false
	clear(p.jobs)
	clear(p.later)
	p.later = p.later[:0]
}

// small is the number of bytes that one processor copies in the time that it takes to start another
// goroutine.
const small = 4 * ChunkSize

// workers returns the number of goroutines for n bytes.
func workers(n int) int {
	if n < small {
		return 1
	}
	return min(runtime.GOMAXPROCS(0), Chunks(n))
}

// share calls f(0) to f(n-1) on the given number of goroutines and waits for all calls.
func share(n, goroutines int, f func(int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			f(i)
		}
	}
	var others sync.WaitGroup
	for range min(goroutines, n) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
}
