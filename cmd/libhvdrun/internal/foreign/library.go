package foreign

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// Library holds the endpoints and groups of a process. Each has a number that is never reused. The
// zero value is ready for use.
type Library struct {
	mu        sync.RWMutex
	last      int64
	endpoints map[int64]*collective.Endpoint
	groups    map[int64]*Group
}

// options configures an endpoint. The zero value listens on all interfaces.
type options struct {
	// Run is the id of the job, which is the same in all processes that connect.
	Run string `json:"run"`
	// Listen is the host:port to listen on. Empty: the addresses of Interfaces, a free port.
	Listen      string   `json:"listen"`
	Interfaces  []string `json:"interfaces"`
	OnlySockets bool     `json:"only_sockets"`
	Algorithm   string   `json:"algorithm"`
	Connections int      `json:"connections"`
	// Ports bounds the port: "40000-40100".
	Ports string `json:"ports"`
}

// World describes the ranks that a process connects to, as in the protocol of workers. Other fields
// of the protocol's message are ignored.
type World struct {
	Generation uint64   `json:"generation"`
	Rank       int      `json:"rank"`
	Members    []member `json:"members"`
	DataKey    string   `json:"data_key"` // 32 bytes in hexadecimal
}

// member is a rank of a World.
type member struct {
	Host      string   `json:"host"` // ranks with the same host share memory; empty: they do not
	Addresses []string `json:"addresses"`
}

// Listen opens an endpoint with the options in text, JSON; "" stands for the zero options.
func (l *Library) Listen(text string) (endpoint int64, err error) {
	var o options
	if text != "" {
		if err := json.Unmarshal([]byte(text), &o); err != nil {
			return 0, fmt.Errorf("options: %w", err)
		}
	}
	algorithm, err := collective.ParseAlgorithm(o.Algorithm)
	if err != nil {
		return 0, err
	}
	ports, err := identity.ParsePorts(o.Ports)
	if err != nil {
		return 0, err
	}
	identity.UsePorts(ports)
	// The proofs on connections use the id of the run and the key of the world. They need no
	// certificate of the job's authority.
	if o.Run == "" {
		o.Run = "foreign"
	}
	authority, err := identity.NewAuthority(o.Run)
	if err != nil {
		return 0, err
	}
	credentials, err := authority.Issue(identity.Subject{Role: identity.Worker})
	if err != nil {
		return 0, err
	}
	e, err := collective.Listen(collective.Config{Credentials: credentials, ListenAddr: o.Listen, Interfaces: o.Interfaces,
		OnlySockets: o.OnlySockets, Algorithm: algorithm, Connections: o.Connections})
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.endpoints == nil {
		l.endpoints = map[int64]*collective.Endpoint{}
	}
	l.last++
	l.endpoints[l.last] = e
	return l.last, nil
}

func (l *Library) endpoint(n int64) (*collective.Endpoint, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if e := l.endpoints[n]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("there is no endpoint %d", n)
}

// Group returns the group with the given number.
func (l *Library) Group(n int64) (*Group, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if g := l.groups[n]; g != nil {
		return g, nil
	}
	return nil, fmt.Errorf("there is no group %d", n)
}

// Addresses returns the addresses at which other ranks reach an endpoint.
func (l *Library) Addresses(endpoint int64) ([]string, error) {
	e, err := l.endpoint(endpoint)
	if err != nil {
		return nil, err
	}
	return e.Addrs(), nil
}

// Widen makes an endpoint listen on the addresses of the interfaces too.
func (l *Library) Widen(endpoint int64) error {
	e, err := l.endpoint(endpoint)
	if err == nil {
		_, err = e.Widen()
	}
	return err
}

// Connect connects a World in JSON, whose generation must be higher than all earlier ones of the
// endpoint. It blocks for at most limit; if limit is not positive, the bounds of
// [collective.Endpoint.Connect] apply.
func (l *Library) Connect(endpoint int64, world string, limit time.Duration, check Check) (group int64, err error) {
	e, err := l.endpoint(endpoint)
	if err != nil {
		return 0, err
	}
	p, err := peers(world)
	if err != nil {
		return 0, fmt.Errorf("world: %w", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	if limit > 0 {
		bounded, stop := context.WithTimeout(ctx, limit)
		defer stop()
		ctx = bounded
	}
	type result struct {
		g   *collective.Group
		err error
	}
	connected := make(chan result, 1)
	go func() {
		g, err := e.Connect(ctx, p)
		connected <- result{g, err}
	}()
	ticker := time.NewTicker(slice)
	defer ticker.Stop()
	for {
		select {
		case r := <-connected:
			if r.err != nil {
				return 0, errors.Join(context.Cause(ctx), r.err)
			}
			return l.add(newGroup(r.g)), nil
		case <-ticker.C:
			if check != nil && check() {
				cancel(errInterrupted)
				check = nil
			}
		}
	}
}

func peers(world string) (p collective.Peers, err error) {
	var w World
	if err := json.Unmarshal([]byte(world), &w); err != nil {
		return p, err
	}
	key, err := hex.DecodeString(w.DataKey)
	if err != nil {
		return p, errors.New("its data_key is not hexadecimal")
	}
	if p.Key, err = identity.ParseDataKey(key); err != nil {
		return p, err
	}
	p.Generation, p.Rank = w.Generation, w.Rank
	for _, m := range w.Members {
		p.Hosts, p.Addrs = append(p.Hosts, m.Host), append(p.Addrs, m.Addresses)
	}
	return p, nil
}

func (l *Library) add(g *Group) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.groups == nil {
		l.groups = map[int64]*Group{}
	}
	l.last++
	l.groups[l.last] = g
	return l.last
}

// Subset is [Group.Subset]. It returns 0 if this rank is not in the subset.
func (l *Library) Subset(group int64, ranks []int, check Check) (subset int64, err error) {
	g, err := l.Group(group)
	if err != nil {
		return 0, err
	}
	made, err := g.Subset(ranks, check)
	if err != nil || made == nil {
		return 0, err
	}
	return l.add(made), nil
}

// Close closes an endpoint or a group. Groups outlive their endpoint.
func (l *Library) Close(number int64) error {
	l.mu.Lock()
	e, g := l.endpoints[number], l.groups[number]
	delete(l.endpoints, number)
	delete(l.groups, number)
	l.mu.Unlock()
	switch {
	case e != nil:
		return e.Close()
	case g != nil:
		g.Close()
		return nil
	}
	return fmt.Errorf("there is no endpoint or group %d", number)
}
