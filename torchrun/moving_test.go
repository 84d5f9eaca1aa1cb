package torchrun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/replica"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// member is a node. The agent of the first member has the store.
type member struct {
	*Dynamic
	end func(context.Context)
}

// kill ends a node's connections and store, as the death of its process does.
func (m *member) kill() {
	m.endWatch()
	m.Handler.Stop()
	over, cancel := context.WithCancel(context.Background())
	cancel()
	m.end(over)
}

// meetAt returns nodes that have met at the agent of the first one.
func meetAt(t *testing.T, count int) []*member {
	t.Helper()
	key := make([]byte, identity.ClusterKeyLen)
	nodes := make([]*member, count)
	addr := "127.0.0.1:0"
	for i := range nodes {
		nodes[i] = newMember(t, key, addr, i == 0, count, time.Hour)
		addr = nodes[0].Peers.Addr()
	}
	nextOf(t, nodes, count)
	return nodes
}

// newMember returns a node that has joined the store at the endpoint, or has it. A round waits for
// pace for more nodes, and heartbeats are that far apart.
func newMember(t *testing.T, key []byte, endpoint string, host bool, most int, pace time.Duration) *member {
	t.Helper()
	peers, err := NewPeers(key, "run", "", discard())
	if err != nil {
		t.Fatal(err)
	}
	peers.Route = "127.0.0.1"
	shared, end, err := peers.Meet(t.Context(), endpoint, host)
	if err == nil && !host {
		_, err = peers.Listen("127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	h, err := dynamic.New(dynamic.Config{Store: shared, Info: peers.Member(), Log: discard(), Settings: dynamic.Settings{
		RunID: "run", MinNodes: 1, MaxNodes: most, KeepAliveInterval: pace, LastCall: pace}})
	if err != nil {
		t.Fatal(err)
	}
	return &member{&Dynamic{Handler: h, Peers: peers}, end}
}

