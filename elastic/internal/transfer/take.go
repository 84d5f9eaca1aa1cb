package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	rounds = 5       // maximum
	little = 4 << 20 // bytes that are not worth another round, because the sync sends them
)

// Source connects to a worker that may have a commit.
type Source func(context.Context) (net.Conn, error)

// Options configure Take. The zero value is valid.
type Options struct {
	// Progress, if not nil, is called by one goroutine at a time as bytes arrive, with the bytes
	// received and the total number of bytes of the round.
	Progress func(have, of int64)
	// Have are the checksums of the chunks of blobs, blob by blob, if they are known. Chunks that a
	// source has with the same checksum are not fetched.
	Have []uint32
	// Rejected, if not nil, is called by one goroutine at a time when a source becomes unusable.
	Rejected func(source int, err error)
}

// Taken is the result of Take.
type Taken struct {
	// Number is the number of the commit.
	Number uint64
	// Bytes is the number of bytes received in Rounds.
	Bytes  int64
	Rounds int
	// Changed reports for each chunk, blob by blob, whether training has changed it meanwhile. It
	// is nil after one round, which does not show that.
	Changed []bool
}

// Take sets blobs to the newest commit with the same layout that a source has, except for chunks
// that change all the time. For those chunks, blobs contain an older version or are unchanged. Take
// blocks until that is done or ctx ends, closes its connections and waits for its goroutines. blobs
// may be empty. After an error they may contain parts of several commits.
func Take(ctx context.Context, sources []Source, layout string, blobs [][]byte, o Options) (Taken, error) {
	t := &taker{options: o, layout: layout}
	t.chunks, t.lengths = chunked(blobs)
	t.have = make([]uint32, len(t.chunks))
	t.known = make([]bool, len(t.chunks))
	if len(o.Have) == len(t.chunks) {
		copy(t.have, o.Have)
		for i := range t.known {
			t.known[i] = true
		}
	}
	t.changing = make([]bool, len(t.chunks))
	t.changed = make([]bool, len(t.chunks))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t.connect(ctx, sources)
	defer t.close()
	stop := context.AfterFunc(ctx, t.close)
	defer stop()
	var last int64
	for {
		err := t.round()
		if ctx.Err() != nil {
			return t.taken, fmt.Errorf("transfer: %w", context.Cause(ctx))
		}
		if err != nil {
			return t.taken, fmt.Errorf("transfer: %w", err)
		}
		if t.of <= little || t.taken.Rounds == rounds || t.got < t.of/2 || t.taken.Rounds > 1 && t.of > last/2 {
			return t.taken, nil
		}
		last = t.of
	}
}

// taker is the state of one Take.
type taker struct {
	options Options
	layout  string
	lengths []int
	chunks  [][]byte
	have    []uint32 // checksum of each chunk, if known
	known   []bool
	// changing: the source no longer had the chunk in this round. changed: the chunk has changed
	// since the first round began. mu guards both while peers are asked for chunks.
	changing, changed []bool
	taken             Taken

	mu      sync.Mutex
	peers   []*peer // all sources, including those that have failed
	missing []int   // chunks of this round that have not been requested
	got, of int64   // bytes of this round: received, and in total
	errs    []error
	closed  bool
}

// peer is a source and its manifest in this round.
type peer struct {
	link
	number   int
	manifest Manifest
	failed   atomic.Bool
}

func (t *taker) connect(ctx context.Context, sources []Source) {
	var dialing sync.WaitGroup
	for i, source := range sources {
		dialing.Go(func() {
			conn, err := source(ctx)
			if err != nil {
				t.reject(&peer{number: i}, err)
				return
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			t.peers = append(t.peers, &peer{link: link{conn: conn}, number: i})
		})
	}
	dialing.Wait()
}

// close closes all connections, which ends pending reads.
func (t *taker) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, p := range t.peers {
		p.conn.Close()
	}
}

