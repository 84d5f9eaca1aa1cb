package crowd

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// crew is the workers of a process.
type crew struct {
	tell    func(news)
	changed chan struct{} // capacity 1: the newest world has

	mu      sync.Mutex
	workers map[string]*worker
	world   *world // the newest world that any worker has received
}

// world is a world that at least one member has received.
type world struct {
	generation uint64
	size       int           // of all processes
	members    []*worker     // members of this process that have received it
	committed  int           // members of this process that have reported a commit
	at         time.Time     // when the last of them has
	heard      bool          // they have been told to have received an update
	whole      chan struct{} // closed when all members of all processes have received it
	over       chan struct{} // closed when all members have to leave
	dead       bool          // it ended because a member died
}

// worker is one worker.
type worker struct {
	id     string
	env    plan.Worker
	notes  *notify.Service
	ctx    context.Context
	signal context.CancelCauseFunc // the cause is an exit
}

// exit is a worker's exit status.
type exit syscall.Signal

func (e exit) Error() string { return "ended by " + syscall.Signal(e).String() }

// watchEvery is the interval at which workers check for updates, as training does in each step.
const watchEvery = 2 * time.Millisecond

// serveWorkers runs workers by orders until these or ctx end.
func serveWorkers(ctx context.Context, orders io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var mu sync.Mutex
	enc := json.NewEncoder(out)
	c := &crew{workers: make(map[string]*worker), changed: make(chan struct{}, 1), tell: func(n news) {
		mu.Lock()
		defer mu.Unlock()
		if enc.Encode(n) != nil {
			cancel() // the driver's process has closed the connection
		}
	}}
	wg.Go(func() { c.watch(ctx) })
	wg.Go(func() { c.count(ctx) })
	dec := json.NewDecoder(bufio.NewReader(orders))
	for {
		var o order
		if err := dec.Decode(&o); err == io.EOF || ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		if o.Start != "" {
			w, err := c.newWorker(ctx, o)
			if err != nil {
				return err
			}
			c.tell(news{Forked: w.id})
			wg.Go(func() { c.live(w) })
		}
		c.end(o.Stop, exit(syscall.SIGTERM))
		c.end(o.Kill, exit(syscall.SIGKILL))
		if o.Whole > 0 {
			runtime.GC() // now, before the workers report their commits, and not in what is measured next
		}
		c.turn(o)
	}
}

func (c *crew) newWorker(ctx context.Context, o order) (*worker, error) {
	vars := make(map[string]string, len(o.Env))
	for _, v := range o.Env {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	env, started, err := plan.WorkerFromEnv(func(name string) (string, bool) { v, ok := vars[name]; return v, ok })
	if err = cmp.Or(err, isStarted(started)); err != nil {
		return nil, err
	}
	w := &worker{id: o.Start, env: env}
	w.ctx, w.signal = context.WithCancelCause(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers[w.id] = w
	return w, nil
}

func isStarted(started bool) error {
	if !started {
		return errors.New("a worker without the environment of one")
	}
	return nil
}

// end ends workers by a signal.
func (c *crew) end(ids []string, with exit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		if w := c.workers[id]; w != nil {
			w.signal(with)
		}
	}
}

// turn does what an order says of a world: all have it, or all leave it.
func (c *crew) turn(o order) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.world == nil {
		return
	}
	if o.Whole == c.world.generation {
		close(c.world.whole)
	}
	if o.Over == c.world.generation {
		c.world.leave(o.Dead)
	}
}

func (w *world) leave(dead bool) {
	select {
	case <-w.over:
	default:
		w.dead = dead
		close(w.over)
	}
}

// live runs a worker until its end.
func (c *crew) live(w *worker) {
	err := c.train(w)
	c.mu.Lock()
	delete(c.workers, w.id)
	c.mu.Unlock()
	n := news{Ended: w.id}
	var by exit
	switch {
	case errors.As(context.Cause(w.ctx), &by):
		n.Signal = syscall.Signal(by)
	case err != nil:
		n.Signal = syscall.SIGABRT
	}
	c.tell(n)
}

