package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// ServeConfig says how workers of Scaler join a pool. Listen is needed; the zero value of each
// other field works.
type ServeConfig struct {
	// Listen is the address that workers are given, as tcp://127.0.0.1:2345 or ipc:///path. Port 0
	// is any that is free.
	Listen string
	// Insecure permits an address that other machines reach. Whoever reaches it can be a worker: it
	// sees the arguments of tasks, and makes up their results.
	Insecure bool
	// Dial returns a new connection to the scheduler of the pool. Nil: to that of the job of this
	// process.
	Dial func(ctx context.Context) (net.Conn, error)
	// Silence is how long a worker may be silent before it is lost; 0: 60 s, as in Scaler.
	Silence time.Duration
	// Return is how long a worker whose connection has broken is waited for; 0: 1 s.
	Return time.Duration
	// Grace is how long tasks that run may go on when ctx ends; 0: 10 s.
	Grace time.Duration
	// CancelTimeout is how long a worker may take to end a task that was cancelled; 0: 30 s. Then
	// it is lost.
	CancelTimeout time.Duration
	// Patience is how long the pool's scheduler may be out of reach; 0: a minute.
	Patience time.Duration
	// Workers is how many there may be at a time; 0: 1,000.
	Workers int
	// Message is the largest message of a worker that is read, in bytes; 0: 16 MiB. A result that
	// is larger fails its task.
	Message int64
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
	// Ready, if not nil, is called with the address once Serve listens.
	Ready func(address string)

	record func(way string, frames [][]byte) // of tests; nil: nobody looks
}

// joinTime bounds how long a connection may be without a heartbeat at first.
const joinTime = 20 * time.Second

// maxStrangers bounds the connections that have sent no heartbeat.
const maxStrangers = 64

func (c *ServeConfig) fill() error {
	if err := CheckListen(c.Listen, c.Insecure); err != nil {
		return err
	}
	c.Silence = cmp.Or(c.Silence, time.Minute)
	c.Return = cmp.Or(c.Return, time.Second)
	c.Grace = cmp.Or(c.Grace, 10*time.Second)
	c.CancelTimeout = cmp.Or(c.CancelTimeout, 30*time.Second)
	c.Patience = cmp.Or(c.Patience, time.Minute)
	c.Workers = cmp.Or(c.Workers, 1000)
	c.Message = cmp.Or(c.Message, 16<<20)
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	return nil
}

// CheckListen returns what is wrong with an address to listen at: it is none, or other machines
// reach it, which insecure permits.
func CheckListen(address string, insecure bool) error {
	network, addr, err := zmtp.Split(address)
	if err != nil {
		return err
	}
	if network == "tcp" && !insecure && !loopback(addr) {
		return fmt.Errorf("scaler: other machines reach %s, and nothing in Scaler's protocol proves who a worker is: "+
			"listen on 127.0.0.1, or say that it is to be insecure", address)
	}
	return nil
}

func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Serve lets workers of Scaler 1.7.14, in Python or of Work, join a pool: they run tasks that
// clients of package tasks submit by a Function. Each is a worker of the pool, so that its tasks
// run again where it is lost, and late results of earlier attempts are refused.
//
// When ctx ends, Serve gives back what has not begun, waits for what runs for no longer than the
// grace, has the workers shut down, and returns nil. It returns an error where it cannot listen, or
// cannot reach the pool's scheduler for longer than its patience.
func Serve(ctx context.Context, cfg ServeConfig) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Dial: cfg.Dial, Patience: cfg.Patience, Log: cfg.Log})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer pool.Close()
	r, err := newRouter(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var watching sync.WaitGroup
	watching.Go(func() { watch(ctx, pool, cancel) })
	defer watching.Wait()
	return r.serve(ctx)
}

// poolError is the cause with which a Serve ends whose pool has gone.
type poolError struct{ error }

