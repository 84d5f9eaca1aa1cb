package tasks

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
)

const (
	// mostSources is the largest number of workers from which a value is requested at a time.
	mostSources = 4
	// outOfReach is how long a worker tries to fetch a value that exists but cannot be reached.
	outOfReach = 30 * time.Second
)

// hostStore is a worker's access to the store of its host: it fetches values into the store,
// decodes them, and provides them to others.
type hostStore struct {
	cfg   *ServeConfig
	store *blob.Store // nil: see err
	err   error
	ctx   context.Context // context of all that hostStore has started
	stop  context.CancelFunc
	wg    sync.WaitGroup

	mu       sync.Mutex
	listener *identity.Listener // nil: this worker does not provide values
	bringing map[blob.ID]chan struct{}
	values   map[sharedKey]func() (reflect.Value, error) // decode a value once, for all tasks
}

type sharedKey struct {
	id    blob.ID
	type_ reflect.Type
}

// openHostStore opens the store of the host. If that fails, tasks without stored values can still
// run.
func openHostStore(ctx context.Context, cfg *ServeConfig) *hostStore {
	h := &hostStore{cfg: cfg, bringing: map[blob.ID]chan struct{}{}, values: map[sharedKey]func() (reflect.Value, error){}}
	h.ctx, h.stop = context.WithCancel(context.WithoutCancel(ctx))
	run := cfg.run
	if run == "" {
		run = fmt.Sprintf("%x", newSession()) // then only this process uses the store
	}
	h.store, h.err = blob.Open(blob.Config{Root: cfg.root, Run: run, Host: cfg.Host, Most: cfg.StoreBytes})
	if h.err != nil {
		cfg.Log.WithError(h.err).Debug("tasks: this host has no store")
	}
	return h
}

func (h *hostStore) close() {
	h.stop()
	h.wg.Wait()
	if h.store != nil {
		if err := h.store.Close(); err != nil {
			h.cfg.Log.WithError(err).Debug("tasks: closing the store")
		}
	}
}

// provide starts listening, if it has not yet, on the local address of a connection to the
// scheduler. It returns the listener's address and the IDs of the values in the store.
func (h *hostStore) provide(conn net.Conn) (addr string, stored [][]byte) {
	if h.store == nil {
		return "", nil
	}
	all, err := h.store.List()
	if err != nil {
		h.cfg.Log.WithError(err).Debug("tasks: listing the store")
	}
	for _, id := range all[:min(len(all), link.MaxHeld)] {
		stored = append(stored, id[:])
	}
	if h.cfg.credentials == nil {
		return "", stored
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.listener == nil {
		local, err := netip.ParseAddrPort(conn.LocalAddr().String())
		if err == nil {
			h.listener, err = identity.Values.Listen(netip.AddrPortFrom(local.Addr().Unmap(), 0).String())
		}
		if err != nil {
			h.cfg.Log.WithError(err).Debug("tasks: values of this host are not provided")
			return "", stored
		}
		ln := h.listener
		h.wg.Go(func() { h.serve(ln) })
	}
	return h.listener.Addr().String(), stored
}

// serve provides values to others.
func (h *hostStore) serve(ln *identity.Listener) {
	raw := wire.Raw{Protocol: wire.ValuesProtocol, Handle: func(ctx context.Context, conn net.Conn, _ tls.ConnectionState) {
		defer conn.Close()
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		defer stop()
		if err := transfer.Serve(ctx, conn, link.NewReader(conn), transfer.ServeConfig{Read: transfer.FromStore(h.store)}); err != nil && ctx.Err() == nil {
			h.cfg.Log.Debugf("tasks: a connection for values: %v", err)
		}
	}}
	secure := h.cfg.credentials.ServerTLS(identity.Worker, identity.Driver)
	if err := wire.Serve(h.ctx, wire.MaxMessage, ln, secure, func(grpc.ServiceRegistrar) {}, raw); err != nil {
		h.cfg.Log.WithError(err).Warn("tasks: values of this host are no longer provided")
	}
}

// put stores a result. If nobody can request values from this worker, put stores the result beside
// the scheduler.
func (h *hostStore) put(ctx context.Context, parts [][]byte) (id blob.ID, err error) {
	if h.cfg.credentials == nil {
		conn, err := dialValues(ctx, h.cfg.Dial)
		if err != nil {
			return id, err
		}
		c := transfer.NewClient(conn)
		defer c.Close()
		return c.Put(ctx, parts...)
	}
	if h.store == nil {
		return id, h.err
	}
	w, err := h.store.Create(int64(lengthOf(parts)))
	if err != nil {
		return id, err
	}
	defer w.Abort()
	for _, p := range parts {
		if _, err := w.Write(p); err != nil {
			return id, err
		}
	}
	return w.Commit()
}

// bring makes sure that a value is in the host's store. It returns whether this call has fetched
// the value, and the sources in at that lack it. The error is a *goneError if no source has the
// value.
func (h *hostStore) bring(ctx context.Context, id blob.ID, at *taskspb.ValueAt) (brought bool, lacks []string, err error) {
	if h.store == nil {
		return false, nil, h.err
	}
	for !h.store.Has(id) {
		h.mu.Lock()
		other := h.bringing[id]
		if other == nil {
			other = make(chan struct{})
			h.bringing[id] = other
			h.mu.Unlock()
			lacks, err = h.fetch(ctx, id, at)
			h.mu.Lock()
			delete(h.bringing, id)
			close(other)
			h.mu.Unlock()
			return err == nil, lacks, err
		}
		h.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return false, nil, ctx.Err()
		}
	}
	return false, nil, nil
}

