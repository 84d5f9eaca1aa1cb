package torchrun

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// Dynamic is the rendezvous of nodes that come and go.
type Dynamic struct {
	// Handler is the handler of this node.
	Handler *dynamic.Handler
	// Peers connects this node to the others, so that it notices their deaths at once.
	Peers *Peers
	// End, if not nil, is called by Leave when this node no longer needs the store.
	End func(ctx context.Context)

	watcher context.CancelFunc
	wg      sync.WaitGroup
	watched *watched
}

// watched is the state of a round that is being watched.
type watched struct {
	changed chan struct{}

	mu sync.Mutex
	// away means that the store is unreachable, and parted that a member has left. Only the store
	// could tell whether the member left to start another round or for good.
	away, parted, fired bool
}

// note applies a change. It makes the round end if a member is missing and the store cannot tell
// why. If no member is missing, training continues without the store.
func (w *watched) note(change func(*watched)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w)
	if w.away && w.parted {
		w.fire()
	}
}

// fire makes the round end. The caller holds the lock.
func (w *watched) fire() {
	if !w.fired {
		w.fired = true
		close(w.changed)
	}
}

// Next implements Rendezvous.
func (d *Dynamic) Next(ctx context.Context, failed bool) (Round, error) {
	d.endWatch()
	if s := d.Peers.moving; s != nil {
		s.copies()
	}
	var err error
	if failed {
		err = d.Handler.Fail(ctx)
	}
	var r dynamic.Round
	if err == nil {
		r, err = d.Handler.Next(ctx)
	}
	if errors.Is(err, dynamic.ErrClosed) {
		return Round{}, fmt.Errorf("%w: %w", ErrClosed, err)
	}
	if err != nil {
		return Round{}, err
	}
	w := &watched{changed: make(chan struct{})}
	d.watched = w
	ctx, d.watcher = context.WithCancel(context.WithoutCancel(ctx))
	d.wg.Go(func() {
		if _, err := d.Handler.Changed(ctx, func(is bool) { w.note(func(w *watched) { w.away = is }) }); err == nil {
			w.note((*watched).fire)
		}
	})
	kv := storeKV{r.Store}
	d.Peers.watch(namesOf(r.Members))
	if s := d.Peers.moving; s != nil {
		s.enter(ctx, r, func(ctx context.Context, rank int) { d.drop(ctx, r, rank) })
	}
	if len(r.Members) > 1 {
		d.attend(ctx, r, kv, w)
	}
	return Round{Number: r.Number, Rank: r.Rank, World: len(r.Members), Restarts: r.Restarts, Store: kv, Agents: namesOf(r.Members)}, nil
}

func (d *Dynamic) endWatch() {
	if d.watcher != nil {
		d.watcher()
		d.watcher = nil
	}
	d.wg.Wait()
}

// Changed implements Rendezvous.
func (d *Dynamic) Changed() <-chan struct{} { return d.watched.changed }

// Done implements Rendezvous.
func (d *Dynamic) Done(ctx context.Context) error { return d.Handler.Done(ctx) }

// Close implements Rendezvous.
func (d *Dynamic) Close(ctx context.Context) error { return d.Handler.Close(ctx) }

// statusKey is the key, in the run's store, of the exit status with which the job has ended.
const statusKey = "status"

// closeWith is like Close, for a job that has ended with an exit status. Nodes that come later get
// the status from ended.
func (d *Dynamic) closeWith(ctx context.Context, status int) error {
	err := storeKV{d.Handler.Store()}.Set(ctx, statusKey, []byte(strconv.Itoa(status)))
	return errors.Join(err, d.Close(ctx))
}

// ended returns the exit status of a job that a node has closed.
func (d *Dynamic) ended(ctx context.Context) (status int, err error) {
	e, err := d.Handler.Store().Get(ctx, statusKey)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(e.Value))
}

// Leave implements Rendezvous.
func (d *Dynamic) Leave(ctx context.Context) error {
	d.endWatch()
	err := d.Handler.Leave(ctx)
	if errors.Is(err, dynamic.ErrClosed) {
		err = nil
	}
	if d.End != nil {
		// If the job continues, other nodes take over the store as soon as this node ends it.
		if closed, cerr := d.Handler.Closed(ctx); cerr != nil || !closed {
			over, cancel := context.WithCancel(ctx)
			cancel()
			ctx = over
		}
		d.End(ctx)
	}
	return err
}

// storeKV is a store with versions, in the form that agents use.
type storeKV struct{ store store.Store }

// Set implements KV.
func (s storeKV) Set(ctx context.Context, key string, value []byte) error {
	return s.update(ctx, key, func([]byte, bool) ([]byte, error) { return value, nil })
}

// Get implements KV.
func (s storeKV) Get(ctx context.Context, key string) ([]byte, error) {
	e, err := s.store.Get(ctx, key)
	for err == nil && e.Version == 0 {
		e, err = s.store.Wait(ctx, key, 0)
	}
	return e.Value, err
}

// Add implements KV.
func (s storeKV) Add(ctx context.Context, key string, n int64) (sum int64, err error) {
	err = s.update(ctx, key, func(old []byte, is bool) ([]byte, error) {
		sum = n
		if is {
			m, err := strconv.ParseInt(string(old), 10, 64)
			if err != nil {
				return nil, fmt.Errorf("torchrun: the value of %q is not a number", key)
			}
			sum += m
		}
		return strconv.AppendInt(nil, sum, 10), nil
	})
	return sum, err
}

// update changes a value. Nobody else may change it at the same time.
func (s storeKV) update(ctx context.Context, key string, change func(old []byte, is bool) ([]byte, error)) error {
	e, err := s.store.Get(ctx, key)
	for err == nil {
		value, cerr := change(e.Value, e.Version != 0)
		if cerr != nil {
			return cerr
		}
		if value == nil {
			value = []byte{}
		}
		var set bool
		if e, set, err = s.store.CompareAndSet(ctx, key, e.Version, value); set {
			return nil
		}
	}
	return err
}