// watch ends with ctx, or ends it where the pool's scheduler has gone.
func watch(ctx context.Context, pool *tasks.Pool, gone context.CancelCauseFunc) {
	for every := time.NewTicker(5 * time.Second); ; {
		select {
		case <-ctx.Done():
			every.Stop()
			return
		case <-every.C:
		}
		if err := pool.Err(); err != nil {
			gone(poolError{err})
		}
	}
}

// router has the connections of workers.
type router struct {
	cfg  ServeConfig
	ln   *identity.Listener
	addr string

	mu        sync.Mutex
	peers     map[string]*remote  // by identity: the last connection of each
	calls     map[string]*attempt // by task: those that are not over
	late      int                 // results of attempts that were over
	unclaimed int64               // bytes of results of all workers that no TaskResult has claimed
	conns     sync.WaitGroup
	sessions  sync.WaitGroup // of workers in the pool
}

func newRouter(cfg ServeConfig) (*router, error) {
	r := &router{cfg: cfg, peers: map[string]*remote{}, calls: map[string]*attempt{}}
	network, addr, err := zmtp.Split(cfg.Listen)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		ln, err := wire.ListenLocal(addr)
		if err != nil {
			return nil, fmt.Errorf("scaler: listening: %w", err)
		}
		r.ln, r.addr = identity.ScalerWorkers.Guard(ln), cfg.Listen
		return r, nil
	}
	if r.ln, err = identity.ScalerWorkers.Listen(addr); err != nil {
		return nil, fmt.Errorf("scaler: listening: %w", err)
	}
	r.addr = "tcp://" + r.ln.Addr().String()
	return r, nil
}

// serve handles connections until ctx ends.
func (r *router) serve(ctx context.Context) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx)) // of connections
	defer end()
	accepting, stop := context.WithCancel(life)
	defer stop()
	r.conns.Go(func() { r.accept(accepting, life) })
	r.conns.Go(func() { r.look(life) })
	r.cfg.Log.Infof("scaler: workers may join at %s", r.addr)
	if r.cfg.Ready != nil {
		r.cfg.Ready(r.addr)
	}
	<-ctx.Done()
	stop()
	r.leave()
	r.sessions.Wait()
	r.shutdown()
	end()
	_ = r.ln.Close()
	r.conns.Wait()
	if gone, ok := errors.AsType[poolError](context.Cause(ctx)); ok {
		return fmt.Errorf("scaler: the pool: %w", gone.error)
	}
	return nil
}

// accept serves each connection for as long as life.
func (r *router) accept(ctx, life context.Context) {
	handle := func(conn net.Conn) { r.handle(life, conn) }
	if network, path, _ := zmtp.Split(r.cfg.Listen); network == "unix" {
		defer os.Remove(path)
		_ = wire.ServeLocalConns(ctx, r.ln, func(_ context.Context, conn net.Conn, _ wire.LocalPeer) { handle(conn) })
		return
	}
	defer context.AfterFunc(ctx, func() { _ = r.ln.Close() })()
	r.ln.Serve(r.cfg.Log, "scaler", func(conn *identity.Conn) { handle(conn) })
}

// look gives up workers that have been silent for too long.
func (r *router) look(ctx context.Context) {
	every := time.NewTicker(max(r.cfg.Silence/10, time.Millisecond))
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-every.C:
			r.mu.Lock()
			for _, p := range r.peers {
				if silent := now.Sub(p.heard); silent >= r.cfg.Silence && !p.broken {
					r.drop(p, fmt.Errorf("it has been silent for %v", silent.Round(time.Second)))
				}
			}
			r.mu.Unlock()
		}
	}
}

