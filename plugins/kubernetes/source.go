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

// watchBackoff is the pause before the next watch. Its longest value and the default timeout of a
// list add up to less than the time that hvdrun waits for an answer (--discovery-timeout).
var watchBackoff = retry.Backoff{First: 200 * time.Millisecond, Most: 10 * time.Second}

// source finds pods. newSource returns one; Configure must be called first.
type source struct {
	dir    string // of the service account
	lookup func(string) (string, bool)
	log    logrus.FieldLogger
	wait   func(ctx context.Context, d time.Duration) error

	cfg    config
	client *client

	mu       sync.Mutex
	failures int               // consecutive failures of Watch, for the backoff
	faults   map[string]string // logged faults of pods

	scale scaling // only used by Scale
}

func newSource() *source {
	return &source{dir: serviceAccount, lookup: os.LookupEnv, log: logrus.StandardLogger(), wait: retry.Pause}
}

// Configure reads the settings and finds the API server, but sends no request.
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

var errNotConfigured = errors.New("kubernetes: the source was asked before it got its settings")

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

// hosts returns the hosts of the pods, and logs each fault of a pod once.
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

// Watch lists the pods and then follows every change, until ctx ends or the API server cannot be
// reached. A watch that breaks continues where it ended. After failures Watch first waits, longer
// with each consecutive one.
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

// recovered resets the count of failures.
func (s *source) recovered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = 0
}

// permanent returns whether a retry is useless.
func permanent(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.code < 500 && r.code != http.StatusTooManyRequests && r.code != http.StatusRequestTimeout
}

// backoff returns the pause after a number of consecutive failures. It doubles up to a bound, and
// its upper half is random, so that not all clients of a returning server send requests at once.
// The server may demand a longer pause.
func backoff(failures int, err error) time.Duration {
	d := watchBackoff.After(failures)
	d = d/2 + time.Duration(rand.Int64N(int64(d/2)))
	var r *refusal
	if errors.As(err, &r) {
		d = max(d, r.after)
	}
	return d
}
