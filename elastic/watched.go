package elastic

import (
	"bytes"
	"fmt"
	"runtime"

	"github.com/hvdrun/hvdrun/elastic/internal/dirtypages"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Watched makes commits ask the kernel which memory of p, a [Tensor] or [Tensors], has been written
// to since the last commit, instead of reading all of it. It returns p. Tensors of 16 MiB and more
// get this by default if they do not change for some commits. Watched is for large tensors of which
// each step changes a different part, such as embeddings: a commit then copies only the changed
// chunks of 1 MiB. The first write to each page of 4 KiB after a commit takes about 0.8 µs longer.
// Chunks of which every step changes a large part are therefore compared instead, and only
// occasionally sampled.
//
// The caller guarantees that nothing writes to the tensors past the page tables of the process: no
// device, and not the kernel to memory that is pinned for it (cudaHostRegister, RDMA, fixed buffers
// of io_uring). Pinned memory cannot be detected, so tensors that are not Watched are never watched
// in a process that has a device or an io_uring open. All other writes are detected: by other
// goroutines and threads, cgo, system calls and debuggers. If the guarantee is violated,
// [State.Digest], [State.Verify] and the commits after which --verify-state compares the ranks
// return an [UnseenWriteError], because these compare the live memory with the save.
//
// Watched has no effect, so that changes are found by comparison, before Linux 6.7, in a sandbox
// that forbids watching, for shared memory (collective.Alloc, files), for memory that another State
// watches, and for other kinds of parts. A debug message reports that. Watching begins with the
// first commit, and ends with Run or when the state is garbage collected.
func Watched(p Part) Part {
	if t, ok := p.(*part); ok && t.c.memory != nil {
		t.c.watched = true
	}
	return p
}

// UnseenWriteError means that memory of a [Watched] part has changed without a report from the
// kernel, so that commits since then lack the change. The state stops watching, and its next commit
// is correct. With --heal-state the error is only logged, and the commit that has found it is
// correct.
type UnseenWriteError struct {
	// Part is the name of the part.
	Part string
	// Chunk is the index of the first such chunk of 1 MiB, within its tensor if the part has
	// several.
	Chunk int
}

// Error returns a message with the part, the chunk and the remedy.
func (e *UnseenWriteError) Error() string {
	return fmt.Sprintf("elastic: %s, chunk %d, was written to without the kernel's knowledge, for example by a device to pinned memory: it must not be Watched", e.Part, e.Chunk)
}

// watch tracks, for the slices of Watched parts and for other large tensors, which chunks may
// differ from the last snapshot.
type watch struct {
	worker  *Worker
	parts   *parts
	watcher *dirtypages.Watcher // nil: not watching
	never   bool                // watching is impossible or not wanted
	asked   bool                // only Watched parts are watched, because something may bypass the page tables
	cleanup runtime.Cleanup
	pieces  []watchedPiece
}

type watchedPiece struct {
	part, index int                // indexes of the part in the state and of the slice in the part
	asked       bool               // the part is Watched; otherwise its chunks are watched while they do not change
	memory      *dirtypages.Memory // nil: it cannot be watched
	changed     []bool             // chunks that may differ from the last snapshot
	look        []int              // offset in each chunk where a change is most likely
	copied      []bool             // chunks that the current save copies
	same        []bool             // chunks that the current save has found unchanged
}

// Tensors that are not Watched are watched if comparing them takes long: slices of at least
// leastWatched bytes, if they have muchCompared bytes together. Tests change these variables.
var (
	leastWatched = snapshot.ChunkSize
	muchCompared = 16 << 20
)

// begin starts watching if a part wants it, unless it has started already.
func (w *watch) begin() {
	if w.watcher != nil || w.never {
		return
	}
	if w.choose(); len(w.pieces) == 0 {
		w.never = true
		return
	}
	watcher, err := dirtypages.Open()
	if err != nil {
		w.giveUp(err)
		return
	}
	w.watcher = watcher
	w.register(w.pieces, w.live())
	w.cleanup = runtime.AddCleanup(w, (*dirtypages.Watcher).Close, watcher)
}

// choose sets the pieces to watch.
func (w *watch) choose() {
	w.pieces = nil
	var others []watchedPiece
	large := 0 // bytes of others
	for i, c := range w.parts.of {
		if c == nil || c.memory == nil {
			continue
		}
		for j, b := range c.memory() {
			switch p := (watchedPiece{part: i, index: j, asked: c.watched}); {
			case p.asked:
				w.pieces = append(w.pieces, p)
			case len(b) >= leastWatched:
				others, large = append(others, p), large+len(b)
			}
		}
	}
	if !w.asked && large >= muchCompared && !w.bypassed() {
		w.pieces = append(w.pieces, others...)
	}
}

// bypassed reports whether something may write to memory of this process past its page tables. Only
// the caller of Watched can know that nothing does.
func (w *watch) bypassed() bool {
	why, err := dirtypages.Bypass()
	if err != nil {
		why = err.Error()
	}
	if w.asked = why != ""; w.asked {
		w.worker.log.Debugf("commits compare all parts that are not Watched, because something may write to memory without the kernel's knowledge: %s", why)
	}
	return w.asked
}

// trusted stops watching parts that are not Watched if the kernel may no longer see all writes.
func (w *watch) trusted() {
	resting := true
	for i := range w.pieces {
		p := &w.pieces[i]
		resting = resting && (p.asked || p.memory == nil || p.memory.Resting())
	}
	if resting || !w.bypassed() {
		return
	}
	for i := range w.pieces {
		if p := &w.pieces[i]; !p.asked && p.memory != nil {
			p.memory.Close()
			p.memory, p.copied = nil, nil
		}
	}
}

// register starts watching the memory of pieces.
func (w *watch) register(pieces []watchedPiece, memory [][]byte) {
	for _, asked := range []bool{true, false} {
		var which []int
		var of [][]byte
		for i, p := range pieces {
			if p.asked == asked {
				which, of = append(which, i), append(of, memory[i])
			}
		}
		begin := w.watcher.WatchCalm
		if asked {
			begin = w.watcher.Watch
		}
		if len(of) == 0 {
			continue
		}
		memories, errs := begin(of, snapshot.ChunkSize)
		for n, i := range which {
			w.take(&pieces[i], memories[n], errs[n])
		}
	}
}

// take sets the memory that watches p. m is nil if that failed, for the reason err.
func (w *watch) take(p *watchedPiece, m *dirtypages.Memory, err error) {
	if p.memory = m; m == nil {
		w.worker.log.Debugf("slice %d of %s is not watched, so commits compare it: %v", p.index, w.parts.name(p.part), err)
	}
}

// giveUp ends the watch permanently.
func (w *watch) giveUp(err error) {
	w.end()
	w.never = true
	w.worker.log.Debugf("no memory is watched, so commits compare all parts: %v", err)
}

// end stops watching until the next begin.
func (w *watch) end() {
	if w.watcher != nil {
		w.cleanup.Stop()
		w.watcher.Close()
		w.watcher, w.pieces = nil, nil
	}
}

// mark sets in sources which chunks have changed since the last snapshot. If prove is set, it first
// verifies that the watch has missed no change.
func (w *watch) mark(sources []snapshot.Source, last *snapshot.Snapshot, prove bool) error {
	if !w.scan(last) {
		return nil
	}
	if prove {
		if err := w.proven(last); err != nil {
			return err
		}
	}
	for i := range w.pieces {
		p := &w.pieces[i]
		if p.memory == nil {
			continue
		}
		src := &sources[w.parts.first[p.part]+p.index]
		if src.Look = p.look; src.Changed == nil { // otherwise the sync has set it
			src.Changed = p.changed
		}
		p.copied, src.Same = src.Changed, p.same
	}
	return nil
}

// arm starts watching the chunks that did not change while others trained with them. changed marks
// the changed chunks of the parts in memory, in order.
func (w *watch) arm(changed []bool) {
	if w.watcher == nil {
		return
	}
	of := make(map[[2]int]*dirtypages.Memory)
	for i := range w.pieces {
		if p := &w.pieces[i]; p.memory != nil {
			of[[2]int{p.part, p.index}] = p.memory
		}
	}
	w.parts.inMemory(func(i, j int, live []byte) {
		n := snapshot.Chunks(len(live))
		if m := of[[2]int{i, j}]; m != nil {
			for c, changes := range changed[:n] {
				if !changes {
					m.Arm(c)
				}
			}
		}
		changed = changed[n:]
	})
}

// since returns, for a blob of the last snapshot, the chunks that may differ from the live value;
// nil: all.
func (w *watch) since(last *snapshot.Snapshot) func(blob int) []bool {
	if last == nil || !w.scan(last) {
		return allChanged
	}
	changed := make(map[int][]bool)
	for i := range w.pieces {
		if p := &w.pieces[i]; p.memory != nil {
			changed[w.parts.first[p.part]+p.index] = p.changed
		}
	}
	return func(blob int) []bool { return changed[blob] }
}

// keep resets the marks of the chunks that the last save has copied. It is not called after a
// failed save, because the chunks then still differ from the last snapshot.
func (w *watch) keep() {
	for i := range w.pieces {
		p := &w.pieces[i]
		for c, copied := range p.copied {
			if copied {
				p.memory.Keep(c, p.same[c])
			}
		}
		p.copied = nil
	}
}

// prove verifies that the watch has missed no change.
func (w *watch) prove(last *snapshot.Snapshot) error {
	if !w.scan(last) {
		return nil
	}
	return w.proven(last)
}

// live returns the memory of all pieces.
func (w *watch) live() [][]byte {
	all := make([][]byte, len(w.pieces))
	var memory [][]byte
	for i, p := range w.pieces {
		if i == 0 || p.part != w.pieces[i-1].part {
			memory = w.parts.of[p.part].memory()
		}
		all[i] = memory[p.index]
	}
	return all
}

// scan updates the changed chunks, and reports whether memory is watched.
func (w *watch) scan(last *snapshot.Snapshot) bool {
	if w.watcher == nil {
		return false
	}
	w.trusted()
	for i, b := range w.live() {
		p := &w.pieces[i]
		p.copied = nil
		if p.memory == nil {
			continue
		}
		if !p.memory.Is(b) {
			p.memory.Close()
			if w.register(w.pieces[i:i+1], [][]byte{b}); p.memory == nil {
				continue
			}
		}
		if err := p.memory.Scan(); err != nil {
			w.giveUp(err)
			return false
		}
		var before *snapshot.Blob
		if last != nil {
			before = w.parts.piece(last, p.part, p.index)
		}
		p.note(b, before)
	}
	return true
}

// note updates changed and look for b, whose blob in the last snapshot is before.
func (p *watchedPiece) note(b []byte, before *snapshot.Blob) {
	n := snapshot.Chunks(len(b))
	if len(p.changed) != n {
		p.changed, p.look, p.same = make([]bool, n), make([]int, n), make([]bool, n)
	}
	clear(p.same)
	for c := range n {
		p.changed[c], p.look[c] = p.memory.Changed(c), p.memory.Look(c)
	}
	head, tail := p.memory.Edges()
	for _, edge := range [][2]int{{0, head}, {len(b) - tail, len(b)}} {
		for from := edge[0]; from < edge[1]; {
			c := from / snapshot.ChunkSize
			to := min(edge[1], (c+1)*snapshot.ChunkSize)
			p.changed[c] = p.changed[c] || before == nil || before.Len() != len(b) ||
				!bytes.Equal(before.Chunk(c)[from-c*snapshot.ChunkSize:to-c*snapshot.ChunkSize], b[from:to])
			from = to
		}
	}
}

// proven compares the chunks without a known change with the last snapshot. If they differ, it
// stops watching and returns the error, or logs it if the job heals states.
func (w *watch) proven(last *snapshot.Snapshot) error {
	if last == nil {
		return nil
	}
	for i, b := range w.live() {
		p := &w.pieces[i]
		if p.memory == nil {
			continue
		}
		piece := w.parts.piece(last, p.part, p.index)
		if piece.Len() != len(b) {
			continue // another slice, all of which counts as changed
		}
		c := piece.Differing(b, func(c int) bool { return !p.changed[c] })
		if c < 0 {
			continue
		}
		asked := p.asked
		w.end()
		w.never = true
		err := &UnseenWriteError{w.parts.name(p.part), c}
		if asked && !w.worker.verification.heal {
			return err
		}
		w.worker.log.Warn(err)
		return nil
	}
	return nil
}
