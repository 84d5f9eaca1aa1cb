package elastic

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// deferredPart is a user's part whose copy completes in the background when the test allows it.
type deferredPart struct {
	live, saved []byte
	under       *copying
}

type copying struct {
	from []byte
	let  chan error // result of the copy
}

func (p *deferredPart) Save() error {
	p.under = &copying{from: slices.Clone(p.live), let: make(chan error, 1)}
	return nil
}

func (p *deferredPart) Pending() func() ([]byte, error) {
	under := p.under
	return func() ([]byte, error) {
		err := <-under.let
		if err == nil {
			p.saved = under.from
		}
		return under.from, err
	}
}

func (p *deferredPart) Restore() error          { copy(p.live, p.saved); return nil }
func (p *deferredPart) Image() ([]byte, error)  { return p.saved, nil }
func (p *deferredPart) SetImage(b []byte) error { copy(p.live, b); return nil }
func (p *deferredPart) come(err error)          { p.under.let <- err }
func (p *deferredPart) set(b byte)              { p.live[0] = b }
func (p *deferredPart) Sync(ctx context.Context, g *collective.Group, root int) error {
	return collective.Broadcast(ctx, g, p.live, root)
}

// Commit leaves deferred parts to the background. Until they are complete, a restore goes back to
// the previous commit. If one fails, that remains so for all parts, and the next call returns the
// error.
func TestDeferred(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	weights, step := []int32{0, 0}, 0
	a, b := &deferredPart{live: []byte{0}}, &deferredPart{live: []byte{0}}
	s := NewState(w, Tensor("weights", weights), a, b, Value("step", &step))
	commit := func(n int, fails error) {
		t.Helper()
		a.set(byte(n))
		b.set(byte(n))
		weights[0], step = int32(n), n
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		if last := s.saved.Last(); last != nil && last.Number() == uint64(n) {
			t.Fatalf("commit %d is there before it is whole", n)
		}
		a.come(nil)
		b.come(fails)
		a.set(99)
		weights[0], step = 99, 99
	}
	is := func(n int) {
		t.Helper()
		if weights[0] != int32(n) || step != n || a.live[0] != byte(n) || b.live[0] != byte(n) {
			t.Fatalf("weights %d, step %d, parts %d and %d, want %d", weights[0], step, a.live[0], b.live[0], n)
		}
	}
	commit(1, nil)
	if err := s.Restore(); err != nil {
		t.Fatal(err)
	}
	is(1)
	commit(2, nil)
	commit(3, nil)
	broken := errors.New("no device")
	commit(4, broken)
	if err := s.Restore(); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	is(3)
	a.set(98)
	if err := s.Restore(); err != nil {
		t.Fatal(err)
	}
	is(3)
	commit(5, broken)
	if err := s.Commit(); !errors.Is(err, broken) || s.Commits() != 5 {
		t.Fatalf("%v after %d commits", err, s.Commits())
	}
	commit(6, nil)
	if _, err := s.Digest(); err != nil || s.saved.Last().Number() != 6 {
		t.Fatal(err, s.saved.Last().Number())
	}
	commit(7, broken)
	if _, err := s.Digest(); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if err := s.Restore(); err != nil {
		t.Fatal(err)
	}
	is(6)
}
