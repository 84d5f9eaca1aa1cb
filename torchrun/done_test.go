package torchrun

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/launch"
)

// TestDoneNodeEnds: a node that is done and does not wait for the others ends, and their workers
// continue.
func TestDoneNodeEnds(t *testing.T) {
	late := make(chan struct{})
	f := &fake{life: func(ctx context.Context, s *launch.Spec) error {
		if v, _ := lookup(s.Env, "GROUP_RANK"); v == "1" {
			select {
			case <-late:
			case <-ctx.Done():
				return &launch.ExitError{Code: 143}
			}
		}
		return nil
	}}
	ends := make(chan error, 2)
	var wg sync.WaitGroup
	for _, a := range pair(t, f) {
		a.cfg.ExitBarrier = -1
		wg.Go(func() { ends <- a.Run(t.Context()) })
	}
	first := <-ends
	close(late)
	wg.Wait()
	if err := errors.Join(first, <-ends); err != nil || len(f.specs) != 4 {
		t.Errorf("%v, %d workers were started", err, len(f.specs))
	}
}

// TestStaticWaitIsNamed: a node that waits for another one names it in the log, at growing
// intervals, and in its error.
func TestStaticWaitIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		peers, err := NewPeers(make([]byte, 32), "test", "127.0.0.1", discard())
		if err != nil {
			t.Fatal(err)
		}
		log, hook := logtest.NewNullLogger()
		s := &Static{Nodes: 2, Peers: peers, Log: log, Timeout: 10 * time.Minute}
		_, err = s.Next(t.Context(), false)
		if want := "not all of 2 nodes have come within 10m0s (rdzv_conf timeout): node 1 is missing"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
		if n := len(hook.Entries); n != 6 {
			t.Errorf("it says so %d times in 10 minutes, want 6", n)
		}
		for _, e := range hook.AllEntries() {
			if e.Message != "torchrun: waiting for node 1 of 2 (--node-rank 1)" {
				t.Errorf("it says %q", e.Message)
			}
		}
		leaveNow(t, s)
	})
}

// statics returns the nodes of a static rendezvous in their first round.
func statics(t *testing.T, count int) []*Static {
	t.Helper()
	workers := make([]int, count)
	for i := range workers {
		workers[i] = 1
	}
	nodes := make([]*Static, count)
	var all sync.WaitGroup
	for i, a := range static(t, workers, &fake{}) {
		nodes[i] = a.cfg.Rendezvous.(*Static)
		t.Cleanup(func() { leaveNow(t, nodes[i]) })
		all.Go(func() {
			if _, err := nodes[i].Next(t.Context(), false); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return nodes
}

// leaveNow makes a node leave without waiting for the others.
func leaveNow(t *testing.T, s *Static) {
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Leave(over); err != nil {
		t.Error(err)
	}
}

// succeed ends the job on a node that is done.
func succeed(t *testing.T, s *Static) {
	t.Helper()
	if err := errors.Join(s.Done(t.Context()), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	leaveNow(t, s)
}

func unchanged(t *testing.T, s *Static) {
	t.Helper()
	select {
	case <-s.Changed():
		t.Errorf("node %d would stop its workers", s.Node)
	default:
	}
}

// awaitNoAgents blocks until no other node is connected to the node with the store.
func awaitNoAgents(p *Peers) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.conns) > 0 {
		p.idle.Wait()
	}
}

// TestStaticDone: when a node of a static rendezvous is done, the other nodes do not stop their
// workers, and no further round forms.
func TestStaticDone(t *testing.T) {
	t.Run("first", func(t *testing.T) {
		nodes := statics(t, 2)
		if err := errors.Join(nodes[0].Done(t.Context()), nodes[0].Close(t.Context())); err != nil {
			t.Fatal(err)
		}
		nodes[1].wg.Wait()
		leaveNow(t, nodes[0])
		unchanged(t, nodes[1])
		if _, err := nodes[1].Next(t.Context(), true); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	t.Run("others", func(t *testing.T) {
		nodes := statics(t, 3)
		succeed(t, nodes[1])
		succeed(t, nodes[2])
		awaitNoAgents(nodes[0].Peers)
		unchanged(t, nodes[0])
		if _, err := nodes[0].Next(t.Context(), true); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	t.Run("timeout", func(t *testing.T) {
		nodes := statics(t, 2)
		if err := nodes[1].Done(t.Context()); err != nil {
			t.Fatal(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := nodes[1].kv.Get(over, "all-done"); err == nil { // the connection is broken from here on
			t.Error("it has waited for nothing")
		}
		if err := nodes[1].Close(t.Context()); err != nil {
			t.Error(err)
		}
		leaveNow(t, nodes[1])
		awaitNoAgents(nodes[0].Peers)
		unchanged(t, nodes[0])
		if _, err := nodes[0].Next(t.Context(), true); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// TestStaticLosesWaiting: when the round begins, the node with rank 0 notices that another node has
// been lost while it waited for a third one.
func TestStaticLosesWaiting(t *testing.T) {
	nodes := make([]*Static, 3)
	for i, a := range static(t, []int{1, 1, 1}, &fake{}) {
		nodes[i] = a.cfg.Rendezvous.(*Static)
		defer leaveNow(t, nodes[i])
	}
	if err := nodes[0].connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, kill := context.WithCancel(t.Context())
	var lost, others sync.WaitGroup
	lost.Go(func() {
		if _, err := nodes[1].Next(ctx, false); err == nil {
			t.Error("the round has begun without node 2")
		}
	})
	waits, stop := nodes[0].own.Await(nodes[0].here(0, 1))
	defer stop()
	<-waits
	kill()
	lost.Wait()
	leaveNow(t, nodes[1])
	awaitNoAgents(nodes[0].Peers)
	for _, s := range []*Static{nodes[0], nodes[2]} {
		others.Go(func() {
			if _, err := s.Next(t.Context(), false); err != nil {
				t.Error(err)
			}
		})
	}
	others.Wait()
	<-nodes[0].Changed()
}

// TestStaticClosed: nodes learn that a job has failed for good even if the node with rank 0 is gone
// before they ask.
func TestStaticClosed(t *testing.T) {
	nodes := statics(t, 3)
	if err := nodes[0].Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range nodes[1:] {
		<-s.Changed()
	}
	leaveNow(t, nodes[0])
	for _, s := range nodes[1:] {
		if _, err := s.Next(t.Context(), false); !errors.Is(err, ErrClosed) {
			t.Errorf("node %d: %v", s.Node, err)
		}
	}
}

// TestStaticEndsWithoutIt: nodes that wait for the next round learn that another node has ended the
// job.
func TestStaticEndsWithoutIt(t *testing.T) {
	nodes := statics(t, 3)
	var waiting sync.WaitGroup
	for _, s := range nodes[:2] {
		waiting.Go(func() {
			if _, err := s.Next(t.Context(), true); !errors.Is(err, ErrClosed) {
				t.Errorf("node %d: %v", s.Node, err)
			}
		})
	}
	there, cancel := nodes[0].own.Await(nodes[0].here(1, 0), nodes[0].here(1, 1))
	defer cancel()
	<-there
	if err := errors.Join(nodes[2].Done(t.Context()), nodes[2].Close(t.Context())); err != nil {
		t.Error(err)
	}
	waiting.Wait()
}

// TestStaticFails: a node that has failed for good makes the others stop, although another node is
// done.
func TestStaticFails(t *testing.T) {
	nodes := statics(t, 3)
	succeed(t, nodes[1])
	if err := nodes[2].Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-nodes[0].Changed()
}
