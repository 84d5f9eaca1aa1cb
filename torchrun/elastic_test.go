package torchrun

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
)

// elastics are the nodes of one job. The first node has the store. When over is closed, the driver
// ends with a status.
type elastics struct {
	t       *testing.T
	members []*member
	served  []chan struct{} // closed once the node's agent serves
	over    chan struct{}
	wg      sync.WaitGroup
	status  []int
	errs    []error
}

// newElastics returns count nodes of a job that has room for at most the given number of them.
func newElastics(t *testing.T, count, most int) *elastics {
	e := &elastics{t: t, over: make(chan struct{}), status: make([]int, count), errs: make([]error, count)}
	addr := "127.0.0.2:0" // not the address from which this machine reaches others
	for i := range count {
		m := newMember(t, make([]byte, identity.ClusterKeyLen), addr, i == 0, most, time.Second)
		m.End = m.end
		e.members, e.served = append(e.members, m), append(e.served, make(chan struct{}))
		addr = e.members[0].Peers.Addr()
	}
	return e
}

// start runs nodes, whose driver will end with this status.
func (e *elastics) start(status int, nodes ...int) {
	for _, i := range nodes {
		node := Elastic{
			Rendezvous: e.members[i].Dynamic, Peers: e.members[i].Peers, Log: discard(),
			Serve: func(ctx context.Context, _ func() []string, joined func(string)) error {
				joined(fmt.Sprint("gossip", i))
				close(e.served[i])
				<-ctx.Done()
				return nil
			},
			Drive: func(ctx context.Context, _ <-chan struct{}, _ Seat) (int, error) {
				select {
				case <-e.over:
					return status, nil
				case <-ctx.Done():
					return 0, context.Cause(ctx)
				}
			},
		}
		e.wg.Go(func() { e.status[i], e.errs[i] = node.Run(e.t.Context()) })
	}
}

// until blocks until the job's record satisfies is, as the last node sees it.
func (e *elastics) until(is func(*dynamic.State) bool) {
	e.t.Helper()
	shared := e.members[len(e.members)-1].Handler.Store()
	var version uint64
	for {
		entry, err := shared.Wait(e.t.Context(), "record", version)
		if err != nil {
			e.t.Fatal(err)
		}
		version = entry.Version
		if s, err := dynamic.Decode(entry.Value); err != nil {
			e.t.Fatal(err)
		} else if is(s) {
			return
		}
	}
}

// end waits for all nodes and checks that all have ended with this status.
func (e *elastics) end(status int) {
	e.t.Helper()
	e.wg.Wait()
	for i := range e.status {
		if e.status[i] != status || e.errs[i] != nil {
			e.t.Errorf("node %d: status %d, %v", i, e.status[i], e.errs[i])
		}
	}
}

// TestElasticEnds: all nodes end with the job's status, including the node at the endpoint, whose
// address need not be the one from which this machine reaches others.
func TestElasticEnds(t *testing.T) {
	e := newElastics(t, 3, 3)
	e.start(2, 0, 1, 2)
	for _, served := range e.served {
		<-served
	}
	close(e.over)
	e.end(2)
}

// TestElasticEndsLate: a node that comes after the job's end, and one for which there was no room,
// end with the job's status.
func TestElasticEndsLate(t *testing.T) {
	for name, most := range map[string]int{"late": 3, "spare": 2} {
		t.Run(name, func(t *testing.T) {
			e := newElastics(t, 3, most)
			e.start(2, 0, 1)
			<-e.served[0]
			<-e.served[1]
			if name == "spare" {
				e.start(2, 2)
				e.until(func(s *dynamic.State) bool { return len(s.RedundancyList) == 1 })
			}
			close(e.over)
			if name == "late" {
				e.until(func(s *dynamic.State) bool { return s.Closed })
				e.start(2, 2)
			}
			e.end(2)
		})
	}
}

// TestPeersAddr: a node gives the others an address at which it listens.
func TestPeersAddr(t *testing.T) {
	for _, c := range []struct{ host, listens, want string }{
		{"", "127.0.0.2:0", "127.0.0.2"},
		{"", ":0", "10.9.8.7"},
		{"node1", "127.0.0.2:0", "node1"},
	} {
		peers, err := NewPeers(nil, "run", c.host, discard())
		if err != nil {
			t.Fatal(err)
		}
		peers.Route = "10.9.8.7"
		if _, err := peers.Listen(c.listens); err != nil {
			t.Fatal(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		peers.Close(over)
		if host, _, err := net.SplitHostPort(peers.Addr()); err != nil || host != c.want {
			t.Errorf("%+v: %s, %v", c, host, err)
		}
	}
}
