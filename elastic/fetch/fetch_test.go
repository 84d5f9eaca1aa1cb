package fetch

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
	"time"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/elastic/image"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// giver is a worker that has commits.
type giver struct {
	mu     sync.Mutex
	store  image.Store
	number uint64
	live   [][]byte

	layout string
	given  func() // called when a commit is asked for, before it is given
	spoil  func(net.Conn) net.Conn
	held   int // commits that are not released
	sent   int // bytes of chunks and all
}

const layout = "0 tensor"

func newGiver(live ...[]byte) *giver {
	g := &giver{layout: layout, live: live}
	g.commit()
	return g
}

// commit saves what is live.
func (g *giver) commit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.number++
	var sources []image.Source
	for _, b := range g.live {
		sources = append(sources, image.Source{Bytes: b})
	}
	p := g.store.Begin(g.number, sources)
	p.Copy()
	p.Seal()
}

func (g *giver) newest() *Commit {
	if g.given != nil {
		g.given()
	}
	held := g.store.Hold()
	if held == nil {
		return nil
	}
	g.mu.Lock()
	g.held++
	g.mu.Unlock()
	c := &Commit{Number: held.Number(), Layout: g.layout, Release: func() {
		g.mu.Lock()
		g.held--
		g.mu.Unlock()
		held.Release()
	}}
	for i := range held.Pieces() {
		c.Pieces = append(c.Pieces, &held.Pieces()[i])
	}
	return c
}

// counting counts what is written.
type counting struct {
	net.Conn
	g *giver
}

func (c counting) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.g.mu.Lock()
	c.g.sent += n
	c.g.mu.Unlock()
	return n, err
}

// source serves on a connection of its own.
func (g *giver) source(serving *sync.WaitGroup) Source {
	return func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		conn := net.Conn(counting{far, g})
		if g.spoil != nil {
			conn = g.spoil(conn)
		}
		serving.Go(func() {
			_ = Serve(conn, g.newest) // what becomes of it the taker tells
			conn.Close()
		})
		return near, nil
	}
}

// take runs Take over givers and checks that nothing of a commit stays held.
func take(t *testing.T, ctx context.Context, givers []*giver, lengths []int, o Options) ([][]byte, Taken, error) {
	t.Helper()
	var serving sync.WaitGroup
	var sources []Source
	for _, g := range givers {
		sources = append(sources, g.source(&serving))
	}
	pieces := make([][]byte, len(lengths))
	for i, n := range lengths {
		pieces[i] = make([]byte, n)
	}
	taken, err := Take(ctx, sources, layout, pieces, o)
	serving.Wait()
	for i, g := range givers {
		if g.held != 0 {
			t.Errorf("source %d holds %d commits", i, g.held)
		}
	}
	return pieces, taken, err
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
			t.Errorf("piece %d is not what was committed", i)
		}
	}
}

// Several sources give a part each; pieces may be empty and end anywhere.
func TestTake(t *testing.T) {
	live := [][]byte{random(24*image.ChunkSize + 5), nil, random(image.ChunkSize), random(3)}
	givers := []*giver{newGiver(live...), newGiver(live...), newGiver(live...)}
	got, taken, err := take(t, t.Context(), givers, []int{len(live[0]), 0, len(live[2]), 3}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, live)
	if want := int64(len(live[0]) + len(live[2]) + 3); taken.Number != 1 || taken.Bytes != want || taken.Rounds != 2 {
		t.Errorf("%+v, want %d bytes and a second look", taken, want)
	}
	for i, g := range givers {
		if g.sent < image.ChunkSize {
			t.Errorf("source %d gave %d bytes", i, g.sent)
		}
	}
}

