package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// member is a training worker with a feed. In each step it adds the step's number, which is also
// the value of each byte of its averages, to every byte of the state.
type member struct {
	feed    *Feed
	store   snapshot.Store
	live    []byte
	steps   uint64
	serving sync.WaitGroup
}

func newMember(length, averages int) *member {
	m := &member{live: make([]byte, length)}
	m.feed = NewFeed(FeedSource{
		Size:    averages,
		Reserve: m.store.Reserve,
		Trim:    m.store.Trim,
		Hold: func() (*Commit, error) {
			c := m.store.Hold()
			steps := c.Blobs()[1].Bytes()
			return &Commit{Number: c.Number(), Steps: binary.LittleEndian.Uint64(steps), Layout: layout,
				Carried: [][]byte{nil, steps}, Blobs: []*snapshot.Blob{&c.Blobs()[0]}, Release: c.Release}, nil
		},
		Sample: func(commit uint64) []Sum { return []Sum{{uint32(commit), 7}} },
	})
	m.commit()
	return m
}

func (m *member) position() []byte { return binary.LittleEndian.AppendUint64(nil, m.steps) }

func (m *member) commit() {
	p := m.store.Begin(m.steps+100, []snapshot.Source{{Bytes: m.live}, {Bytes: m.position(), Given: true}})
	p.Copy()
	p.Seal()
}

// step makes one step.
func (m *member) step() error {
	averages := bytes.Repeat([]byte{byte(m.steps)}, m.feed.source.Size)
	carried := func() ([][]byte, error) { return [][]byte{nil, m.position()}, nil }
	if err := m.feed.Keep(m.steps, m.steps+100, carried, averages); err != nil {
		return err
	}
	for i := range m.live {
		m.live[i] += byte(m.steps)
	}
	m.steps++
	m.commit()
	return nil
}

// visit returns a new connection, which the member serves.
func (m *member) visit() net.Conn {
	near, far := net.Pipe()
	m.serving.Go(func() {
		_ = Serve(far, func() *Supply { return &Supply{Feed: m.feed} }) // the other end checks what it receives
		far.Close()
	})
	return near
}

// stands waits until a follower has its commit, and returns the number of steps in that commit.
func stands(t *testing.T, f *Follower) (steps uint64) {
	t.Helper()
	select {
	case <-f.Loaded():
	case <-f.Failed():
		t.Fatal(f.Err())
	}
	return f.Head.Steps
}

// The memory for another commit is trimmed some steps after the follower has received its commit,
// however many steps were sent before.
func TestMemoryIsGivenBack(t *testing.T) {
	m := newMember(1, 1)
	trims := 0
	m.feed.source.Trim = func() { trims++ }
	m.feed.followers = 1
	m.feed.prepare()
	near, far := net.Pipe()
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(io.Discard, near) }) // until far is closed
	v := &visitor{link: &link{conn: far}, feed: m.feed, spare: soonSteps, commit: &Commit{}}
	send := func(steps, want int) {
		for range steps {
			if err := errors.Join(m.step(), v.step(nil)); err != nil {
				t.Fatal(err)
			}
		}
		if trims != want {
			t.Errorf("after %d steps memory was given back %d times, not %d", m.steps, trims, want)
		}
	}
	send(2*soonSteps, 0)
	v.commit = nil
	send(soonSteps-1, 0)
	send(2*soonSteps, 1)
	far.Close()
	reading.Wait()
}

// A follower has the member's state after each step, although each step changes all of it, and
// regardless of when the follower comes.
func TestFollow(t *testing.T) {
	for _, length := range []int{1, snapshot.ChunkSize + 3} {
		for _, averages := range []int{1, snapshot.ChunkSize + 1} {
			m := newMember(length, averages)
			for range 3 {
				if err := m.step(); err != nil {
					t.Fatal(err)
				}
			}
			state := make([]byte, length)
			memory := Memory{Layout: layout, Blobs: [][]byte{state}}
			for range Depth(averages) {
				memory.Buffers = append(memory.Buffers, make([]byte, averages))
			}
			f, err := Follow(t.Context(), m.visit(), memory)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.step(); err != nil { // while the commit is held
				t.Fatal(err)
			}
			steps := stands(t, f)
			for range 4 {
				if err := m.step(); err != nil {
					t.Fatal(err)
				}
				for steps < m.steps {
					s := <-f.Ready()
					if s.Number != steps || s.Commit != steps+100 || !bytes.Equal(s.Carried[1], binary.LittleEndian.AppendUint64(nil, steps)) ||
						!slices.Equal(s.Sums, []Sum{{uint32(steps + 100), 7}}) {
						t.Fatalf("%+v, want step %d", s, steps)
					}
					if want := bytes.Repeat([]byte{byte(steps)}, averages); !bytes.Equal(memory.Buffers[s.Buffer], want) {
						t.Fatalf("other averages of step %d", steps)
					}
					for i := range state {
						state[i] += byte(steps)
					}
					steps++
					f.Done(s)
				}
				if !bytes.Equal(state, m.live) {
					t.Fatalf("another state after %d steps", steps)
				}
			}
			if f.Latest() != m.steps {
				t.Errorf("%d steps are known, of %d", f.Latest(), m.steps)
			}
			f.Close()
			m.feed.End()
			m.serving.Wait()
			if m.feed.Followed() {
				t.Error("a feed is followed by nobody")
			}
		}
	}
}