// handle serves a connection until it ends.
func (r *router) handle(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(joinTime))
	c, err := zmtp.Handshake(conn, zmtp.Config{Role: zmtp.Router, Limits: zmtp.Limits{Message: r.cfg.Message, Frames: maxFrames}})
	if err != nil {
		r.ln.Refused(conn, err)
		r.cfg.Log.Debugf("scaler: a connection of %v: %v", conn.RemoteAddr(), err)
		return
	}
	if !r.ln.Proven(conn) {
		return
	}
	p := newRemote(r, conn, c)
	if err := r.attach(p); err != nil {
		r.cfg.Log.Warnf("scaler: a connection of %v: %v", conn.RemoteAddr(), err)
		return
	}
	r.conns.Go(p.write)
	err = p.read()
	r.detach(p, err)
}

// attach makes the connection that of its worker, whose earlier one gives way: what that had is
// given back.
func (r *router) attach(p *remote) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.peers[string(p.id)]
	if old == nil && len(r.peers) >= r.cfg.Workers+maxStrangers {
		return fmt.Errorf("there are %d connections already", len(r.peers))
	}
	r.peers[string(p.id)] = p
	// A worker that has sent a heartbeat to a connection that broke waits for the answer.
	p.send(&scaler.HeartbeatEcho{})
	if old == nil {
		return nil
	}
	for _, c := range old.calls {
		p.send(&scaler.TaskCancel{ID: []byte(c.id), Force: true})
	}
	r.cfg.Log.Infof("scaler: worker %s has connected anew", p.name)
	r.over(old, tasks.ErrReturned)
	old.close()
	return nil
}

// detach notes that a connection has ended. Its worker may come back for a time, or deliver results
// by another connection.
func (r *router) detach(p *remote, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.close()
	switch {
	case p.isOver:
	case p.processors == 0:
		r.cfg.Log.Debugf("scaler: a connection of %v: %v", p.raw.RemoteAddr(), err)
		r.over(p, tasks.ErrReturned)
	case len(p.calls) == 0:
		r.lose(p, err)
	default:
		p.broken = true
		r.cfg.Log.Debugf("scaler: the connection of worker %s has ended: %v", p.name, err)
		p.gone = time.AfterFunc(r.cfg.Return, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.lose(p, err)
		})
	}
}

// lose has what the worker ran count as lost; the lock is held.
func (r *router) lose(p *remote, why error) {
	switch {
	case p.isOver:
	case len(p.calls) == 0:
		r.cfg.Log.Infof("scaler: worker %s has gone: %v", p.name, why)
		r.over(p, tasks.ErrReturned)
	default:
		r.cfg.Log.Warnf("scaler: worker %s is lost: %v", p.name, why)
		r.over(p, tasks.ErrVanished)
	}
}

// drop ends the connection of a worker that does not keep to the protocol; the lock is held.
func (r *router) drop(p *remote, why error) {
	r.lose(p, why)
	p.close()
}

// over ends a worker in the pool; the lock is held.
func (r *router) over(p *remote, cause error) {
	if p.isOver {
		return
	}
	p.isOver = true
	if p.gone != nil {
		p.gone.Stop()
	}
	if r.peers[string(p.id)] == p {
		delete(r.peers, string(p.id))
	}
	for _, c := range p.calls {
		r.finish(c, outcomeOf{err: errOver})
	}
	if p.leave != nil {
		p.leave(cause)
	}
	if cause != tasks.ErrReturned {
		p.close()
	}
}

// leave has all workers leave the pool.
func (r *router) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg.Workers = 0 // there come no more
	for _, p := range r.peers {
		if p.leave != nil {
			p.leave(nil)
		}
	}
}

// shutdownTime is how long workers may take to leave when they are shut down.
const shutdownTime = 5 * time.Second

// shutdown has all workers end, and waits for a time until they have.
func (r *router) shutdown() {
	r.mu.Lock()
	var left []*remote
	for _, p := range r.peers {
		if !p.broken {
			p.send(&scaler.Disconnect{Kind: scaler.Shutdown})
			left = append(left, p)
		}
	}
	r.mu.Unlock()
	late := time.NewTimer(shutdownTime)
	defer late.Stop()
	for _, p := range left {
		select {
		case <-p.ended:
		case <-late.C:
			return
		}
	}
}
