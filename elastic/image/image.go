// Package image keeps the bytes of commits.
//
// An [Image] is what the parts of a state held at one commit: pieces, each a list of chunks of 1
// MiB. It never changes, so whoever holds it reads one commit and never a mix of two. A [Store]
// makes images of live memory and keeps the newest. A chunk whose bytes are those of the last image
// is shared with it and not written; the others go to memory that no image uses any more. Where
// everything changes from commit to commit a store therefore comes to twice the size of the state,
// its two banks, and where little changes to little more than once.
//
// A chunk that has changed at its beginning is copied at once, so that a state of which everything
// changes costs a copy and no more. Of others the hash is compared, which reads only live memory:
// 64 bits, with a random seed in each process. Checksums that other processes can compare are
// computed when something asks for them, once for each chunk, away from the training loop.
//
// The package knows neither files nor networks.
package image

import (
	"bytes"
	"errors"
	"hash/crc32"
	"hash/maphash"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// ChunkSize is the length of all chunks of a piece but the last, which may be shorter, in bytes.
const ChunkSize = 1 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum returns the checksum that chunks are known by: CRC-32C.
func Sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// Chunks returns how many chunks there are in a piece of n bytes.
func Chunks(n int) int { return (n + ChunkSize - 1) / ChunkSize }

// chunk is some bytes that one image or several share.
type chunk struct {
	data  []byte
	owned bool // data is the store's to write to once no image holds it
	refs  int  // images that hold it; the store's mutex guards it
	sum   atomic.Uint64

	// mark is the chunk's hash in this process, where hashed; only who copies uses it.
	mark   uint64
	hashed bool
}

// glance is how many bytes are compared, where a change is likely, before a chunk is hashed.
const glance = 4096

var seed = maphash.MakeSeed()

// same tells whether live is what c holds, and looks at one place first. Where it had to be hashed
// for that, the hash is returned as well.
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

// known marks a sum that has been computed.
const known = 1 << 32

func (c *chunk) checksum() uint32 {
	sum := c.sum.Load()
	if sum == 0 {
		sum = known | uint64(Sum(c.data))
		c.sum.Store(sum)
	}
	return uint32(sum)
}

// Piece is one run of bytes of an image. Its methods may be called by several goroutines, as long
// as the image is held.
type Piece struct {
	size   int
	chunks []*chunk
}

// Len is the piece's length in bytes.
func (p *Piece) Len() int { return p.size }

// Chunks is the number of chunks; 0 for an empty piece.
func (p *Piece) Chunks() int { return len(p.chunks) }

// Chunk returns the bytes of chunk i. They are not the caller's to write to.
func (p *Piece) Chunk(i int) []byte { return p.chunks[i].data }

// Sum returns the checksum of chunk i. It is computed at the first call.
func (p *Piece) Sum(i int) uint32 { return p.chunks[i].checksum() }

// Sums returns the checksums of all chunks, and computes those that are not known yet on all
// processors.
func (p *Piece) Sums() []uint32 {
	sums := make([]uint32, len(p.chunks))
	share(len(p.chunks), workers(p.size), func(i int) { sums[i] = p.Sum(i) })
	return sums
}

// Prepare computes now, on all processors, the checksums and what the next image's comparison with
// live bytes would compute. Only the goroutine that begins images may call it.
func (p *Piece) Prepare() {
	share(len(p.chunks), workers(p.size), func(i int) {
		c := p.chunks[i]
		c.checksum()
		if !c.hashed {
			c.mark, c.hashed = maphash.Bytes(seed, c.data), true
		}
	})
}

// Bytes returns the whole piece. It is not the caller's to write to.
func (p *Piece) Bytes() []byte {
	if len(p.chunks) == 1 {
		return p.chunks[0].data
	}
	b := make([]byte, p.size)
	p.CopyTo(b)
	return b
}

// Same tells whether the piece holds b. It reads all of both, with all processors where they are
// large.
func (p *Piece) Same(b []byte) bool { return p.same(b, ChunkSize) }

// Resembles is Same of the first 4 KiB of each chunk.
func (p *Piece) Resembles(b []byte) bool { return p.same(b, glance) }

func (p *Piece) same(b []byte, each int) bool {
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

// Differing returns the first of the chunks that among names which is not what b, as long as the
// piece, has there, or -1. It reads all of them, with all processors where they are large.
func (p *Piece) Differing(b []byte, among func(chunk int) bool) int {
	differ := make([]bool, len(p.chunks))
	share(len(p.chunks), workers(p.size), func(i int) {
		c := p.chunks[i].data
		differ[i] = among(i) && !bytes.Equal(c, b[i*ChunkSize:i*ChunkSize+len(c)])
	})
	return slices.Index(differ, true)
}

// CopyTo copies the piece to dst, which must be as long, with all processors where it is large.
func (p *Piece) CopyTo(dst []byte) {
	share(len(p.chunks), workers(p.size), func(i int) { copy(dst[i*ChunkSize:], p.chunks[i].data) })
}

// Image is the bytes of one commit. The zero value has no pieces.
type Image struct {
	store  *Store
	number uint64
	refs   int // the store's mutex guards it
	pieces []Piece
}

// Number is the commit's.
func (m *Image) Number() uint64 { return m.number }

// Pieces returns the pieces, in the order of the sources. They are valid as long as the image is
// held.
func (m *Image) Pieces() []Piece { return m.pieces }

// Release gives back what [Store.Hold] has returned. It may be called by any goroutine, once.
func (m *Image) Release() {
	m.store.mu.Lock()
	defer m.store.mu.Unlock()
	m.store.release(m)
}

// Source is what one piece of an image is made of.
type Source struct {
	Bytes []byte
	// Given says that nobody writes to Bytes any more: the image keeps them as they are. Otherwise
	// they are copied.
	Given bool
	// Changed, where it is not nil, says of each chunk whether it may differ from that of the last
	// image: the others are not looked at. It is for bytes that are not Given.
	Changed []bool
	// Look, where it is not nil, says of each chunk where in it a change is most likely, in bytes
	// from its beginning.
	Look []int
	// Later, where it is not nil, gives the bytes instead, which are Given: they are still on their
	// way. It blocks until they are there, in a goroutine of the Pending's.
	Later func() ([]byte, error)
}

// Store makes images and keeps the newest. The zero value is an empty store. One goroutine at a
// time begins and seals; Hold and Release may be called at any time.
type Store struct {
	mu      sync.Mutex
	last    *Image
	spare   map[int][]*chunk // no image holds them; by length
	extra   int              // bytes of spare
	bank    int              // bytes of the newest image, or the next, that were copied
	retired *Image           // its tables are used again
	pending Pending
}

// Last returns the newest image, nil before the first. It is valid until the next is sealed.
func (s *Store) Last() *Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// Hold returns the newest image, or nil, and keeps it until its Release: commits that come
// meanwhile leave it alone, and take more memory instead.
func (s *Store) Hold() *Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil {
		s.last.refs++
	}
	return s.last
}

// release drops one reference to m. The caller holds mu.
func (s *Store) release(m *Image) {
	if m.refs--; m.refs > 0 {
		return
	}
	for i := range m.pieces {
		for j, c := range m.pieces[i].chunks {
			s.drop(c)
			m.pieces[i].chunks[j] = nil
		}
	}
	s.retired = m
}

// drop ends an image's hold on c. The caller holds mu.
func (s *Store) drop(c *chunk) {
	if c == nil {
		return
	}
	if c.refs--; c.refs > 0 || !c.owned || s.extra+len(c.data) > s.bank {
		return // one bank beside the newest image is all that is ever needed
	}
	s.extra += len(c.data)
	if s.spare == nil {
		s.spare = make(map[int][]*chunk)
	}
	s.spare[len(c.data)] = append(s.spare[len(c.data)], c)
}

// take returns a chunk of n bytes that nobody holds.
func (s *Store) take(n int) *chunk {
	s.mu.Lock()
	free := s.spare[n]
	if len(free) == 0 {
		s.mu.Unlock()
		return &chunk{data: make([]byte, n), owned: true}
	}
	c := free[len(free)-1]
	free[len(free)-1] = nil
	s.spare[n] = free[:len(free)-1]
	s.extra -= n
	s.mu.Unlock()
	c.sum.Store(0)
	return c
}

// Pending is an image that is not whole yet. The image before it stays what it is until Seal.
type Pending struct {
	store   *Store
	image   *Image
	base    *Image // the last; nil if there is none
	jobs    []job
	bytes   int // of the jobs
	next    atomic.Int64
	running sync.WaitGroup

	later  []Source // by piece; empty where none comes later
	coming sync.WaitGroup
	mu     sync.Mutex
	err    error // of what has not come
}

// job is one chunk to be compared and copied.
type job struct {
	src   []byte
	look  int // where a change is likely
	piece int
	chunk int
}

// Begin begins an image of the sources, which must not change from now until Copy or Wait has
// returned. There is one at a time: it is sealed before the next begins.
func (s *Store) Begin(number uint64, sources []Source) *Pending {
	p := &s.pending
	bank := 0
	for i := range sources {
		if !sources[i].Given {
			bank += len(sources[i].Bytes)
		}
	}
	s.mu.Lock()
	m := s.retired
	s.retired = nil
	p.base = s.last
	s.bank = bank
	s.mu.Unlock()
	if m == nil {
		m = &Image{store: s}
	}
	m.number, m.refs = number, 1
	for len(m.pieces) < len(sources) {
		m.pieces = append(m.pieces, Piece{})
	}
	m.pieces = m.pieces[:len(sources)]
	p.store, p.image, p.jobs, p.bytes = s, m, p.jobs[:0], 0
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

// add makes piece i of src, and jobs of what must be copied.
func (p *Pending) add(i int, src Source) {
	piece, n := &p.image.pieces[i], Chunks(len(src.Bytes))
	piece.size = len(src.Bytes)
	if cap(piece.chunks) < n {
		piece.chunks = make([]*chunk, n)
	}
	piece.chunks = piece.chunks[:n]
	for c := range piece.chunks {
		b := src.Bytes[c*ChunkSize : min((c+1)*ChunkSize, len(src.Bytes))]
		switch old := p.before(i, c); {
		case src.Changed != nil && !src.Changed[c] && old != nil && len(old.data) == len(b):
			piece.chunks[c] = old
		case !src.Given:
			j := job{src: b, piece: i, chunk: c}
			if src.Look != nil {
				j.look = src.Look[c]
			}
			p.jobs = append(p.jobs, j)
			p.bytes += len(b)
		case old != nil && bytes.Equal(old.data, b):
			if n > 1 { // the old one would keep all the bytes from being collected that came with it
				same := &chunk{data: b}
				same.sum.Store(old.sum.Load())
				old = same
			}
			piece.chunks[c] = old
		default:
			piece.chunks[c] = &chunk{data: b}
		}
	}
}

// before returns the chunk of the last image, or nil.
func (p *Pending) before(piece, chunk int) *chunk {
	if p.base == nil || piece >= len(p.base.pieces) || chunk >= len(p.base.pieces[piece].chunks) {
		return nil
	}
	return p.base.pieces[piece].chunks[chunk]
}

// copy does the jobs that nobody else has taken.
func (p *Pending) copy() {
	for {
		i := int(p.next.Add(1)) - 1
		if i >= len(p.jobs) {
			return
		}
		j := &p.jobs[i]
		c := p.before(j.piece, j.chunk)
		var same, hashed bool
		var mark uint64
		if c != nil && len(c.data) == len(j.src) {
			same, mark, hashed = c.same(j.src, j.look)
		}
		if !same {
			c = p.store.take(len(j.src))
			copy(c.data, j.src)
			c.mark, c.hashed = mark, hashed
		}
		p.image.pieces[j.piece].chunks[j.chunk] = c
	}
}

// fetch takes what comes later.
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

// Copy copies what has changed, with all processors where it is large, and returns when that is
// done. What comes later comes in the background.
func (p *Pending) Copy() {
	p.start(workers(p.bytes) - 1)
	p.copy()
	p.running.Wait()
}

// Comes tells whether something comes later: Copy alone does not make the image whole.
func (p *Pending) Comes() bool { return len(p.later) > 0 }

// Start begins to copy in the background, with half of the processors; the other half is for
// training.
func (p *Pending) Start() { p.start((workers(p.bytes) + 1) / 2) }

func (p *Pending) start(n int) {
	p.fetch()
	for range n {
		p.running.Go(p.copy)
	}
}

// Wait blocks until everything has been copied and has come. After an error there is nothing to
// seal, and the image is given up: the one before stays the newest.
func (p *Pending) Wait() error {
	p.running.Wait()
	p.coming.Wait()
	err := p.err
	if err != nil {
		p.end()
	}
	return err
}

// Seal makes the image the store's newest, in one step, and gives up the one before. Everything has
// been copied.
func (p *Pending) Seal() {
	s := p.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range p.image.pieces {
		for _, c := range p.image.pieces[i].chunks {
			c.refs++
		}
	}
	before := s.last
	s.last = p.image
	if before != nil {
		s.release(before)
	}
	p.end()
}

// end forgets what the pending image was made of, so that it is not kept from the garbage
// collector.
func (p *Pending) end() {
	p.image, p.base, p.err = nil, nil, nil
	clear(p.jobs)
	clear(p.later)
	p.later = p.later[:0]
}

// small is how many bytes one processor copies before another could have begun.
const small = 4 * ChunkSize

// workers returns how many goroutines are worth starting for n bytes.
func workers(n int) int {
	if n < small {
		return 1
	}
	return min(runtime.GOMAXPROCS(0), Chunks(n))
}

// share calls f for 0 to n-1, on so many goroutines, and returns when all calls have.
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
