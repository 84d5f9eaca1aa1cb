package torchrun

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// meetPair returns two nodes in a round, rank 0 first. Their heartbeats are too rare to affect the
// test.
func meetPair(t *testing.T) (nodes [2]*Dynamic, rounds [2]Round) {
	t.Helper()
	return meetIn(t, new(storetest.Memory))
}

func meetIn(t *testing.T, shared store.Store) (nodes [2]*Dynamic, rounds [2]Round) {
	t.Helper()
	key := make([]byte, identity.ClusterKeyLen)
	var all sync.WaitGroup
	for i := range nodes {
		peers, err := NewPeers(key, "run", "127.0.0.1", discard())
		if err == nil {
			_, err = peers.Listen("127.0.0.1:0")
		}
		if err != nil {
			t.Fatal(err)
		}
		h, err := dynamic.New(dynamic.Config{Store: shared, Log: discard(), Settings: dynamic.Settings{
			RunID: "run", MinNodes: 2, MaxNodes: 2, KeepAliveInterval: time.Hour}})
		if err != nil {
			t.Fatal(err)
		}
		nodes[i] = &Dynamic{Handler: h, Peers: peers}
		all.Go(func() {
			var err error
			if rounds[i], err = nodes[i].Next(t.Context(), false); err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(func() {
			nodes[i].endWatch()
			h.Stop()
			over, cancel := context.WithCancel(context.Background())
			cancel()
			peers.Close(over)
		})
	}
	all.Wait()
	if rounds[0].Rank != 0 {
		nodes[0], nodes[1], rounds[0], rounds[1] = nodes[1], nodes[0], rounds[1], rounds[0]
	}
	return nodes, rounds
}

// sayStore publishes the address of the node with rank 0, as openStore does.
func sayStore(t *testing.T, d *Dynamic, r Round) (addr string) {
	t.Helper()
	addr = d.Peers.Addr()
	if err := r.Store.Set(t.Context(), "store", []byte(addr)); err != nil {
		t.Fatal(err)
	}
	return addr
}

// TestMemberDies: if a member's connection ends without a goodbye, the round changes for the node
// with rank 0; after a goodbye it does not.
func TestMemberDies(t *testing.T) {
	nodes, rounds := meetPair(t)
	addr := sayStore(t, nodes[0], rounds[0])
	dial := func() io.ReadWriteCloser {
		conn, err := nodes[1].Peers.dial(t.Context(), addr, attendance.of(rounds[0].Number))
		if err == nil && !welcomed(t.Context(), conn, 1) {
			t.Fatal("no answer")
		}
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	conn := dial()
	if _, err := conn.Write([]byte{0}); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("it is not closed after the last word")
	}
	select {
	case <-nodes[0].Changed():
		t.Error("a last word is a death")
	default:
	}
	conn = dial()
	conn.Close()
	<-nodes[0].Changed()
}

// TestFirstMemberDies: the other nodes notice that the node with rank 0 is gone.
func TestFirstMemberDies(t *testing.T) {
	nodes, rounds := meetPair(t)
	var connected sync.WaitGroup
	connected.Add(1)
	of := attendance.of(rounds[0].Number)
	a := nodes[0].Peers.answerTo(of)
	if a == nil {
		t.Fatal("nothing is served")
	}
	a.serving.Done()
	nodes[0].Peers.answer(of, func(conn net.Conn) error {
		var rank [4]byte
		if _, err := io.ReadFull(conn, rank[:]); err != nil || binary.BigEndian.Uint32(rank[:]) != 1 {
			t.Errorf("%v: %v", rank, err)
		}
		_, _ = conn.Write([]byte{0})
		conn.Close() // as the kernel of a killed process does
		connected.Done()
		return nil
	})
	sayStore(t, nodes[0], rounds[0])
	connected.Wait()
	<-nodes[1].Changed()
}

// losable is a store that is unreachable once gone is closed.
type losable struct {
	storetest.Memory
	gone  chan struct{}
	tried wake.Flag // set by each attempt to use the unreachable store
}

func (l *losable) err() error {
	select {
	case <-l.gone:
	default:
		return nil
	}
	l.tried.Set()
	return errors.New("connection refused")
}

func (l *losable) Get(ctx context.Context, key string) (store.Entry, error) {
	e, err := l.Memory.Get(ctx, key)
	return e, errors.Join(err, l.err())
}

func (l *losable) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	if err := l.err(); err != nil {
		return store.Entry{}, false, err
	}
	return l.Memory.CompareAndSet(ctx, key, version, value)
}

func (l *losable) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	waiting.Go(func() {
		select {
		case <-l.gone:
			cancel()
		case <-ctx.Done():
		}
	})
	e, err := l.Memory.Wait(ctx, key, version)
	return e, errors.Join(err, l.err())
}

// TestStoreIsLost: while all members stay, a round continues without the store indefinitely. When a
// member leaves or dies, the round ends on the other node.
func TestStoreIsLost(t *testing.T) {
	for _, end := range []string{"leaves", "dies"} {
		t.Run(end, func(t *testing.T) {
			shared := &losable{gone: make(chan struct{}), tried: wake.New()}
			nodes, rounds := meetIn(t, shared)
			addr := sayStore(t, nodes[0], rounds[0])
			conn, err := nodes[1].Peers.dial(t.Context(), addr, attendance.of(rounds[0].Number))
			if err != nil || !welcomed(t.Context(), conn, 1) {
				t.Fatal(err)
			}
			close(shared.gone)
			for range 4 {
				<-shared.tried
			}
			for _, d := range nodes {
				select {
				case <-d.Changed():
					t.Fatal("the store is lost, and the round ends")
				default:
				}
			}
			if end == "leaves" {
				nodes[1].endWatch()
			} else if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
			<-nodes[0].Changed()
		})
	}
}

// TestRoundEnds: a node that enters the next round is not dropped from it because it has left the
// last one.
func TestRoundEnds(t *testing.T) {
	nodes, rounds := meetPair(t)
	sayStore(t, nodes[0], rounds[0])
	for range 5 {
		var all sync.WaitGroup
		for i, d := range nodes {
			all.Go(func() {
				r, err := d.Next(t.Context(), false)
				if err != nil || r.Rank != i || r.World != 2 {
					t.Errorf("%+v, %v", r, err)
				}
				if r.Rank == 0 {
					sayStore(t, d, r)
				}
			})
		}
		all.Wait()
	}
}

// TestResetIsNoDeath: a connection that is reset, as by a firewall, does not count as a death; one
// that is closed without a goodbye does.
func TestResetIsNoDeath(t *testing.T) {
	for _, reset := range []bool{false, true} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		near, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		far, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		ln.Close()
		if reset {
			if err := far.(*net.TCPConn).SetLinger(0); err != nil {
				t.Fatal(err)
			}
		}
		far.Close()
		if gone, cut := departed(t.Context(), near); cut != reset || gone == reset {
			t.Errorf("reset %v: gone %v, cut %v", reset, gone, cut)
		}
	}
}
