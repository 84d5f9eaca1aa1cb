package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// giver is a worker with commits.
type giver struct {
	mu     sync.Mutex
	store  snapshot.Store
	number uint64
	live   [][]byte

	layout string
	given  func() // called before a requested commit is returned
	spoil  func(net.Conn) net.Conn
	sent   int    // bytes sent
	gave   func() // called after chunks have been sent; may block
}

const layout = "0 tensor"

func newGiver(live ...[]byte) *giver {
	g := &giver{layout: layout, live: live}
	g.commit()
	return g
}

// commit saves the live bytes.
func (g *giver) commit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.number++
	var sources []snapshot.Source
	for _, b := range g.live {
		sources = append(sources, snapshot.Source{Bytes: b})
	}
	p := g.store.Begin(g.number, sources)
	p.Copy()
	p.Seal()
}

func (g *giver) newest() *Commit {
	if g.given != nil {
		g.given()
	}
	number, blobs := g.store.Lend()
	if blobs == nil {
		return nil
	}
	c := &Commit{Number: number, Layout: g.layout}
	for i := range blobs {
		c.Blobs = append(c.Blobs, &blobs[i])
	}
	return c
}

func (g *giver) supply() *Supply { return &Supply{Newest: g.newest} }

// counting counts the bytes written.
type counting struct {
	net.Conn
	g *giver
}

func (c counting) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.g.mu.Lock()
	c.g.sent += n
	gave := c.g.gave != nil && c.g.sent >= snapshot.ChunkSize
	c.g.mu.Unlock()
	if gave {
		c.g.gave()
	}
	return n, err
}

// source returns a Source that serves on a new connection.
func (g *giver) source(serving *sync.WaitGroup) Source {
	return func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		conn := net.Conn(counting{far, g})
		if g.spoil != nil {
			conn = g.spoil(conn)
		}
		serving.Go(func() {
			_ = Serve(conn, g.supply) // take checks the result on the other end
			conn.Close()
		})
		return near, nil
	}
}

// take runs Take with givers.
func take(t *testing.T, ctx context.Context, givers []*giver, lengths []int, o Options) ([][]byte, Taken, error) {
	t.Helper()
	var serving sync.WaitGroup
	var sources []Source
	for _, g := range givers {
		sources = append(sources, g.source(&serving))
	}
	blobs := make([][]byte, len(lengths))
	for i, n := range lengths {
		blobs[i] = make([]byte, n)
	}
	taken, err := Take(ctx, sources, layout, blobs, o)
	serving.Wait()
	return blobs, taken, err
}

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(uint64(n), 1))
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

func same(t *testing.T, got, want [][]byte) {
	t.Helper()
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("blob %d is not what was committed", i)
		}
	}
}

// Several sources each supply a part; blobs may be empty and end anywhere.
func TestTake(t *testing.T) {
	live := [][]byte{random(24*snapshot.ChunkSize + 5), nil, random(snapshot.ChunkSize), random(3)}
	givers := []*giver{newGiver(live...), newGiver(live...), newGiver(live...)}
	// On a busy machine one of the sources could supply everything before another is scheduled.
	var waiting sync.WaitGroup
	for _, g := range givers {
		waiting.Add(1)
		first := sync.OnceFunc(waiting.Done)
		g.gave = func() { first(); waiting.Wait() }
	}
	got, taken, err := take(t, t.Context(), givers, []int{len(live[0]), 0, len(live[2]), 3}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, live)
	if want := int64(len(live[0]) + len(live[2]) + 3); taken.Number != 1 || taken.Bytes != want || taken.Rounds != 2 {
		t.Errorf("%+v, want %d bytes and a second look", taken, want)
	}
	for i, g := range givers {
		if g.sent < snapshot.ChunkSize {
			t.Errorf("source %d gave %d bytes", i, g.sent)
		}
	}
}

// severed breaks after some bytes; flipped changes a bit there.
type severed struct {
	net.Conn
	left int
	flip bool
	done *bool // set when that has happened
}

func (s *severed) Write(b []byte) (int, error) {
	if s.left -= len(b); s.left < 0 && s.left+len(b) >= 0 {
		*s.done = true
		if !s.flip {
			s.Conn.Close()
			return 0, net.ErrClosed
		}
		b = slices.Clone(b)
		b[len(b)/2] ^= 4
	}
	return s.Conn.Write(b)
}

// A source that dies or sends a flipped bit delays only its own share.
func TestTakeFromFaultySources(t *testing.T) {
	live := random(10*snapshot.ChunkSize + 1)
	for _, flip := range []bool{false, true} {
		for _, after := range []int{0, 1000, 3*snapshot.ChunkSize + 9} {
			bad := newGiver(live)
			spoiled := false // a slow source may not get enough requests
			bad.spoil = func(c net.Conn) net.Conn { return &severed{c, after, flip, &spoiled} }
			var rejected []int
			got, _, err := take(t, t.Context(), []*giver{bad, newGiver(live)}, []int{len(live)}, Options{
				Rejected: func(source int, err error) { rejected = append(rejected, source) },
			})
			if err != nil {
				t.Fatalf("after %d bytes: %v", after, err)
			}
			same(t, got, [][]byte{live})
			if len(rejected) > 0 && !slices.Equal(rejected, []int{0}) || !flip && spoiled && len(rejected) == 0 {
				t.Errorf("after %d bytes: rejected: %v", after, rejected)
			}
		}
	}
}

