package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
)

const (
	// unclaimed is how long a stored value is kept if nobody is known to need it.
	unclaimed = time.Minute
	// laterPause is how long a peer waits before it asks again for a value that is unreachable.
	laterPause = 100 * time.Millisecond
	// valuesDial bounds an attempt to connect to a worker that provides a value.
	valuesDial = 5 * time.Second
	// mostPuts is the largest number of stored values that a client may need.
	mostPuts = 1_000_000
	// mostAt is the largest number of addresses that a worker gets for a value, if the task has up
	// to fewValues values. If it has more, the worker gets one.
	mostAt    = 8
	fewValues = 1000
	// beside stands, in place of a host's name, for the store beside the scheduler.
	beside = ""
)

// values is the state of the store beside the scheduler.
type values struct {
	store    *blob.Store                    // nil: not opened yet
	arriving map[queue.Object][]*time.Timer // by value that was brought: a timer for each user that has not claimed it yet
}

// has reports whether the store has a value.
func (v *values) has(id queue.Object) bool { return v.store != nil && v.store.Has(blob.ID(id)) }

// openStore returns the store beside the scheduler. The first call opens it.
func (s *Scheduler) openStore() (*blob.Store, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.store != nil || s.closed {
		return s.store, nil
	}
	cfg := s.cfg.Store
	cfg.Run, cfg.Host = cmp.Or(cfg.Run, s.cfg.Run, fmt.Sprintf("%p", s)), transfer.BesideScheduler
	var err error
	s.store, err = blob.Open(cfg)
	return s.store, err
}

// transfer serves a connection that carries values: those in its own store, and those of hosts that
// the peer cannot reach.
func (s *Scheduler) transfer(ctx context.Context, conn net.Conn, r *link.Reader) error {
	store, err := s.openStore()
	if err != nil {
		s.cfg.Log.WithError(err).Warn("tasks: the scheduler has no store")
	}
	from := &relay{s: s}
	defer from.close()
	return transfer.Serve(ctx, conn, r, transfer.ServeConfig{Read: from.read, Store: store, Brought: s.brought})
}

// brought records that a value is in the store beside the scheduler, and keeps the value until its
// user claims it, because other users of the same value may release it meanwhile. It returns false
// if they have released it before this call: then the value is gone and must be brought again.
func (s *Scheduler) brought(id blob.ID, size int64) bool {
	s.mu.Lock()
	defer s.unlock()
	object := queue.Object(id)
	if s.closed || !s.has(object) {
		return false
	}
	s.q.Use(object, size)
	s.q.Stored(time.Now(), object, beside)
	if s.arriving == nil {
		s.arriving = map[queue.Object][]*time.Timer{}
	}
	var late *time.Timer
	late = s.dropLater(func() {
		if i := slices.Index(s.arriving[object], late); i >= 0 {
			s.arrived(object, i)
			s.act()
		}
	})
	s.arriving[object] = append(s.arriving[object], late)
	s.act()
	return true
}

// claim records that a user of a stored value is known. The caller holds the lock.
func (s *Scheduler) claim(id queue.Object) {
	if len(s.arriving[id]) > 0 {
		s.arrived(id, 0)
	}
}

// arrived stops keeping a value that was brought. The caller holds the lock.
func (s *Scheduler) arrived(id queue.Object, i int) {
	s.arriving[id][i].Stop()
	if s.arriving[id] = slices.Delete(s.arriving[id], i, i+1); len(s.arriving[id]) == 0 {
		delete(s.arriving, id)
	}
	s.q.Unput(id)
}

// dropLater calls f after unclaimed, by which time everyone who needs a value should have claimed
// it. It calls f with the lock held.
func (s *Scheduler) dropLater(f func()) *time.Timer {
	return time.AfterFunc(unclaimed, func() {
		s.mu.Lock()
		defer s.unlock()
		if !s.closed {
			f()
		}
	})
}

// storedHere records that the store beside the scheduler has the result of a worker that does not
// provide values itself. The caller holds the lock.
func (s *Scheduler) storedHere(now time.Time, id queue.Object) {
	if s.has(id) {
		s.q.Stored(now, id, beside)
	}
}

// hasStored records the values on the host of a worker, and removes those that nobody needs. If the
// worker has just joined, it removes them only later, because the worker may still have to report
// what they are. The caller holds the lock.
func (s *Scheduler) hasStored(p *peer, stored [][]byte, joins bool) {
	var unknown []queue.Object
	for _, b := range stored {
		if id, ok := blob.ParseID(b); ok && !s.q.Stored(time.Now(), queue.Object(id), p.host) {
			unknown = append(unknown, queue.Object(id))
		}
	}
	if len(unknown) == 0 {
		return
	}
	host := p.host
	drop := func() {
		for _, id := range unknown {
			if _, size := s.q.Holders(id); size == 0 {
				s.drop(queue.Action{Object: id, Host: host})
			}
		}
	}
	if joins {
		s.dropLater(drop)
	} else {
		drop()
	}
}

// lacks records that hosts do not have values that they were thought to have. The caller holds the
// lock.
func (s *Scheduler) lacks(now time.Time, all []*taskspb.MissingValue) {
	for _, m := range all {
		id, ok := blob.ParseID(m.GetValue())
		for _, p := range s.peers {
			if ok && p.worker && p.values != "" && p.values == m.GetHost() {
				s.q.Missing(now, queue.Object(id), p.host)
			}
		}
	}
}

