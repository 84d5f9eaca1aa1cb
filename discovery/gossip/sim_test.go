package gossip

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// The sizes of TestSimulation:
//
//	go test ./discovery/gossip -run TestSimulation -v -simulate 10,100,500
var simulate = flag.String("simulate", "10", "numbers of members in TestSimulation, with commas between")

const simRounds = 5

// listedBound is the documented bound from a crash to the list without the host.
const listedBound = 2 * time.Second

// TestSimulation measures, in clusters of members in one process over a network in memory, the time
// from a new agent's Join, or from an agent's crash, until an observer's list has the change and
// until all members know it. It uses virtual time, so it measures the protocol, with processors and
// a network that take no time.
func TestSimulation(t *testing.T) {
	var table strings.Builder
	fmt.Fprintf(&table, "%8s %12s %28s %28s %28s %28s\n", "members", "all joined", "join → list", "join → everybody", "crash → list", "crash → everybody")
	for size := range strings.SplitSeq(*simulate, ",") {
		var n int
		if _, err := fmt.Sscan(size, &n); err != nil || n < 4 {
			t.Fatalf("no size of a cluster: %q", size)
		}
		var s *simulation
		bubble(t, func(t *testing.T, network *memNet) {
			s = newSimulation(t, network, n)
			for range simRounds {
				s.round()
			}
			s.end()
		})
		if t.Failed() {
			return
		}
		if worst := slices.Max(s.crashList); worst > listedBound {
			t.Errorf("%d members: a host was listed for %v after its crash", n, worst)
		}
		fmt.Fprintf(&table, "%8d %12v %28s %28s %28s %28s\n", n, s.formed.Round(time.Millisecond), spread(s.joinList),
			spread(s.joinAll), spread(s.crashList), spread(s.crashAll))
	}
	t.Logf("median (least–most) of %d:\n%s", simRounds, &table)
}

// spread returns the median, minimum and maximum.
func spread(d []time.Duration) string {
	slices.Sort(d)
	ms := func(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
	return fmt.Sprintf("%v (%v–%v)", ms(d[len(d)/2]), ms(d[0]), ms(d[len(d)-1]))
}

// simulation is a cluster of n members, one of which is the observer of a Source.
type simulation struct {
	t       *testing.T
	net     *memNet
	seeds   []string
	members []*Member
	next    int
	source  *Source
	lists   chan []plan.Host
	stop    func()
	formed  time.Duration

	joinList, joinAll, crashList, crashAll []time.Duration
}

func newSimulation(t *testing.T, network *memNet, n int) *simulation {
	s := &simulation{t: t, net: network, lists: make(chan []plan.Host, 1)}
	start := time.Now()
	for range n - 1 {
		s.members = append(s.members, s.join())
	}
	cfg := brisk(observerConfig(s.seeds...))
	cfg.Transport = s.net.port()
	s.source = NewSource(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		s.source.Watch(ctx, func(hosts []plan.Host) {
			select { // only the latest list counts
			case <-s.lists:
			default:
			}
			s.lists <- hosts
		})
	})
	s.stop = func() {
		cancel()
		watching.Wait()
		s.source.Close()
	}
	s.listed(n-1, time.Time{})
	s.formed = s.known(len(s.members)-1, start)
	return s
}

func (s *simulation) join() *Member {
	s.next++
	cfg := brisk(agentConfig(fmt.Sprintf("host-%03d", s.next), s.next, s.seeds...))
	port := s.net.port()
	cfg.Transport, cfg.RejoinInterval = port, time.Minute
	m := mustJoin(s.t, cfg)
	if len(s.seeds) < 3 {
		s.seeds = append(s.seeds, m.Addr())
	}
	return m
}

// listed waits for a list of n hosts.
func (s *simulation) listed(n int, since time.Time) time.Duration {
	s.t.Helper()
	deadline := sandbox.Expired()
	last := -1
	for last != n {
		select {
		case hosts := <-s.lists:
			last = len(hosts)
		case <-deadline:
			s.t.Fatalf("a list of %d hosts, never of %d", last, n)
		}
	}
	return time.Since(since)
}

// known waits until each agent knows n other live agents.
func (s *simulation) known(n int, since time.Time) time.Duration {
	s.t.Helper()
	deadline := sandbox.Expired()
	for _, m := range s.members {
		for {
			changed, known := m.changes(), m.agentsKnown()
			if known == n {
				break
			}
			select {
			case <-changed:
			case <-deadline:
				s.t.Errorf("%s knows %d others, never %d", m.node, known, n)
				return 0
			}
		}
	}
	return time.Since(since)
}

func (m *Member) agentsKnown() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.roster.peers {
		if p.meta != nil && p.gone.IsZero() {
			n++
		}
	}
	return n
}

// round adds an agent, and cuts another one off. That one sends no goodbye, and does not refuse
// connections.
func (s *simulation) round() {
	start := time.Now()
	s.members = append(s.members, s.join())
	s.measure(start, &s.joinList, &s.joinAll)

	victim := s.members[len(s.members)/2]
	s.members = slices.DeleteFunc(s.members, func(m *Member) bool { return m == victim })
	start = time.Now()
	s.net.isolate(victim.Addr(), true)
	s.measure(start, &s.crashList, &s.crashAll)
	victim.Close()
}

// measure waits until the list and all agents agree with the simulation.
func (s *simulation) measure(start time.Time, list, all *[]time.Duration) {
	s.t.Helper()
	var knowing sync.WaitGroup
	knowing.Go(func() { *all = append(*all, s.known(len(s.members)-1, start)) })
	*list = append(*list, s.listed(len(s.members), start))
	knowing.Wait()
}

func (s *simulation) end() {
	s.stop()
	var closing sync.WaitGroup
	for _, m := range s.members {
		closing.Go(func() { m.Close() })
	}
	closing.Wait()
}
