package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler"
)

// RelayConfig says how a pool joins a cluster of Scaler. Address is needed; the zero value of each
// other field works.
type RelayConfig struct {
	// Address is that of Scaler's scheduler, as tcp://host:port or ipc:///path.
	Address string
	// Dial returns a new connection to the scheduler of the pool. Nil: to that of the job of this
	// process.
	Dial func(ctx context.Context) (net.Conn, error)
	// Workers bounds the workers that the cluster sees; 0: there is one for each processor that the
	// pool's workers offer.
	Workers int
	// Name is part of their identities, which Scaler's monitors show; "": hvdrun.
	Name string
	// Connect is how long Scaler's scheduler may take to answer at first; 0: 10 s.
	Connect time.Duration
	// Patience is how long the pool's scheduler may be out of reach; 0: a minute.
	Patience time.Duration
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

const (
	// relayEvery is how often Relay looks how many workers the pool has.
	relayEvery = 2 * time.Second
	// mostRelayed bounds the workers of a Relay.
	mostRelayed = 4096
)

// Relay has a pool work for a cluster of Scaler 1.7.14: tasks that its scheduler sends run on the
// pool's workers, as calls of functions that these have exported (tasks.Export), by their names.
// The cluster sees a worker with one slot for each processor of the pool, because its scheduler
// takes whatever a worker has beyond one task to be waiting.
//
// Relay returns nil when the scheduler shuts its workers down, and after ctx has ended, when the
// workers have left; an error where the scheduler does not answer, or the pool cannot be reached.
func Relay(ctx context.Context, cfg RelayConfig) error {
	cfg.Connect = cmp.Or(cfg.Connect, 10*time.Second)
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Workers < 0 {
		return fmt.Errorf("scaler: %d workers", cfg.Workers)
	}
	if err := scaler.Probe(ctx, cfg.Address, cfg.Connect); err != nil {
		return err
	}
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Dial: cfg.Dial, Patience: cfg.Patience, Log: cfg.Log})
	if err != nil {
		return err
	}
	defer pool.Close()
	r := &relay{cfg: cfg, pool: pool, ended: make(chan error)}
	return r.run(ctx)
}

// relay is a Relay.
type relay struct {
	cfg   RelayConfig
	pool  *tasks.Pool
	ended chan error           // of workers
	stops []context.CancelFunc // of workers, the oldest first
	wg    sync.WaitGroup

	mu    sync.Mutex
	names map[string]scaler.Func // exported functions
	told  bool                   // that there are none
}

// run has as many workers as the pool has processors, until ctx ends.
func (r *relay) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	every := time.NewTicker(relayEvery)
	defer every.Stop()
	err := r.adapt(ctx)
	over := false
	for err == nil && !over {
		select {
		case <-ctx.Done():
			over = true
		case err = <-r.ended:
			if over = err == nil; over {
				r.cfg.Log.Info("scaler: the scheduler has shut its workers down")
			}
		case <-every.C:
			err = r.adapt(ctx)
		}
	}
	cancel()
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		r.wg.Wait()
	}()
	for {
		select {
		case <-r.ended:
		case <-settled:
			return err
		}
	}
}

// adapt learns what the pool has, and starts or ends workers.
func (r *relay) adapt(ctx context.Context) error {
	if err := r.pool.Err(); err != nil {
		return fmt.Errorf("scaler: the pool: %w", err)
	}
	asking, cancel := context.WithTimeout(ctx, relayEvery)
	defer cancel()
	s, err := r.pool.Status(asking)
	if err != nil {
		return nil // there may be an answer the next time
	}
	want, names := 0, make(map[string]scaler.Func)
	for _, o := range s.Offered {
		if name := tasks.ExportedName(o.Function); name != "" {
			names[name] = r.call(name)
			want = max(want, int(o.CPU))
		}
	}
	r.mu.Lock()
	r.names = names
	r.mu.Unlock()
	if r.tell(len(names), len(s.Workers)); len(names) == 0 && len(s.Workers) > 0 {
		return errors.New("scaler: no worker of the job has exported a function: its program must call tasks.Export")
	}
	most := mostRelayed
	if r.cfg.Workers > 0 {
		most = r.cfg.Workers
	}
	r.resize(ctx, min(want, most))
	return nil
}

// tell logs, once, that there are no workers yet.
func (r *relay) tell(names, workers int) {
	if names == 0 && workers == 0 && !r.told {
		r.cfg.Log.Info("scaler: the job has no workers for tasks yet")
		r.told = true
	}
}

func (r *relay) resize(ctx context.Context, want int) {
	if want != len(r.stops) {
		r.cfg.Log.Infof("scaler: the pool is %d workers at %s", want, r.cfg.Address)
	}
	for len(r.stops) > want {
		last := len(r.stops) - 1
		r.stops[last]()
		r.stops = r.stops[:last]
	}
	for len(r.stops) < want {
		life, stop := context.WithCancel(ctx)
		r.stops = append(r.stops, stop)
		r.wg.Go(func() {
			defer stop()
			err := scaler.Work(life, scaler.Config{Address: r.cfg.Address, Name: r.cfg.Name, Find: r.find, Log: r.cfg.Log})
			if life.Err() == nil {
				r.ended <- err
			}
		})
	}
}

// find returns an exported function.
func (r *relay) find(name string) (scaler.Func, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if fn := r.names[name]; fn != nil {
		return fn, nil
	}
	var known []string
	for n := range r.names {
		known = append(known, n)
	}
	slices.Sort(known)
	if len(known) > 10 {
		known = append(known[:10], "…")
	}
	return nil, &scaler.CallError{Class: "LookupError", Text: fmt.Sprintf("no worker of the pool has exported a function %q; there are: %s", name, strings.Join(known, ", "))}
}

// call returns a function that calls an exported one in the pool.
func (r *relay) call(name string) scaler.Func {
	return func(ctx context.Context, texts [][]byte) ([]byte, error) {
		fn, err := tasks.ForeignJSON(name)
		if err != nil {
			return nil, err
		}
		args := make([]any, len(texts))
		for i, text := range texts {
			args[i] = text
		}
		result, err := fn.Call(ctx, r.pool, args...)
		if failed, ok := errors.AsType[*tasks.FunctionError](err); ok {
			return nil, errors.New(failed.Text)
		}
		return result, err
	}
}