// fetch fetches a value from those who have it or, if they are unreachable, through the scheduler.
func (h *hostStore) fetch(ctx context.Context, id blob.ID, at *taskspb.ValueAt) (lacks []string, err error) {
	if at == nil {
		return nil, &goneError{errors.New("the location of a stored argument is missing")}
	}
	through := transfer.Source{Name: "the scheduler", Dial: func(ctx context.Context) (net.Conn, error) { return dialValues(ctx, h.cfg.Dial) }}
	var direct []transfer.Source
	for _, addr := range at.GetAt() {
		switch {
		case addr == "":
			direct = append(direct, through)
		case h.cfg.credentials != nil && len(direct) < mostSources:
			dial := dialer(addr, h.cfg.credentials, identity.Worker, wire.ValuesProtocol)
			direct = append(direct, transfer.Source{Name: addr, Dial: dial})
		}
	}
	size := int64(at.GetSize())
	if slices.Contains(at.GetAt(), "") { // if the scheduler is on this machine and of this user
		if err := h.store.Borrow(id, transfer.BesideScheduler); err == nil || errors.Is(err, blob.ErrFull) {
			return nil, err
		}
	}
	for since := time.Now(); ; {
		if len(direct) > 0 {
			var bad []*transfer.SourceError
			bad, err = transfer.Fetch(ctx, h.store, id, size, direct)
			for _, e := range bad {
				if errors.Is(e, blob.ErrMissing) && e.Name != through.Name {
					lacks = append(lacks, e.Name)
				}
			}
			if err == nil || ctx.Err() != nil || errors.Is(err, blob.ErrFull) {
				return lacks, err
			}
		}
		_, err = transfer.Fetch(ctx, h.store, id, size, []transfer.Source{through})
		switch {
		case err == nil, ctx.Err() != nil, errors.Is(err, blob.ErrFull):
			return lacks, err
		case errors.Is(err, blob.ErrMissing), time.Since(since) > outOfReach:
			return lacks, &goneError{err}
		}
		direct = nil
		select {
		case <-time.After(reachEvery):
		case <-ctx.Done():
			return lacks, ctx.Err()
		}
	}
}

// decode decodes a value in the store.
func (h *hostStore) decode(id blob.ID, t reflect.Type) (v reflect.Value, err error) {
	f, size, err := h.store.Open(id)
	if errors.Is(err, blob.ErrMissing) {
		return v, &goneError{err}
	} else if err != nil {
		return v, err
	}
	defer f.Close()
	b := make([]byte, size)
	if _, err := io.ReadFull(f, b); err != nil {
		return v, fmt.Errorf("the stored value cannot be read: %w", err)
	}
	return decodeOwn(b, t)
}

// shared is like decode, but returns the same decoded value to all tasks that want it as type t.
func (h *hostStore) shared(id blob.ID, t reflect.Type) (reflect.Value, error) {
	key := sharedKey{id, t}
	h.mu.Lock()
	get := h.values[key]
	if get == nil {
		get = sync.OnceValues(func() (reflect.Value, error) {
			v, err := h.decode(id, t)
			if err != nil {
				h.mu.Lock()
				defer h.mu.Unlock()
				delete(h.values, key)
			}
			return v, err
		})
		h.values[key] = get
	}
	h.mu.Unlock()
	return get()
}

// drop removes values that nobody needs any more.
func (h *hostStore) drop(all [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range all {
		id, ok := blob.ParseID(b)
		if !ok || h.store == nil {
			continue
		}
		for key := range h.values {
			if key.id == id {
				delete(h.values, key)
			}
		}
		if err := h.store.Remove(id); err != nil {
			h.cfg.Log.WithError(err).Debug("tasks: removing a stored value")
		}
	}
}
