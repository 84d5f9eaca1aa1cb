package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

// errSilent means that no member of the cluster is heard, so that the hosts are unknown.
var errSilent = errors.New("gossip: no member of the cluster responds")

const (
	// coalesce is how long a change waits for further changes, because many agents come or go at
	// once.
	coalesce = 20 * time.Millisecond
	// leaveTimeout bounds how long an observer takes to leave.
	leaveTimeout = time.Second
)

// Source is a discovery.Discoverer and discovery.Watcher of the hosts of a cluster's agents, in the
// order in which the agents started. If starts are equal, the host that was seen first is older,
// then the host with the lesser name. A Source joins the cluster as an observer at the first call,
// so that a failure to join is a failed discovery, and stays in the cluster until Close.
type Source struct {
	cfg     Config
	joining chan struct{} // holds one token, for the goroutine that may join

	mu     sync.Mutex
	member *Member
	closed bool
	told   map[string]string // incarnations in the last list of a Watch, by host
}

var (
	_ discovery.Discoverer = (*Source)(nil)
	_ discovery.Watcher    = (*Source)(nil)
)

// NewSource returns a Source of the cluster that cfg names; cfg.Meta is ignored. It starts nothing.
func NewSource(cfg Config) *Source {
	cfg.Meta = nil
	return &Source{cfg: cfg, joining: make(chan struct{}, 1), told: map[string]string{}}
}

// observe returns the observer. It joins the cluster now if it has not joined yet.
func (s *Source) observe(ctx context.Context) (*Member, error) {
	select {
	case s.joining <- struct{}{}:
		defer func() { <-s.joining }()
	case <-ctx.Done():
		return nil, fmt.Errorf("gossip: %w", context.Cause(ctx))
	}
	s.mu.Lock()
	m, closed := s.member, s.closed
	s.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("gossip: %w", context.Cause(ctx))
	case closed:
		return nil, errClosed
	case m != nil:
		return m, nil
	}
	s.mu.Lock()
	cfg := s.cfg
	s.mu.Unlock()
	m, err := Join(ctx, cfg)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.member = m
	if !bytes.Equal(cfg.Key, s.cfg.Key) || len(cfg.OtherKeys) != len(s.cfg.OtherKeys) { // SetKeys was called
		err = m.SetKeys(append([][]byte{s.cfg.Key}, s.cfg.OtherKeys...))
	}
	return m, err
}

// Close leaves the cluster and waits for everything that was started. A Watch in progress ends with
// an error.
func (s *Source) Close() error {
	s.joining <- struct{}{}
	defer func() { <-s.joining }()
	s.mu.Lock()
	m := s.member
	s.member, s.closed = nil, true
	s.mu.Unlock()
	if m == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	if err := m.Leave(ctx); err != nil {
		m.log.WithError(err).Debug("gossip: left without a goodbye")
	}
	return nil
}

// Discover returns the current hosts. It blocks while it joins the cluster. If no member is heard,
// it returns an error, because the hosts are unknown.
func (s *Source) Discover(ctx context.Context) ([]plan.Host, error) {
	m, err := s.observe(ctx)
	if err != nil {
		return nil, err
	}
	v, silent := m.look()
	if silent {
		return nil, errSilent
	}
	hosts := []plan.Host{}
	for _, a := range v.agents {
		hosts = append(hosts, a.host())
	}
	return hosts, nil
}

// Watch implements discovery.Watcher. A host whose agent has restarted is missing from one list,
// even if it restarted while nobody watched. It returns an error when no member of the cluster has
// been heard for some seconds.
func (s *Source) Watch(ctx context.Context, found func([]plan.Host)) error {
	s.mu.Lock()
	told := maps.Clone(s.told)
	s.mu.Unlock()
	var last []plan.Host
	first := true
	return s.watch(ctx, func(agents []agent) {
		hosts, without := []plan.Host{}, []plan.Host{}
		now := map[string]string{}
		for _, a := range agents {
			hosts = append(hosts, a.host())
			now[a.Name] = a.Incarnation
			if before, listed := told[a.Name]; !listed || before == a.Incarnation {
				without = append(without, a.host())
			}
		}
		if len(without) < len(hosts) {
			found(without)
			first = true
		}
		told = now
		s.mu.Lock()
		s.told = maps.Clone(told)
		s.mu.Unlock()
		if first || !slices.Equal(hosts, last) {
			first, last = false, slices.Clone(hosts)
			found(hosts)
		}
	})
}

// watch calls look with the agents now, and whenever they may have changed.
func (s *Source) watch(ctx context.Context, look func([]agent)) error {
	m, err := s.observe(ctx)
	if err != nil {
		return err
	}
	for {
		changed := m.changes()
		v, silent := m.look()
		if silent {
			return errSilent
		}
		look(v.agents)
		var due <-chan time.Time
		if !v.next.IsZero() {
			due = time.After(time.Until(v.next))
		}
		select {
		case <-changed:
			due = time.After(coalesce)
		case <-due:
			continue
		case <-ctx.Done():
		case <-m.ctx.Done():
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.ctx.Done():
			return errClosed
		case <-due:
		}
	}
}

// Agent returns what a host's agent advertises. Its LaunchAddr always has a host. It returns false
// if the host is not listed. It does not block, and finds no agent before the first Discover or
// Watch.
func (s *Source) Agent(host string) (Meta, bool) {
	s.mu.Lock()
	m := s.member
	s.mu.Unlock()
	if m == nil {
		return Meta{}, false
	}
	v, _ := m.look()
	for _, a := range v.agents {
		if a.Name == host {
			return a.reachable(), true
		}
	}
	return Meta{}, false
}

// Addrs returns the gossip addresses of the listed agents as host:port, the oldest first. It does
// not block, and returns none before the first Discover or Watch.
func (s *Source) Addrs() []string {
	s.mu.Lock()
	m := s.member
	s.mu.Unlock()
	if m == nil {
		return nil
	}
	v, _ := m.look()
	addrs := make([]string, len(v.agents))
	for i, a := range v.agents {
		addrs[i] = a.addr
	}
	return addrs
}

// reachable returns a copy of the Meta with a host in its LaunchAddr.
func (a agent) reachable() Meta {
	m := a.Meta
	m.BadSlots = slices.Clone(m.BadSlots)
	if host, port, err := net.SplitHostPort(m.LaunchAddr); err == nil && host == "" {
		if ip, _, err := net.SplitHostPort(a.addr); err == nil {
			m.LaunchAddr = net.JoinHostPort(ip, port)
		}
	}
	return m
}
