package elastic

import (
	"bytes"
	"fmt"
	"runtime"

	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/elastic/internal/written"
)

// Watched has commits ask the system which memory of p, a [Tensor] or [Tensors], has been written
// to since the last one, rather than read all of it. It returns p. It is for large tensors of which
// a step changes a part, as embeddings: a commit then costs what copying the changed chunks of 1
// MiB costs. The price is about 0.8 µs for the first write to each page of 4 KiB after a commit; of
// chunks of which every step changes much therefore only a sample is watched, now and then, and
// they are compared.
//
// Who asks for it promises that nothing writes to the tensors past the page tables of the process:
// no device, and not the kernel, to memory that was pinned for it (cudaHostRegister, RDMA,
// io_uring's fixed buffers). The system does not tell who has pinned memory, so this cannot be
// found out, and is not the default. All else is seen: other goroutines and threads, cgo, system
// calls, debuggers. A broken promise is found where live memory is compared with what is saved
// nevertheless: in [State.Digest], [State.Verify], and in the commits after which --verify-state
// compares the ranks; it is an [UnseenWriteError].
//
// Where the system cannot tell (before Linux 6.7, or a sandbox does not let it), of memory that
// others write to as well (that of collective.Alloc, files), of memory that another State watches,
// and of other parts Watched changes nothing: what is written to is found by comparison. The log
// says so at debug level. The watch begins with the first commit, and ends with Run or when the
// state is garbage.
func Watched(p Part) Part {
	if w, ok := p.(interface{ setWatched() }); ok && asOwn(p) != nil {
		w.setWatched()
	}
	return p
}

// watchable is embedded in parts that are nothing but memory.
type watchable struct{ watched bool }

func (w *watchable) setWatched()     { w.watched = true }
func (w *watchable) isWatched() bool { return w.watched }

// UnseenWriteError says that memory of a part that is [Watched] was written to, and the system has
// not seen it: commits since then lack the change. The state watches nothing any more, and its next
// commit is right; with --heal-state the log alone says it, and the commit that has found it is
// right.
type UnseenWriteError struct {
	// Part names the part.
	Part string
	// Chunk numbers the first such chunk of 1 MiB, of several tensors in one part: of its tensor.
	Chunk int
}

// Error names the part and the chunk, and what to do.
func (e *UnseenWriteError) Error() string {
	return fmt.Sprintf("elastic: %s, chunk %d, was written to without the system's knowing, as by a device to pinned memory: it must not be Watched", e.Part, e.Chunk)
}

// watch is a state's watch over memory. Of each source it knows which chunks may differ from the
// last image.
type watch struct {
	watcher *written.Watcher
	cleanup runtime.Cleanup
	pieces  []watchedPiece
}

type watchedPiece struct {
	part, index int             // of the part in the state, and of the piece in it
	memory      *written.Memory // nil: it cannot be watched
	changed     []bool          // chunks that may not be what the last image has
	look        []int           // where in each that is most likely to be seen
	copied      []bool          // those that the save under way copies
}

// beginWatch begins the watch, if some part wants it and there is none yet.
func (s *State) beginWatch() {
	if s.watch != nil || s.blind || s.err != nil {
		return
	}
	w := &watch{}
	var all [][]byte
	for i, o := range s.own {
		m, ok := o.(inMemory)
		if p, wants := o.(interface{ isWatched() bool }); !ok || !wants || !p.isWatched() {
			continue
		}
		for j, b := range m.memory() {
			w.pieces = append(w.pieces, watchedPiece{part: i, index: j})
			all = append(all, b)
		}
	}
	if s.blind = len(all) == 0; s.blind {
		return
	}
	var err error
	if w.watcher, err = written.Open(); err != nil {
		s.blind = true
		s.sayBlind(err)
		return
	}
	s.watch = w
	memories, errs := w.watcher.Watch(all, image.ChunkSize)
	for i := range w.pieces {
		w.pieces[i].take(s, memories[i], errs[i])
	}
	w.cleanup = runtime.AddCleanup(s, (*written.Watcher).Close, w.watcher)
}

// take has the piece be watched by m, or not at all.
func (p *watchedPiece) take(s *State, m *written.Memory, err error) {
	if p.memory = m; m == nil {
		s.worker.log.Debugf("piece %d of %s is not watched, so commits compare it: %v", p.index, s.partName(p.part), err)
	}
}