// If the newest commits of the sources differ, the majority's is used. Sources without a usable
// state are ignored.
func TestTakeFromTheMajority(t *testing.T) {
	live := random(5 * snapshot.ChunkSize)
	odd := slices.Clone(live)
	odd[3*snapshot.ChunkSize]++
	other := newGiver(live)
	other.layout = "another"
	shorter := newGiver(live[1:])
	got, _, err := take(t, t.Context(), []*giver{newGiver(odd), newGiver(live), other, {layout: layout}, shorter, newGiver(live)}, []int{len(live)}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, [][]byte{live})
	_, _, err = take(t, t.Context(), []*giver{other, {layout: layout}, shorter}, []int{len(live)}, Options{})
	if !errors.Is(err, ErrOther) || !errors.Is(err, errNone) {
		t.Errorf("no source of this state: %v", err)
	}
}

// Chunks that change during a fetch are fetched again until few are left; the result is always one
// commit.
func TestTakeWhatMoves(t *testing.T) {
	const chunks = 27
	live := random(chunks * snapshot.ChunkSize)
	a, b := newGiver(live), newGiver(live)
	changing := chunks
	a.given = func() {
		for i := range changing {
			live[i*snapshot.ChunkSize+7]++
		}
		changing /= 3
		a.commit()
		b.commit()
	}
	got, taken, err := take(t, t.Context(), []*giver{a}, []int{len(live)}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, [][]byte{live})
	if taken.Rounds != 3 || taken.Bytes != (chunks+chunks/3+chunks/9)*snapshot.ChunkSize || taken.Number != a.number {
		t.Errorf("%+v of commit %d", taken, a.number)
	}

	// The number of rounds is limited if everything changes all the time.
	a.given = func() {
		for i := range chunks {
			live[i*snapshot.ChunkSize+7]++
		}
		a.commit()
	}
	got, taken, err = take(t, t.Context(), []*giver{a}, []int{len(live)}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, [][]byte{live})
	if taken.Rounds != 2 {
		t.Errorf("%+v", taken)
	}
}

// Chunks that the source overwrites during a fetch are fetched later, or left out if they are
// overwritten repeatedly. The source keeps no copies for readers.
func TestTakeWhatIsOverwritten(t *testing.T) {
	const chunks = 40
	for _, c := range []struct {
		name    string
		changed int // last chunks, changed while each round's first chunk is sent
		rounds  int
		left    int // chunks at the end that are left out
	}{{"a few once", 10, 3, 0}, {"nearly all, always", chunks - batch, 1, chunks - batch}} {
		t.Run(c.name, func(t *testing.T) {
			live := random(chunks * snapshot.ChunkSize)
			g := newGiver(live)
			var once sync.Once
			before := &g.store.Last().Blobs()[0].Chunk(0)[0]
			g.gave = func() {
				once.Do(func() {
					for i := chunks - c.changed; i < chunks; i++ {
						live[i*snapshot.ChunkSize+9]++
					}
					g.commit()
				})
			}
			got, taken, err := take(t, t.Context(), []*giver{g}, []int{len(live)}, Options{})
			if err != nil {
				t.Fatal(err)
			}
			whole := (chunks - c.left) * snapshot.ChunkSize
			same(t, [][]byte{got[0][:whole]}, [][]byte{live[:whole]})
			if taken.Rounds != c.rounds || taken.Bytes != int64(whole) || taken.Changed != nil && slices.Index(taken.Changed, true) != chunks-c.changed {
				t.Errorf("%d rounds, %d bytes, changed %v", taken.Rounds, taken.Bytes, taken.Changed)
			}
			for i, b := range got[0][whole:] {
				if b != 0 {
					t.Fatalf("byte %d of what was overwritten is set", i)
				}
			}
			if &g.store.Last().Blobs()[0].Chunk(0)[0] != before {
				t.Error("the source has copied its commit")
			}
		})
	}
}

// Take ends when its context ends.
func TestTakeIsEnded(t *testing.T) {
	live := random(4 * snapshot.ChunkSize)
	ctx, cancel := context.WithCancel(t.Context())
	_, _, err := take(t, ctx, []*giver{newGiver(live), newGiver(live)}, []int{len(live)}, Options{
		Progress: func(have, of int64) { cancel() },
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A source refuses invalid requests and closes the connection.
func TestServeSenseless(t *testing.T) {
	ask := func(kind byte, payload []byte) []byte {
		return append(frame{kind, 0, uint32(len(payload)), snapshot.Sum(payload)}.append(nil), payload...)
	}
	for name, question := range map[string][]byte{
		"unknown":           ask('x', nil),
		"chunks of nothing": ask(askChunks, []byte{1, 0}),
		"too many":          ask(askChunks, AppendList(AppendNumber(nil, maxBatch+1), make([][]byte, maxBatch))),
		"behind the end":    slices.Concat(ask(askManifest, nil), ask(askChunks, []byte{1, 9})),
		"not all":           slices.Concat(ask(askManifest, nil), ask(askChunks, []byte{2, 0})),
		"a wrong checksum":  frame{askChunks, 0, 0, 1}.append(nil),
		"too long":          frame{askChunks, 0, mostMessage + 1, 0}.append(nil),
	} {
		g := newGiver(make([]byte, 10))
		near, far := net.Pipe()
		done := make(chan error, 1)
		go func() {
			err := Serve(far, g.supply)
			far.Close()
			done <- err
		}()
		go func() { _, _ = near.Write(question) }()
		b := make([]byte, 1000)
		for {
			if _, err := near.Read(b); err != nil {
				break
			}
		}
		if err := <-done; err == nil || strings.Contains(err.Error(), "EOF") {
			t.Errorf("%s: %v", name, err)
		}
		near.Close()
	}
}
