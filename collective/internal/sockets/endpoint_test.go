package sockets

import (
	"runtime"
	"testing"
	"weak"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// TestPastIsReleased: of generations that are over an endpoint keeps the keys alone, so that their
// groups can be collected.
func TestPastIsReleased(t *testing.T) {
	e := &Endpoint{listener: identity.Data.Listener(), closed: make(chan struct{}), generations: generations{turned: make(chan struct{})}}
	defer e.listener.Close()
	const last = mostPast + 3
	var all [last + 1]weak.Pointer[Generation]
	var keys [last + 1]identity.DataKey
	for n := range all {
		keys[n] = identity.NewDataKey()
		all[n] = admitAlone(t, e, uint64(n), keys[n])
	}
	runtime.GC()
	for n, gen := range all {
		if kept := gen.Value() != nil; kept != (n == last) {
			t.Errorf("generation %d of %d: kept is %v", n, last, kept)
		}
		h := identity.Hello{Generation: uint64(n), From: 1}
		key, err := e.keyOf(nil, h)
		if known := err == nil; known != (n >= last-mostPast) || known && key != keys[n] {
			t.Errorf("generation %d of %d: its key is known: %v, %v", n, last, known, err)
		}
	}
}

// admitAlone admits the group of all ranks of a generation.
//
//go:noinline
func admitAlone(t *testing.T, e *Endpoint, number uint64, key identity.DataKey) weak.Pointer[Generation] {
	p := alone(0)
	p.gen.Number, p.gen.Key = number, key
	if err := e.admitGroup(p); err != nil {
		t.Fatal(err)
	}
	return weak.Make(p.gen)
}