// A follower that is too slow gets ErrLost. The steps that it has received are in order, and no
// step of the member waits for it.
func TestLost(t *testing.T) {
	const averages = smallKept / leastKept // two steps are kept
	m := newMember(1, averages)
	memory := Memory{Layout: layout, Blobs: [][]byte{make([]byte, 1)}, Buffers: [][]byte{make([]byte, averages), make([]byte, averages)}}
	f, err := Follow(t.Context(), m.visit(), memory)
	if err != nil {
		t.Fatal(err)
	}
	stands(t, f)
	for range 6 { // nothing takes the steps that are ready
		if err := m.step(); err != nil {
			t.Fatal(err)
		}
	}
	next := uint64(0)
	for failed := false; !failed; {
		select {
		case s := <-f.Ready():
			if s.Number != next {
				t.Errorf("step %d, want %d", s.Number, next)
			}
			next++
			f.Done(s)
		case <-f.Failed():
			failed = true
		}
	}
	if !errors.Is(f.Err(), ErrLost) {
		t.Errorf("%v after %d steps", f.Err(), next)
	}
	f.Close()
	m.feed.End()
	m.serving.Wait()
}

// A follower is refused if its layout differs from the member's, while another follower takes a
// commit, and if there is no running feed.
func TestRefused(t *testing.T) {
	m := newMember(3*snapshot.ChunkSize, 4)
	memory := func(layout string) Memory {
		all := Memory{Layout: layout, Blobs: [][]byte{make([]byte, 3*snapshot.ChunkSize)}}
		for range Depth(4) {
			all.Buffers = append(all.Buffers, make([]byte, 4))
		}
		return all
	}
	if _, err := Follow(t.Context(), m.visit(), memory("another")); !errors.Is(err, ErrOther) {
		t.Errorf("a state of another layout: %v", err)
	}
	m.serving.Wait()
	held := m.visit() // reads nothing after the first byte
	var head [1]byte
	if err := (&link{conn: held}).write(askToFollow, 0, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := held.Read(head[:]); err != nil {
		t.Fatal(err)
	}
	if _, err := Follow(t.Context(), m.visit(), memory(layout)); !errors.Is(err, ErrBusy) {
		t.Errorf("while another takes a commit: %v", err)
	}
	held.Close()
	m.serving.Wait()
	near, far := net.Pipe()
	m.serving.Go(func() {
		_ = Serve(far, func() *Supply { return nil }) // the other end checks what it receives
		far.Close()
	})
	if _, err := Follow(t.Context(), near, memory(layout)); !errors.Is(err, errNone) {
		t.Errorf("nothing to follow: %v", err)
	}
	m.feed.End()
	if _, err := Follow(t.Context(), m.visit(), memory(layout)); !errors.Is(err, errNone) {
		t.Errorf("a feed that has ended: %v", err)
	}
	m.serving.Wait()
}

// A follower ends with its context. Serving it ends with its connection.
func TestEnds(t *testing.T) {
	m := newMember(1, 1)
	ctx, cancel := context.WithCancel(t.Context())
	memory := Memory{Layout: layout, Blobs: [][]byte{make([]byte, 1)}}
	for range Depth(1) {
		memory.Buffers = append(memory.Buffers, make([]byte, 1))
	}
	f, err := Follow(ctx, m.visit(), memory)
	if err != nil {
		t.Fatal(err)
	}
	stands(t, f)
	cancel()
	<-f.Failed()
	f.Close()
	if err := m.step(); err != nil {
		t.Fatal(err)
	}
	m.serving.Wait()
}
