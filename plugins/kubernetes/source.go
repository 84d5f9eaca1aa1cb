package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/plan"
)

const (
	backoffMin = 200 * time.Millisecond
	// backoffMax and the default timeout of a list are together less than hvdrun waits for an
	// answer (--discovery-timeout).
	backoffMax = 10 * time.Second
	// maxDrops is how often in a row a watch may break, with nothing heard in between, before that
	// is a failure.
	maxDrops = 3
	// shortWatch is what a watch lasts at least, unless it says something: one that is ended at
	// once is refused in truth.
	shortWatch = time.Second
)

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
	s.cfg, s.client = c, newClient(a, c)
	return nil
}

var errNotConfigured = errors.New("kubernetes: not configured")

// Discover lists the pods once.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	if s.client == nil {
		return nil, errNotConfigured
	}
	pods, _, err := s.client.list(ctx)
	if err != nil {
		return nil, err
	}
	return s.hosts(pods)
}

// hosts returns the hosts that the pods are, and logs what is wrong with some of them, once.
func (s *source) hosts(pods map[string]*pod) ([]plan.Host, error) {
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
	err := s.follow(ctx, &view{source: s, found: found})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures++
	return err
}

// follow lists and watches until that fails.
func (s *source) follow(ctx context.Context, v *view) error {
	drops := 0
	for {
		pods, version, err := s.client.list(ctx)
		if err != nil {
			return err
		}
		v.pods, v.version = pods, version
		if err := v.publish(); err != nil {
			return err
		}
		for err == nil {
			start := time.Now()
			v.progress = false
			err = s.client.watch(ctx, v.version, v.apply)
			if v.dirty && v.broken == nil && ctx.Err() == nil {
				_ = v.publish() // what it says is in broken
			}
			lively := v.progress || err == nil && time.Since(start) >= shortWatch
			if lively {
				drops = 0
				s.recovered()
			}
			if ctx.Err() != nil || v.broken != nil {
				return cmp.Or(v.broken, err)
			}
			if err == nil && lively {
				continue
			}
			if drops++; drops > maxDrops || permanent(err) {
				return cmp.Or(err, errors.New("kubernetes: the API server ends every watch at once"))
			}
			s.log.WithError(cmp.Or(err, errClosed)).Info("kubernetes: the watch broke; going on")
			if err := s.wait(ctx, backoff(drops, err)); err != nil {
				return err
			}
			if !errors.Is(err, errGone) {
				err = nil // go on where it was
			}
		}
	}
}

// recovered forgets that anything failed.
func (s *source) recovered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = 0
}

var errClosed = errors.New("kubernetes: the watch was closed")

// permanent returns whether it is no use to ask again soon.
func permanent(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.code < 500 && r.code != http.StatusTooManyRequests && r.code != http.StatusRequestTimeout
}

// backoff returns how long to wait after so many failures in a row: it doubles up to a bound, and
// is random in its upper half, so that not all clients of a server that comes back ask at once. A
// server may ask for more.
func backoff(failures int, err error) time.Duration {
	d := backoffMax
	if failures < 10 {
		d = min(backoffMin<<(failures-1), backoffMax)
	}
	d = d/2 + time.Duration(rand.Int64N(int64(d/2)))
	var r *refusal
	if errors.As(err, &r) {
		d = max(d, r.after)
	}
	return d
}

// view is the pods as one Watch knows them.
type view struct {
	source   *source
	found    func([]plan.Host)
	pods     map[string]*pod
	version  string
	progress bool // something was heard
	dirty    bool // and has not been told
	told     bool
	last     []plan.Host
	broken   error // what publish returned
}

// apply takes an event. Where more is there to be read it is not told yet: many pods often change
// at once.
func (v *view) apply(kind string, p *pod, version string, more bool) error {
	if !v.progress {
		v.source.recovered()
	}
	v.version, v.progress, v.dirty = version, true, true
	switch kind {
	case "ADDED", "MODIFIED":
		v.pods[p.Metadata.Name] = p
		if len(v.pods) > maxPods {
			v.broken = fmt.Errorf("kubernetes: more than %d pods: set label_selector", maxPods)
			return v.broken
		}
	case "DELETED":
		delete(v.pods, p.Metadata.Name)
	}
	if more {
		return nil
	}
	return v.publish()
}

// publish tells the hosts where they differ from the last.
func (v *view) publish() error {
	v.dirty = false
	hosts, err := v.source.hosts(v.pods)
	if err != nil {
		v.broken = err
		return err
	}
	if v.told && slices.Equal(hosts, v.last) {
		return nil
	}
	v.told, v.last = true, slices.Clone(hosts)
	v.found(hosts)
	return nil
}
