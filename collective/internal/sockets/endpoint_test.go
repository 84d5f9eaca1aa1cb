package sockets

import (
	"context"
	"net"
	"runtime"
	"syscall"
	"testing"
	"testing/synctest"
	"weak"

	"github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// TestPastIsReleased: an endpoint keeps only the keys of past generations, so their groups can be
// garbage collected.
func TestPastIsReleased(t *testing.T) {
	e := &Endpoint{listener: identity.Data.Listener(), life: context.Background(), generations: generations{turned: make(chan struct{})}}
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

// deaf is a listener whose Accept fails the given number of times. Then it closes done and waits
// until the listener is closed.
type deaf struct {
	left         int
	done, closed chan struct{}
}

func (d *deaf) Accept() (net.Conn, error) {
	if d.left--; d.left >= 0 {
		return nil, syscall.EMFILE
	}
	close(d.done)
	<-d.closed
	return nil, net.ErrClosed
}

func (d *deaf) Close() error   { close(d.closed); return nil }
func (d *deaf) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// TestNoDescriptors: an endpoint that cannot accept connections logs that from time to time, not at
// each attempt.
func TestNoDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &deaf{left: 500, done: make(chan struct{}), closed: make(chan struct{})} // 5 seconds of attempts
		log, said := test.NewNullLogger()
		e, err := Listen(Config{ListenAddr: "127.0.0.1:1", Connections: 1, Log: log,
			Network: identity.Network{Listen: func(string) (net.Listener, error) { return d, nil }}})
		if err != nil {
			t.Fatal(err)
		}
		<-d.done
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if lines := said.AllEntries(); len(lines) != 1 {
			t.Errorf("%d lines of 500 failures", len(lines))
		}
	})
}