// train joins world after world until the driver dismisses the worker.
func (c *crew) train(w *worker) error {
	credentials, err := identity.Decode(w.env.Credentials)
	if err != nil {
		return err
	}
	lis, err := identity.Notify.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	served, cancel := context.WithCancel(w.ctx)
	defer cancel()
	w.notes = notify.NewService(credentials)
	wg.Go(func() { _ = w.notes.Serve(served, lis) })
	client, err := rendezvous.NewClient(rendezvous.ClientConfig{Addr: w.env.DriverAddr, Credentials: credentials})
	if err != nil {
		return err
	}
	defer client.Close()
	wg.Go(func() { w.notes.Hear(served, client.Call) })
	addr := lis.Addr().String()
	j := rendezvous.Joining{NotifyAddr: addr, DataAddrs: []string{addr, strings.Replace(addr, "127.0.0.1", "10.11.12.13", 1)}}
	for {
		got, err := client.Join(w.ctx, j)
		switch {
		case errors.Is(err, rendezvous.ErrRemoved), errors.Is(err, rendezvous.ErrFinished):
			return nil
		case err != nil:
			return err
		}
		in := c.arrive(w, got)
		j.HoldsState, j.After = true, got.Generation
		select {
		case <-in.whole:
			j.Commits++
			wg.Go(func() { c.commit(served, client, in, j.Commits) })
		case <-in.over:
		case <-w.ctx.Done():
			return w.ctx.Err()
		}
		select {
		case <-in.over:
			j.Cause = "the hosts have changed"
			if in.dead {
				j.Cause = "collective: aborted: rank 7 (host0007:3) is gone: connection reset by peer"
			}
		case <-w.ctx.Done():
			return w.ctx.Err()
		}
	}
}

// commit reports a commit.
func (c *crew) commit(ctx context.Context, client *rendezvous.Client, in *world, commits uint64) {
	if client.Report(ctx, rendezvous.Committed, in.generation, commits) != nil {
		return // the worker ends
	}
	c.mu.Lock()
	in.committed++
	c.mu.Unlock()
	c.changes()
}

// changes has what is true of the newest world be told.
func (c *crew) changes() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// arrive records that the worker has received a world, and returns it.
func (c *crew) arrive(w *worker, got rendezvous.Place) *world {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.world == nil || c.world.generation < got.Generation {
		c.world = &world{
			generation: got.Generation, size: got.Size, whole: make(chan struct{}), over: make(chan struct{}),
		}
	}
	in := c.world
	if in.generation > got.Generation {
		in = &world{over: make(chan struct{})}
		close(in.over)
		return in
	}
	in.members, in.at = append(in.members, w), time.Now()
	c.changes()
	return in
}

// count tells how many workers have received the newest world, and have reported a commit.
func (c *crew) count(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.changed:
			c.mu.Lock()
			w := c.world
			n := news{World: w.generation, Size: w.size, Members: len(w.members), Committed: w.committed, At: w.at.UnixNano()}
			c.mu.Unlock()
			c.tell(n)
		}
	}
}

// watch tells when all members have received an update.
func (c *crew) watch(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.mu.Lock()
			n := news{Heard: c.heard(), At: time.Now().UnixNano()}
			if n.Heard > 0 {
				c.world.heard, n.World = true, c.world.generation
			}
			c.mu.Unlock()
			if n.Heard > 0 {
				c.tell(n)
			}
		}
	}
}

// heard returns the number of the last update of the current world that all its members of this
// process have received; 0: none, or told.
func (c *crew) heard() (seq uint64) {
	if c.world == nil || c.world.heard || len(c.world.members) == 0 {
		return 0
	}
	select {
	case <-c.world.whole:
	default:
		return 0
	}
	for i, w := range c.world.members {
		u := w.notes.Latest()
		if u.Generation != c.world.generation || u.Change == 0 {
			return 0
		}
		if i == 0 || u.Seq < seq {
			seq = u.Seq
		}
	}
	return seq
}
