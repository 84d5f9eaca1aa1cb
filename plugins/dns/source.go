package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/plugins/settings"
)

// maxTime bounds the time of all questions together. It is less than the time that hvdrun waits for
// an answer of a plugin.
const maxTime = 25 * time.Second

// source implements Discoverer and Watcher. Configure must be called first.
type source struct {
	cfg atomic.Pointer[config]

	mu   sync.Mutex
	last []string // names of the last hosts found, in order
}

// config holds the settings; it does not change.
type config struct {
	names          []string // absolute, with the final dot
	kind           string   // one of the values of the setting type
	byName         bool     // the host is the name, if it has an address, instead of each address
	slots          int
	fromWeight     bool
	servers        []string // host:port; empty: those of resolvConf
	resolvConf     string
	timeout        time.Duration
	minTTL, maxTTL time.Duration
	allowEmpty     bool
}

// Configure reads the settings that the README describes.
func (s *source) Configure(values map[string]string) error {
	r := settings.Read("dns", values)
	r.Required("names")
	c := &config{
		names:      r.List("names"),
		kind:       r.OneOf("type", "auto", "A+AAAA", "A", "AAAA", "SRV"),
		byName:     r.OneOf("host", "address", "name") == "name",
		slots:      r.Int("slots", 1, 0, plan.MaxSlots),
		fromWeight: r.OneOf("slots_from", "setting", "weight") == "weight",
		servers:    r.List("servers"),
		resolvConf: r.Text("resolv_conf", "/etc/resolv.conf"),
		timeout:    r.Duration("timeout", 2*time.Second, 10*time.Millisecond, maxTime),
		minTTL:     r.Duration("min_ttl", time.Second, time.Second, time.Hour),
		maxTTL:     r.Duration("max_ttl", 5*time.Minute, time.Second, 24*time.Hour),
		allowEmpty: r.Bool("allow_empty", false),
	}
	for i, name := range c.names {
		if _, ok := dns.IsDomainName(name); !ok {
			r.Fault("names", "%q is not a name", name)
		} else if _, err := netip.ParseAddr(name); err == nil {
			r.Fault("names", "%q is an address, not a name", name)
		}
		c.names[i] = dns.CanonicalName(name)
	}
	for i, server := range c.servers {
		addr, err := serverAddr(server)
		if err != nil {
			r.Fault("servers", "%q is not an address, or address:port", server)
		}
		c.servers[i] = addr
	}
	if len(c.servers) > 0 && r.Given("resolv_conf") {
		r.Fault("resolv_conf", "has no effect where servers are given")
	}
	if c.minTTL > c.maxTTL {
		r.Fault("min_ttl", "%v is more than max_ttl, %v", c.minTTL, c.maxTTL)
	}
	if err := r.Err(); err != nil {
		return err
	}
	s.cfg.Store(c)
	return nil
}

// serverAddr adds the port if the address lacks it.
func serverAddr(server string) (string, error) {
	if addr, err := netip.ParseAddrPort(server); err == nil {
		return addr.String(), nil
	}
	addr, err := netip.ParseAddr(server)
	return netip.AddrPortFrom(addr, 53).String(), err
}

var errNotConfigured = errors.New("dns: the source was asked before it got its settings")

// Discover asks once for all names.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	c := s.cfg.Load()
	if c == nil {
		return nil, errNotConfigured
	}
	hosts, _, err := s.find(ctx, c)
	return hosts, err
}

// Watch asks whenever the first of the answers expires, and calls found with every list that
// differs from the last. It returns the first error.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	c := s.cfg.Load()
	if c == nil {
		return errNotConfigured
	}
	var last []plan.Host
	for first := true; ; first = false {
		hosts, ttl, err := s.find(ctx, c)
		if err != nil {
			return err
		}
		if first || !slices.Equal(hosts, last) {
			last = hosts
			found(slices.Clone(hosts))
		}
		if retry.Pause(ctx, ttl) != nil {
			return ended(ctx)
		}
	}
}

func ended(ctx context.Context) error { return fmt.Errorf("dns: %w", context.Cause(ctx)) }

// find asks for all names concurrently, and returns the hosts and how long the answers are valid.
func (s *source) find(ctx context.Context, c *config) ([]plan.Host, time.Duration, error) {
	if ctx.Err() != nil {
		return nil, 0, ended(ctx)
	}
	servers, err := c.serverList()
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, maxTime, fmt.Errorf("no answer in %v", maxTime)) // the first failure cancels all
	defer cancel()
	var failed error
	var once sync.Once
	parts := make([]part, len(c.names))
	room := make(chan struct{}, 16)
	var all sync.WaitGroup
	for i, name := range c.names {
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			var err error
			if parts[i], err = c.lookup(ctx, servers, name); err != nil {
				once.Do(func() { failed = err; cancel() })
			}
		})
	}
	all.Wait()
	if failed != nil {
		return nil, 0, failed
	}
	var hosts []plan.Host
	ttl := c.maxTTL
	for _, p := range parts {
		ttl = min(ttl, p.ttl)
		if hosts, err = merge(hosts, p.hosts); err != nil {
			return nil, 0, err
		}
	}
	if err := plan.CheckHosts(hosts); err != nil {
		return nil, 0, fmt.Errorf("dns: %w", err)
	}
	return s.inOrder(hosts), max(ttl, c.minTTL), nil
}

// part is the result for one name.
type part struct {
	hosts []plan.Host
	ttl   time.Duration
}

// merge appends the hosts that are not in the list yet.
func merge(all, more []plan.Host) ([]plan.Host, error) {
	at := make(map[string]int, len(all))
	for i, h := range all {
		at[h.Name] = i
	}
	for _, h := range more {
		i, again := at[h.Name]
		switch {
		case !again:
			at[h.Name] = len(all)
			all = append(all, h)
		case all[i].Slots != h.Slots:
			return nil, fmt.Errorf("dns: host %s has %d slots and also %d", h.Name, all[i].Slots, h.Slots)
		}
	}
	return all, nil
}

// inOrder sorts hosts that were found before first, in their old order, and records the new order:
// the priority of a record may change, but that must not change the age of hosts.
func (s *source) inOrder(hosts []plan.Host) []plan.Host {
	s.mu.Lock()
	defer s.mu.Unlock()
	place := make(map[string]int, len(s.last))
	for i, name := range s.last {
		place[name] = i
	}
	rank := func(h plan.Host) int {
		if i, old := place[h.Name]; old {
			return i
		}
		return len(place)
	}
	slices.SortStableFunc(hosts, func(a, b plan.Host) int { return cmp.Compare(rank(a), rank(b)) })
	s.last = s.last[:0]
	for _, h := range hosts {
		s.last = append(s.last, h.Name)
	}
	return hosts
}
