package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
)

// watchBackoff is the pause before another watch. Its longest and the default timeout of a list are
// together less than hvdrun waits for an answer (--discovery-timeout).
var watchBackoff = retry.Backoff{First: 200 * time.Millisecond, Most: 10 * time.Second}

// source finds pods. newSource makes one, and Configure must be called before it is asked.
type source struct {
	dir    string // of the service account
	lookup func(string) (string, bool)
	log    logrus.FieldLogger
	wait   func(ctx context.Context, d time.Duration) error

	cfg    config
	client *client

	mu       sync.Mutex
	failures int               // of Watch, in a row: the next one waits
	faults   map[string]string // of pods, that are logged

	scale scaling // Scale's alone
}

func newSource() *source {
	return &source{dir: serviceAccount, lookup: os.LookupEnv, log: logrus.StandardLogger(), wait: wait}
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// Configure takes the settings, and finds the way to the API server, which it does not ask.
func (s *source) Configure(values map[string]string) error {
	c, err := readConfig(values)
	if err != nil {
		return err
	}
	a, err := c.access(s.dir, s.lookup)
	if err != nil {
		return err
	}
	c.namespace = cmp.Or(c.namespace, a.namespace, "default")
	s.cfg = c
	s.client, err = newClient(a, c)
	return err
}

var errNotConfigured = errors.New("kubernetes: not configured")

// Discover lists the pods once.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	if s.client == nil {
		return nil, errNotConfigured
	}
	list, err := s.client.list(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := podsOf(list)
	if err != nil {
		return nil, err
	}
	return s.hosts(pods)
}

// hosts returns the hosts that the pods are, and logs what is wrong with some of them, once.
func (s *source) hosts(pods []*pod) ([]plan.Host, error) {
	hosts, faults, err := s.cfg.hostsOf(pods)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(faults)) {
		if s.faults[name] != faults[name] {
			s.log.WithField("pod", name).Warn("kubernetes: the pod has no slots: " + faults[name])
		}
	}
	s.faults = faults
	return hosts, nil
}

// Watch lists the pods and then hears of every change, until ctx ends or the API server cannot be
// asked. A watch that breaks goes on where it was. One that follows a failure waits first, the
// longer the more there were in a row.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	if s.client == nil {
		return errNotConfigured
	}
	s.mu.Lock()
	failures := s.failures
	s.mu.Unlock()
	if failures > 0 {
		if err := s.wait(ctx, backoff(failures, nil)); err != nil {
			return err
		}
	}
	err := s.follow(ctx, found)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures++
	return err
}

// recovered forgets that anything failed.
func (s *source) recovered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = 0
}

// permanent returns whether it is no use to ask again soon.
func permanent(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.code < 500 && r.code != http.StatusTooManyRequests && r.code != http.StatusRequestTimeout
}

// backoff returns how long to wait after so many failures in a row: it doubles up to a bound, and
// is random in its upper half, so that not all clients of a server that comes back ask at once. A
// server may ask for more.
func backoff(failures int, err error) time.Duration {
	d := watchBackoff.After(failures)
	d = d/2 + time.Duration(rand.Int64N(int64(d/2)))
	var r *refusal
	if errors.As(err, &r) {
		d = max(d, r.after)
	}
	return d
}
