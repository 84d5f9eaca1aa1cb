package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// crew is the workers of a host. It implements launch.Launcher with goroutines.
type crew struct {
	tell    func(news)
	changed wake.Flag    // something about the newest world has changed
	whole   wake.Flag    // all have received the newest world
	started atomic.Int64 // workers

	mu    sync.Mutex
	world *world // the newest world that any worker has received
}

// world is a world that at least one member has received.
type world struct {
	generation uint64
	size       int           // of all processes
	members    []*worker     // members of this process that have received it
	committed  int           // members of this process that have reported a commit
	at         time.Time     // when the last of them received it
	heard      bool          // news was sent that all of them have received an update
	whole      chan struct{} // closed when all members of all processes have received it
	over       chan struct{} // closed when all members have to leave
	dead       bool          // it ended because a member died
}

// worker is one worker.
type worker struct {
	env    plan.Worker
	line   net.Conn // its end of its socket
	number int      // among all of this process
	notes  *notify.Service
	rank   int // in the last world that it has received; the crew's lock guards it
	ctx    context.Context
	kill   context.CancelCauseFunc // the cause is an *launch.ExitError
}

// firstPID is greater than any process id of Linux, because an agent signals the process groups of
// its workers.
const firstPID = 1 << 23

// serveHost runs a host: the agent of a job, whose workers are a crew. It returns when the agent
// has ended, or when the orders or ctx end.
func serveHost(ctx context.Context, conn net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer conn.Close()
	defer cancel()
	dec, enc := json.NewDecoder(conn), json.NewEncoder(conn)
	var hello client.Hello
	if err := dec.Decode(&hello); err != nil {
		return err
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	var err error
	if log.Level, err = logrus.ParseLevel(hello.LogLevel); err != nil {
		return err
	}
	var mu sync.Mutex
	c := &crew{changed: wake.New(), whole: wake.New(), tell: func(n news) {
		mu.Lock()
		defer mu.Unlock()
		if enc.Encode(n) != nil {
			cancel() // the driver's process has closed the connection
		}
	}}
	return agent.RunJob(ctx, agent.JobConfig{
		Hello: hello, Launcher: c, Log: log,
		Ready: func(r client.Ready) error {
			wg.Go(func() { c.watch(ctx) })
			wg.Go(func() { c.count(ctx) })
			wg.Go(func() {
				defer cancel()
				c.obey(dec)
			})
			return enc.Encode(r)
		},
	})
}

// obey carries out the orders of the driver's process until it closes the connection.
func (c *crew) obey(orders *json.Decoder) {
	for {
		var o order
		if orders.Decode(&o) != nil {
			return
		}
		if o.Whole > 0 {
			runtime.GC() // now, before the workers report their commits, and not in what is measured next
		}
		c.turn(o)
	}
}

// Run implements launch.Launcher.
func (c *crew) Run(ctx context.Context, s *launch.Spec, started func(int)) error {
	env, err := environment(s.Env)
	if err != nil {
		return launch.NewStartError(s, err)
	}
	w := &worker{env: env}
	w.ctx, w.kill = context.WithCancelCause(ctx)
	defer w.kill(nil)
	w.number = int(c.started.Add(1))
	far, err := w.connect()
	if err != nil {
		return launch.NewStartError(s, err)
	}
	started(firstPID + w.number)
	defer w.talk(s, far)()
	err = c.train(w)
	var killed *launch.ExitError
	switch {
	case errors.As(context.Cause(w.ctx), &killed):
		return killed
	case ctx.Err() != nil:
		return by(syscall.SIGTERM)
	case err != nil:
		return by(syscall.SIGABRT)
	}
	return nil
}

// connect creates the worker's socket and returns the launcher's end.
func (w *worker) connect() (launcher net.Conn, err error) {
	near, far, err := ends()
	if err != nil {
		return nil, err
	}
	if launcher, err = connOf(far); err == nil {
		w.line, err = connOf(near)
	}
	return launcher, err
}

// talk starts to serve the launcher's end. end closes the worker's end, and waits until serving has
// ended.
func (w *worker) talk(s *launch.Spec, launcher net.Conn) (end func()) {
	var talking sync.WaitGroup
	talking.Go(func() {
		cleanup := s.Talk(w.ctx, firstPID+w.number, launcher)
		_ = launcher.Close()
		if cleanup != nil {
			cleanup()
		}
	})
	return func() {
		_ = w.line.Close() // the client has closed it, if there was one
		talking.Wait()
	}
}

func environment(entries []string) (plan.Worker, error) {
	vars := make(map[string]string, len(entries))
	for _, v := range entries {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	env, started, err := plan.WorkerFromEnv(func(name string) (string, bool) { v, ok := vars[name]; return v, ok })
	if err == nil && !started {
		err = errors.New("a worker without the environment of one")
	}
	return env, err
}

// by returns the error of a worker that a signal has ended.
func by(s syscall.Signal) *launch.ExitError { return &launch.ExitError{Code: 128 + int(s), Signal: s} }

// turn carries out an order about a world: all members have received it, or some die, or all leave
// it.
func (c *crew) turn(o order) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.world == nil {
		return
	}
	if o.Whole == c.world.generation {
		close(c.world.whole)
		c.whole.Set()
	}
	if o.Over == c.world.generation {
		c.world.end(o.Kill)
	}
}

// end kills every n-th member, where n is the argument one, and makes the others leave. If n is 0
// it kills none.
func (w *world) end(one int) {
	select {
	case <-w.over:
		return
	default:
	}
	if one > 0 {
		for _, m := range w.members {
			if m.rank%one == 0 {
				m.kill(by(syscall.SIGKILL))
			}
		}
	}
	w.dead = one > 0
	close(w.over)
}

// train joins one world after another until the driver dismisses the worker.
func (c *crew) train(w *worker) error {
	host, _, err := net.SplitHostPort(w.env.LauncherAddr)
	if err != nil {
		return err
	}
	client, err := line.NewClient(line.ClientConfig{Worker: w.env, Socket: w.line})
	if err != nil {
		return err
	}
	w.notes = client.Service
	var wg sync.WaitGroup
	defer wg.Wait()
	served, cancel := context.WithCancel(w.ctx)
	defer cancel()
	defer client.Close()
	addr := net.JoinHostPort(host, strconv.Itoa(1024+w.number%60000))
	j := line.Joining{DataAddrs: []string{addr, strings.Replace(addr, "127.", "10.", 1)}}
	for {
		got, err := client.Join(w.ctx, j)
		switch {
		case errors.Is(err, line.ErrRemoved), errors.Is(err, line.ErrFinished):
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
func (c *crew) commit(ctx context.Context, client *line.Client, in *world, commits uint64) {
	if client.Report(ctx, line.Committed, in.generation, commits) != nil {
		return // the worker ends
	}
	c.mu.Lock()
	in.committed++
	c.mu.Unlock()
	c.changes()
}

// changes makes count report the state of the newest world.
func (c *crew) changes() {
	c.changed.Set()
}

// arrive records that the worker has received a world, and returns it.
func (c *crew) arrive(w *worker, got line.Place) *world {
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
	w.rank = got.Rank
	in.members, in.at = append(in.members, w), time.Now()
	c.changes()
	return in
}

// count reports how many workers have received the newest world, and have reported a commit.
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

// watch reports when all members have received an update.
func (c *crew) watch(ctx context.Context) {
	for {
		c.mu.Lock()
		seq, wait := c.heard()
		n := news{Heard: seq, At: time.Now().UnixNano()}
		if seq > 0 {
			c.world.heard, n.World = true, c.world.generation
		}
		c.mu.Unlock()
		if seq > 0 {
			c.tell(n)
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-wait:
		case <-c.whole:
		}
	}
}

// heard returns the number of the last update of the current world that all its members of this
// process have received. It returns 0 if one of them has not; wait is closed when that can have
// changed, and is nil if it cannot change in this world.
func (c *crew) heard() (seq uint64, wait <-chan struct{}) {
	if c.world == nil || c.world.heard || len(c.world.members) == 0 {
		return 0, nil
	}
	select {
	case <-c.world.whole:
	default:
		return 0, nil
	}
	for i, w := range c.world.members {
		_, news := w.notes.Loss()
		u := w.notes.Latest()
		if u.Generation != c.world.generation || u.Change == 0 {
			return 0, news
		}
		if i == 0 || u.Seq < seq {
			seq = u.Seq
		}
	}
	return seq, nil
}
