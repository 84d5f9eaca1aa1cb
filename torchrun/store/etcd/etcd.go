// Package etcd stores the values of package store in etcd, which survives the loss of fewer than
// half of its members. New returns a Store.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// retryPause is the pause between two attempts while etcd is unreachable.
const retryPause = 200 * time.Millisecond

// Config configures a Store.
type Config struct {
	// Client is the client to use. The Store does not close it.
	Client *clientv3.Client
	// Prefix precedes all keys.
	Prefix string
	// Patience is how long etcd may be unreachable before a call fails. A call whose context ends
	// earlier fails then. Zero: 60 s.
	Patience time.Duration
	// Timeout bounds an attempt. Zero: 2 s.
	Timeout time.Duration
	// Log receives warnings while etcd does not answer the first call. Nil: logrus's standard
	// logger.
	Log logrus.FieldLogger
}

// Store is a store in etcd. Versions are etcd's revisions. There is no clock: Entry.Now is zero.
// The size of values is limited by etcd's configuration, by default to 1.5 MiB.
type Store struct {
	cfg Config

	mu       sync.Mutex
	failures retry.Row // of all calls, until etcd has answered one
	met      bool      // etcd has answered a call; heartbeats then report its absence
}

var _ store.Store = (*Store)(nil)

// New returns a store. It does no I/O.
func New(cfg Config) *Store {
	if cfg.Patience == 0 {
		cfg.Patience = time.Minute
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 2 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	return &Store{cfg: cfg, failures: retry.Row{Least: 10 * time.Second}}
}

// call repeats an attempt while etcd is unreachable.
func (s *Store) call(ctx context.Context, key string, value []byte, try func(context.Context) error) error {
	if err := store.Check(key, value); err != nil {
		return err
	}
	var last error // error of an attempt that was not answered
	ended := func() error {
		if last == nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w; the last attempt: %w", context.Cause(ctx), last)
	}
	for began := time.Now(); ; {
		if ctx.Err() != nil {
			return ended()
		}
		bounded, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		err := try(bounded)
		cancel()
		switch {
		case err == nil:
			s.note(nil)
			return nil
		case ctx.Err() != nil:
			return ended()
		}
		if last = fmt.Errorf("store: etcd: %w", err); errors.Is(err, context.DeadlineExceeded) {
			last = fmt.Errorf("store: etcd at %s does not answer: %w", strings.Join(s.cfg.Client.Endpoints(), ", "), err)
		}
		if !away(err) || time.Since(began) > s.cfg.Patience {
			return last
		}
		s.note(last)
		_ = retry.Pause(ctx, retryPause)
	}
}

// note records the result of an attempt, and warns if etcd has not answered any yet.
func (s *Store) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.met = true
	} else if !s.met {
		s.failures.Warn(s.cfg.Log, time.Now(), fmt.Sprintf("store: etcd at %s is not reached", strings.Join(s.cfg.Client.Endpoints(), ", ")), err)
	}
}

// away reports whether an error means that etcd was not reached, or currently has no leader.
func away(err error) bool {
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return e.Code() == codes.Unavailable || e.Code() == codes.DeadlineExceeded
	}
	code := status.Code(err)
	return errors.Is(err, context.DeadlineExceeded) || code == codes.Unavailable || code == codes.DeadlineExceeded
}

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, key string) (store.Entry, error) {
	e, _, err := s.get(ctx, key)
	return e, err
}

// get also returns etcd's revision at which the key had this value.
func (s *Store) get(ctx context.Context, key string) (e store.Entry, at int64, err error) {
	err = s.call(ctx, key, nil, func(ctx context.Context) error {
		r, err := s.cfg.Client.Get(ctx, s.cfg.Prefix+key)
		if err == nil {
			e, at = entryOf(r), r.Header.Revision
		}
		return err
	})
	return e, at, err
}

func entryOf(r *clientv3.GetResponse) store.Entry {
	if len(r.Kvs) == 0 {
		return store.Entry{}
	}
	return store.Entry{Value: r.Kvs[0].Value, Version: uint64(r.Kvs[0].ModRevision)}
}

// CompareAndSet implements store.Store. If an attempt was not answered, its value may have been set
// nevertheless; CompareAndSet then recognises the value as this caller's.
func (s *Store) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (e store.Entry, set bool, err error) {
	name, unclear := s.cfg.Prefix+key, false
	err = s.call(ctx, key, value, func(ctx context.Context) error {
		r, err := s.cfg.Client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(name), "=", int64(version))).
			Then(clientv3.OpPut(name, string(value))).Else(clientv3.OpGet(name)).Commit()
		if err != nil {
			unclear = true
			return err
		}
		if set = r.Succeeded; set {
			e = store.Entry{Value: value, Version: uint64(r.Header.Revision)}
			return nil
		}
		e = entryOf((*clientv3.GetResponse)(r.Responses[0].GetResponseRange()))
		set = unclear && string(e.Value) == string(value)
		return nil
	})
	return e, set, err
}

// Wait implements store.Store.
func (s *Store) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	for {
		e, at, err := s.get(ctx, key)
		if err != nil || e.Version != version {
			return e, err
		}
		watching, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
		for r := range s.cfg.Client.Watch(watching, s.cfg.Prefix+key, clientv3.WithRev(at+1)) {
			if r.Err() != nil || len(r.Events) > 0 {
				break // read the current value
			}
		}
		cancel()
		if ctx.Err() != nil {
			return store.Entry{}, context.Cause(ctx)
		}
	}
}