// severed breaks after some bytes; flipped changes a bit there.
type severed struct {
	net.Conn
	left int
	flip bool
	done *bool // it has come to that
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

// A source that dies, and one that gives a wrong bit, cost nothing but their share.
func TestTakeFromTheUnsound(t *testing.T) {
	live := random(10*image.ChunkSize + 1)
	for _, flip := range []bool{false, true} {
		for _, after := range []int{0, 1000, 3*image.ChunkSize + 9} {
			bad := newGiver(live)
			spoiled := false // a source that is slow to begin may not be asked for so much
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

// Of sources whose newest commits differ most are believed, and those that have no such state are
// left out.
func TestTakeFromTheMost(t *testing.T) {
	live := random(5 * image.ChunkSize)
	odd := slices.Clone(live)
	odd[3*image.ChunkSize]++
	other := newGiver(live)
	other.layout = "another"
	shorter := newGiver(live[1:])
	got, _, err := take(t, t.Context(), []*giver{newGiver(odd), newGiver(live), other, {layout: layout}, shorter, newGiver(live)}, []int{len(live)}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, [][]byte{live})
	_, _, err = take(t, t.Context(), []*giver{other, {layout: layout}, shorter}, []int{len(live)}, Options{})
	if !errors.Is(err, errLayout) || !errors.Is(err, errNone) {
		t.Errorf("no source of this state: %v", err)
	}
}

// What changes while it is fetched is fetched again, until it is little; what comes is always one
// commit.
func TestTakeWhatMoves(t *testing.T) {
	const chunks = 27
	live := random(chunks * image.ChunkSize)
	a, b := newGiver(live), newGiver(live)
	changing := chunks
	a.given = func() {
		for i := range changing {
			live[i*image.ChunkSize+7]++
		}
		changing /= 3
		a.commit()
		b.commit()
		b.store.Hold().Release()
	}
	got, taken, err := take(t, t.Context(), []*giver{a}, []int{len(live)}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	same(t, got, [][]byte{live})
	if taken.Rounds != 3 || taken.Bytes != (chunks+chunks/3+chunks/9)*image.ChunkSize || taken.Number != a.number {
		t.Errorf("%+v of commit %d", taken, a.number)
	}

	// Where everything changes all the time it is not tried for ever.
	a.given = func() {
		for i := range chunks {
			live[i*image.ChunkSize+7]++
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

// The end of the context ends it.
func TestTakeIsEnded(t *testing.T) {
	live := random(4 * image.ChunkSize)
	ctx, cancel := context.WithCancel(t.Context())
	_, _, err := take(t, ctx, []*giver{newGiver(live), newGiver(live)}, []int{len(live)}, Options{
		Progress: func(have, of int64) { cancel() },
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A source answers no senseless question, and ends the connection.
func TestServeSenseless(t *testing.T) {
	for name, question := range map[string]string{
		"unknown": "x", "chunks of nothing": "c\x01\x00\x00\x00\x00\x00\x00\x00", "too many": "c\xff\xff\xff\x7f", "behind the end": "mc\x01\x00\x00\x00\x09\x00\x00\x00",
	} {
		g := newGiver(make([]byte, 10))
		near, far := net.Pipe()
		done := make(chan error, 1)
		go func() {
			err := Serve(far, g.newest)
			far.Close()
			done <- err
		}()
		go func() { _, _ = near.Write([]byte(question)) }()
		b := make([]byte, 1000)
		for {
			if _, err := near.Read(b); err != nil {
				break
			}
		}
		if err := <-done; err == nil || strings.Contains(err.Error(), "EOF") || g.held != 0 {
			t.Errorf("%s: %v, %d held", name, err, g.held)
		}
		near.Close()
	}
}

// FuzzManifest: whatever a source answers, it is a manifest of the lengths asked for, or an error.
func FuzzManifest(f *testing.F) {
	g := newGiver(make([]byte, image.ChunkSize+1), nil)
	var b bytes.Buffer
	s := &source{conn: into{&b}, commit: g.newest()}
	if err := s.manifest(); err != nil {
		f.Fatal(err)
	}
	s.release()
	f.Add(b.Bytes())
	f.Add([]byte{0})
	f.Add(b.Bytes()[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readManifest(bytes.NewReader(b), layout, []int{image.ChunkSize + 1, 0})
		if err == nil && len(m.sums) != 2 {
			t.Errorf("%d checksums", len(m.sums))
		}
	})
}

// into is a connection that is written into a buffer.
type into struct{ *bytes.Buffer }

func (into) Close() error                     { return nil }
func (into) LocalAddr() net.Addr              { return nil }
func (into) RemoteAddr() net.Addr             { return nil }
func (into) SetDeadline(time.Time) error      { return nil }
func (into) SetReadDeadline(time.Time) error  { return nil }
func (into) SetWriteDeadline(time.Time) error { return nil }