// putBy records the values that a client needs. The caller holds the lock.
func (s *Scheduler) putBy(now time.Time, p *peer, puts []*taskspb.PutValue) error {
	for _, v := range puts {
		id, ok := blob.ParseID(v.GetValue())
		if !ok || v.GetSize() == 0 || v.GetSize() > transfer.MaxSize || len(p.puts) >= mostPuts {
			return errors.New("scheduler: a stored value has no valid hash or size, or too many are being stored")
		}
		object := queue.Object(id)
		if p.puts[object] {
			continue
		}
		if p.puts == nil {
			p.puts = map[queue.Object]bool{}
		}
		p.puts[object] = true
		s.besides += putCost
		s.q.Use(object, int64(v.GetSize()))
		use := &taskspb.TaskUse{Client: p.session, Value: v.GetValue(), Size: v.GetSize(), Put: true}
		s.note(use, func(m *taskspb.TasksRecord) { m.Uses = append(m.Uses, use) })
		s.storedHere(now, object)
		s.claim(object)
	}
	return nil
}

// unputBy records the values that a client no longer needs. The caller holds the lock.
func (s *Scheduler) unputBy(p *peer, all [][]byte) {
	for _, b := range all {
		if id, ok := blob.ParseID(b); ok && p.puts[queue.Object(id)] {
			delete(p.puts, queue.Object(id))
			s.besides -= putCost
			s.q.Unput(queue.Object(id))
			use := &taskspb.TaskUse{Client: p.session, Value: b}
			s.note(use, func(m *taskspb.TasksRecord) { m.Uses = append(m.Uses, use) })
		}
	}
}

// drop removes a value from a host. The caller holds the lock.
func (s *Scheduler) drop(a queue.Action) {
	if a.Host == beside {
		if s.store != nil {
			if err := s.store.Remove(blob.ID(a.Object)); err != nil {
				s.cfg.Log.WithError(err).Debug("tasks: removing a stored value")
			}
		}
		return
	}
	for _, p := range s.hosts[a.Host] {
		if p.link != nil {
			p.put(nil, func(m *taskspb.FromTasks) { m.Drops = append(m.Drops, a.Object[:]) })
		}
	}
}

// valueAt returns where a value is, with up to most addresses. The caller holds the lock.
func (s *Scheduler) valueAt(id queue.Object, most int) *taskspb.ValueAt {
	hosts, size := s.q.Holders(id)
	at := &taskspb.ValueAt{Value: id[:], Size: uint64(size)}
	for _, h := range hosts {
		if len(at.GetAt()) >= most {
			break
		}
		if h == beside {
			at.At = append(at.At, "")
			continue
		}
		for _, p := range s.hosts[h] {
			if p.values != "" {
				at.At = append(at.At, p.values)
				break // the workers of a host share one store
			}
		}
	}
	return at
}

// relay reads values on behalf of one peer: from the store beside the scheduler, or from workers.
type relay struct {
	s    *Scheduler
	id   blob.ID // value for which from is connected
	from *transfer.Client
}

func (r *relay) close() {
	if r.from != nil {
		_ = r.from.Close()
		r.from = nil
	}
}

// read implements transfer.Reader.
func (r *relay) read(ctx context.Context, id blob.ID, at int64, b []byte) error {
	if store, _ := r.s.openStore(); store != nil {
		if err := transfer.FromStore(store)(ctx, id, at, b); !errors.Is(err, blob.ErrMissing) {
			return err
		}
	}
	if r.from != nil && r.id == id {
		if err := r.ask(at, b); err == nil {
			return nil
		}
	}
	r.close()
	return r.find(ctx, id, at, b)
}

func (r *relay) ask(at int64, b []byte) error {
	if err := r.from.Ask(r.id, at, len(b)); err != nil {
		return err
	}
	got, err := r.from.Answer(len(b))
	copy(b, got)
	return err
}

// find tries everyone who should have the value. If nobody has it, find causes it to be computed
// again. If nobody can be reached, it returns a *transfer.UnreachableError.
func (r *relay) find(ctx context.Context, id blob.ID, at int64, b []byte) error {
	s := r.s
	s.mu.Lock()
	there := s.q.Want(time.Now(), queue.Object(id))
	addrs := s.valueAt(queue.Object(id), mostAt).GetAt()
	s.act()
	s.unlock()
	if !there {
		return blob.ErrMissing
	}
	later := transfer.ErrLater
	for _, addr := range addrs {
		if addr == "" || s.cfg.Credentials == nil {
			continue
		}
		conn, err := s.dialValues(ctx, addr)
		if err != nil {
			s.unreached(addr, err)
			later = &transfer.UnreachableError{Why: err.Error()}
			continue
		}
		r.id, r.from = id, transfer.NewClient(conn)
		if err = r.ask(at, b); err == nil {
			return nil
		}
		r.close()
		if errors.Is(err, blob.ErrMissing) {
			s.mu.Lock()
			s.lacks(time.Now(), []*taskspb.MissingValue{{Value: id[:], Host: addr}})
			s.unlock()
		}
	}
	select {
	case <-time.After(laterPause):
	case <-ctx.Done():
	}
	return later
}

// unreached logs, once for each connection of a worker, that the values of its host are
// unreachable.
func (s *Scheduler) unreached(addr string, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.peers {
		if p.worker && p.values == addr && !p.unreached {
			p.unreached = true
			s.cfg.Log.Warnf("tasks: results that are stored on %s cannot be fetched for clients, unless this machine can connect to %s: %v", p.host, addr, why)
		}
	}
}

func (s *Scheduler) dialValues(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, valuesDial)
	defer cancel()
	return s.cfg.Credentials.Dial(ctx, identity.Subject{Role: identity.Worker}, addr, wire.ValuesProtocol)
}