// reject stops using a source. The others continue.
func (t *taker) reject(p *peer, err error) {
	if p.failed.Swap(true) {
		return
	}
	if p.conn != nil {
		p.conn.Close()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.errs = append(t.errs, err)
	if t.options.Rejected != nil && !t.closed {
		t.options.Rejected(p.number, err)
	}
}

// each calls f for all usable peers concurrently, and rejects those for which it fails.
func (t *taker) each(f func(*peer) error) {
	var asking sync.WaitGroup
	for _, p := range t.peers {
		if !p.failed.Load() {
			asking.Go(func() {
				if err := f(p); err != nil {
					t.reject(p, err)
				}
			})
		}
	}
	asking.Wait()
}

// round fetches the chunks that differ from the newest commit.
func (t *taker) round() error {
	t.each(t.ask)
	base := t.newest()
	if base == nil {
		return errors.Join(append([]error{errors.New("no source has a usable commit")}, t.errs...)...)
	}
	t.missing, t.got, t.of = t.missing[:0], 0, 0
	if t.taken.Rounds > 0 {
		t.taken.Changed = t.changed
	}
	for i, sum := range base.sums {
		if t.changing[i] = base.there[i] != present; t.changing[i] {
			t.changed[i] = true
			t.of += int64(len(t.chunks[i]))
			continue
		}
		if !t.known[i] || t.have[i] != sum {
			t.changed[i] = t.changed[i] || t.known[i]
			t.known[i] = false
			t.missing = append(t.missing, i)
			t.of += int64(len(t.chunks[i]))
		}
	}
	t.each(func(p *peer) error { return t.pull(p, base) })
	t.taken.Rounds++
	t.taken.Bytes += t.got
	t.taken.Number = base.Number
	t.missing = slices.DeleteFunc(t.missing, func(i int) bool { return t.changing[i] })
	if len(t.missing) > 0 {
		if t.newest() == nil || t.taken.Rounds == rounds {
			return errors.Join(append([]error{fmt.Errorf("no source has the missing %d chunks", len(t.missing))}, t.errs...)...)
		}
		return t.round() // the remaining peers may have newer commits
	}
	return nil
}

// ask requests a peer's manifest.
func (t *taker) ask(p *peer) error {
	if err := p.write(askManifest, 0, nil); err != nil {
		return err
	}
	f, b, err := p.read(2 * idle) // the checksums of a large state take long to compute
	switch {
	case err != nil:
		return err
	case f.kind == frameNone:
		return errNone
	case f.kind != frameManifest:
		return ErrDamaged
	}
	r := NewReader(b)
	p.manifest = r.manifest()
	if err := r.End(); err != nil {
		return err
	}
	if err := p.manifest.fits(t.layout, t.lengths); err != nil {
		return err
	}
	if len(p.manifest.sums) != len(t.chunks) {
		return ErrDamaged
	}
	return nil
}

// newest returns the manifest of the newest commit. If peers differ, it returns the most common
// one; nil if no peer has a commit.
func (t *taker) newest() *Manifest {
	var best *Manifest
	most := 0
	for _, p := range t.peers {
		if p.failed.Load() || best != nil && p.manifest.Number < best.Number {
			continue
		}
		votes := 0
		for _, other := range t.peers {
			if !other.failed.Load() && other.manifest.Number == p.manifest.Number && slices.Equal(other.manifest.sums, p.manifest.sums) {
				votes++
			}
		}
		if best == nil || p.manifest.Number > best.Number || votes > most {
			best, most = &p.manifest, votes
		}
	}
	return best
}

// pull fetches chunks from a peer until no chunk is left to request.
func (t *taker) pull(p *peer, base *Manifest) error {
	for {
		wanted := t.next(p, base)
		if len(wanted) == 0 {
			return nil
		}
		done, err := t.fetch(p, base, wanted)
		if err != nil {
			t.mu.Lock()
			t.missing = append(t.missing, wanted[done:]...)
			t.mu.Unlock()
			return err
		}
	}
}

// next takes a batch of missing chunks that the peer has.
func (t *taker) next(p *peer, base *Manifest) []int {
	t.mu.Lock()
	defer t.mu.Unlock()
	var wanted []int
	rest := t.missing[:0]
	for _, i := range t.missing {
		if len(wanted) < batch && p.manifest.has(i, base.sums[i]) {
			wanted = append(wanted, i)
		} else {
			rest = append(rest, i)
		}
	}
	t.missing = rest
	return wanted
}

// fetch requests chunks from a peer and returns how many arrived intact.
func (t *taker) fetch(p *peer, base *Manifest, wanted []int) (done int, err error) {
	if err := p.write(askChunks, 0, AppendNumber(AppendNumber(nil, len(wanted)), wanted...)); err != nil {
		return 0, err
	}
	for n, i := range wanted {
		f, _, err := p.read(idle)
		if err != nil {
			return n, err
		}
		if f.number != uint32(i) || f.kind != frameChunk && f.kind != frameGone {
			return n, ErrDamaged
		}
		if f.kind == frameGone {
			t.gone(i)
			continue
		}
		if err := p.fill(t.chunks[i], f); err != nil {
			return n, err
		}
		if f.sum != base.sums[i] {
			return n, fmt.Errorf("chunk %d has a wrong checksum", i)
		}
		t.received(i, base.sums[i])
	}
	return len(wanted), nil
}

// gone records that a source has overwritten a chunk since its manifest.
func (t *taker) gone(i int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changing[i], t.changed[i] = true, true
}

// received records the arrival of a chunk.
func (t *taker) received(i int, sum uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.have[i], t.known[i] = sum, true
	t.got += int64(len(t.chunks[i]))
	if t.options.Progress != nil {
		t.options.Progress(t.got, t.of)
	}
}