func (s *State) sayBlind(err error) {
	s.worker.log.Debugf("nothing is watched, so commits compare all: %v", err)
}

// endWatch ends the watch; another may begin.
func (s *State) endWatch() {
	if s.watch != nil {
		s.watch.cleanup.Stop()
		s.watch.watcher.Close()
		s.watch = nil
	}
}

// askWatch tells the sources what has changed since the last image, which the next image is then
// made of. It may be asked for proof.
func (s *State) askWatch(prove bool) error {
	if !s.scan() {
		return nil
	}
	if prove {
		if err := s.proven(); err != nil || s.watch == nil {
			return err
		}
	}
	for i := range s.watch.pieces {
		p := &s.watch.pieces[i]
		if p.memory == nil {
			continue
		}
		src := &s.sources[s.first[p.part]+p.index]
		if src.Look = p.look; src.Changed == nil { // otherwise a sync knows what it has done
			src.Changed = p.changed
		}
		p.copied = src.Changed
	}
	return nil
}

// keepWatch has the watch start from what was saved last. A save that failed leaves it as it was:
// what it was to copy has still changed.
func (s *State) keepWatch() {
	if s.watch == nil {
		return
	}
	for i := range s.watch.pieces {
		p := &s.watch.pieces[i]
		for c, copied := range p.copied {
			if copied {
				p.memory.Keep(c)
			}
		}
		p.copied = nil
	}
}

// proveWatch finds out whether the watch has missed anything.
func (s *State) proveWatch() error {
	if !s.scan() {
		return nil
	}
	return s.proven()
}

// scan brings the watch up to date, and tells whether there is one.
func (s *State) scan() bool {
	if s.watch == nil {
		return false
	}
	last := s.saved.Last()
	for i := range s.watch.pieces {
		p := &s.watch.pieces[i]
		p.copied = nil
		if p.memory == nil {
			continue
		}
		b := s.own[p.part].(inMemory).memory()[p.index]
		if !p.memory.Is(b) {
			p.memory.Close()
			memories, errs := s.watch.watcher.Watch([][]byte{b}, image.ChunkSize)
			if p.take(s, memories[0], errs[0]); p.memory == nil {
				continue
			}
		}
		if err := p.memory.Scan(); err != nil {
			s.endWatch()
			s.blind = true
			s.sayBlind(err)
			return false
		}
		var before *image.Piece
		if last != nil {
			before = &last.Pieces()[s.first[p.part]+p.index]
		}
		p.note(b, before)
	}
	return true
}

// note notes what of b may not be what the piece of the last image has.
func (p *watchedPiece) note(b []byte, before *image.Piece) {
	n := image.Chunks(len(b))
	if len(p.changed) != n {
		p.changed, p.look = make([]bool, n), make([]int, n)
	}
	for c := range n {
		p.changed[c], p.look[c] = p.memory.Changed(c), p.memory.Look(c)
	}
	head, tail := p.memory.Edges()
	for _, edge := range [][2]int{{0, head}, {len(b) - tail, len(b)}} {
		for from := edge[0]; from < edge[1]; {
			c := from / image.ChunkSize
			to := min(edge[1], (c+1)*image.ChunkSize)
			p.changed[c] = p.changed[c] || before == nil || before.Len() != len(b) ||
				!bytes.Equal(before.Chunk(c)[from-c*image.ChunkSize:to-c*image.ChunkSize], b[from:to])
			from = to
		}
	}
}

// proven compares what the watch takes for unchanged with the last image. If it is not, the watch
// ends, and it is an error or a line in the log.
func (s *State) proven() error {
	last := s.saved.Last()
	if last == nil {
		return nil
	}
	for _, p := range s.watch.pieces {
		if p.memory == nil {
			continue
		}
		b := s.own[p.part].(inMemory).memory()[p.index]
		piece := &last.Pieces()[s.first[p.part]+p.index]
		if piece.Len() != len(b) {
			continue // it is another slice now, of which all counts as written to
		}
		c := piece.Differing(b, func(c int) bool { return !p.changed[c] })
		if c < 0 {
			continue
		}
		s.endWatch()
		s.blind = true
		err := &UnseenWriteError{s.partName(p.part), c}
		if !s.worker.verification.heal {
			return err
		}
		s.worker.log.Warn(err)
		return nil
	}
	return nil
}