// nextOf moves each node to its next round, when its current round should end, as an agent does:
// after the loss of the store's node, the nodes wait until another one takes the store over. It
// fails the test if a round has not all nodes.
func nextOf(t *testing.T, nodes []*member, world int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context()) // a node that fails ends the others' waits
	defer cancel()
	var all sync.WaitGroup
	for i, d := range nodes {
		all.Go(func() {
			if d.watched != nil {
				select {
				case <-d.Changed():
				case <-ctx.Done():
				}
			}
			r, err := d.Next(ctx, false)
			if err == nil && r.World != world {
				err = fmt.Errorf("node %d of %d; want %d", r.Rank, r.World, world)
			}
			if err == nil && r.Rank == 0 && world > 1 {
				err = r.Store.Set(ctx, "store", []byte(d.Peers.Addr()))
			}
			if err != nil {
				t.Errorf("node %d: %v", i, err)
				cancel()
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// TestHostOfStoreDies: the node with the store dies, then the node that took the store over, and so
// on; each time the remaining nodes continue.
func TestHostOfStoreDies(t *testing.T) {
	nodes := meetAt(t, 4)
	for len(nodes) > 1 {
		nodes[0].kill()
		nodes = nodes[1:]
		nextOf(t, nodes, len(nodes))
	}
	nodes[0].kill()
}

// TestSecondHost: an agent does not serve a store if another agent listens at the endpoint already.
func TestSecondHost(t *testing.T) {
	nodes := meetAt(t, 1)
	defer nodes[0].kill()
	peers, err := NewPeers(make([]byte, identity.ClusterKeyLen), "run", "127.0.0.1", discard())
	if err != nil {
		t.Fatal(err)
	}
	endpoint := nodes[0].Peers.Addr()
	if _, _, err := peers.Meet(t.Context(), endpoint, true); err == nil {
		t.Fatal("two agents listen at one address")
	}
	_, end, err := peers.Meet(t.Context(), endpoint, false)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	defer end(over)
	if peers.answerTo(versionStore.of(0)) != nil {
		t.Error("it has a store of its own")
	}
}

// TestHostOfStoreReturns: an agent that is started at the endpoint after the store has moved joins
// the running job.
func TestHostOfStoreReturns(t *testing.T) {
	nodes := meetAt(t, 3)
	endpoint := nodes[0].Peers.Addr()
	nodes[0].kill()
	nextOf(t, nodes[1:], 2)
	back := newMember(t, make([]byte, identity.ClusterKeyLen), endpoint, true, 3, time.Hour)
	var others sync.WaitGroup
	others.Go(func() { nextOf(t, nodes[1:], 3) })
	r, err := back.Next(t.Context(), false)
	others.Wait()
	if err != nil || r.World != 3 || r.Rank != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, d := range append(nodes[1:], back) {
		d.kill()
	}
}

// TestHostOfStoreLeaves: if the node with the store leaves, another one takes the store over at
// once, without waiting for missing heartbeats.
func TestHostOfStoreLeaves(t *testing.T) {
	nodes := meetAt(t, 3)
	if err := nodes[0].Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	nodes[0].end(over)
	nextOf(t, nodes[1:], 2)
	for _, d := range nodes[1:] {
		d.kill()
	}
}

// attempts is a log hook that calls end when the second attempt to lead has failed.
type attempts struct {
	failed int
	end    context.CancelFunc
}

func (*attempts) Levels() []logrus.Level { return logrus.AllLevels }
func (a *attempts) Fire(e *logrus.Entry) error {
	if strings.Contains(e.Message, "is not reached") {
		if a.failed++; a.failed > 1 {
			a.end()
		}
	}
	return nil
}

// TestRefusedMember: if connections to the other of two nodes are refused, a node does not take
// over unless the other process is known to have ended.
func TestRefusedMember(t *testing.T) {
	log := discard()
	p, err := NewPeers(nil, "run", "127.0.0.1", log)
	if err == nil {
		_, err = p.Listen("127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	defer p.Close(over)
	defer cancel()
	members := []string{"127.0.0.1:1/x", p.Member()}
	ctx, end := context.WithCancel(t.Context())
	log.SetLevel(logrus.DebugLevel)
	log.AddHook(&attempts{end: end})
	node := &replica.Node{Name: p.Member()}
	if _, err := p.leadStore(ctx, node, members, store.Clock{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("it leads: %v", err)
	}
	p.mu.Lock()
	p.lives[members[0]] = &watchedLife{ended: true}
	p.mu.Unlock()
	at, err := p.leadStore(t.Context(), node, members, store.Clock{})
	if err != nil {
		t.Fatal(err)
	}
	defer at.close()
	if _, set, err := at.CompareAndSet(t.Context(), "key", 0, nil); !set || err != nil {
		t.Errorf("set %v, %v", set, err)
	}
}

// released is a log hook that unlocks mu when a node says that the store does not answer.
type released struct{ mu *sync.Mutex }

func (released) Levels() []logrus.Level { return logrus.AllLevels }
func (r released) Fire(e *logrus.Entry) error {
	if strings.Contains(e.Message, "does not answer") {
		r.mu.Unlock()
	}
	return nil
}

// TestSilentBeforeFirstRound: before the first round, a node waits for a store that does not
// answer, and reports one that has ended.
func TestSilentBeforeFirstRound(t *testing.T) {
	key := make([]byte, identity.ClusterKeyLen)
	host := newMember(t, key, "127.0.0.1:0", true, 2, time.Hour)
	other := newMember(t, key, host.Peers.Addr(), false, 2, time.Hour)
	defer other.kill()
	s, at := other.Peers.moving, host.Peers.moving.at.(*leadingStore)
	log := other.Peers.log.(*logrus.Logger)
	log.AddHook(released{&at.mu})
	at.mu.Lock() // the store sets no value
	if _, _, err := s.CompareAndSet(t.Context(), "key", 0, []byte("value")); err != nil {
		t.Fatal(err)
	}
	log.ReplaceHooks(make(logrus.LevelHooks))
	host.kill()
	if _, err := s.Get(t.Context(), "key"); err == nil || !strings.Contains(err.Error(), "before the first round") {
		t.Error(err)
	}
}

// TestOneSearch: calls that find the store lost share one search.
func TestOneSearch(t *testing.T) {
	nodes := meetAt(t, 3)
	for _, d := range nodes {
		defer d.kill()
	}
	s := nodes[2].Peers.moving
	const silent = "127.0.0.1" // without a port, so it is neither refused nor reached
	s.mu.Lock()
	s.members = []string{silent, nodes[2].Peers.Member()}
	moves := s.moves
	s.mu.Unlock()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	var shared *search
	for range 3 {
		if err := s.move(over, silent, moves); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		s.mu.Lock()
		if shared == nil {
			shared = s.looking
		}
		if s.looking != shared || shared == nil {
			t.Error("a search of its own")
		}
		s.mu.Unlock()
	}
}
