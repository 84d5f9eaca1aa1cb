package notify

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

const (
	defaultRetry   = 50 * time.Millisecond
	maxRetry       = time.Second
	defaultTimeout = 2 * time.Second
)

// PusherConfig configures a Pusher.
type PusherConfig struct {
	// Credentials are the driver's credentials.
	Credentials *identity.Credentials
	// Log receives failed attempts. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
	// Timeout bounds an attempt. Zero: 2 s.
	Timeout time.Duration
	// Delivered is called with the time from Push until a target has acknowledged the update, from
	// the goroutines of targets. It must not block. Nil: it is not called.
	Delivered func(after time.Duration)
	// Network is where the targets are. The zero value is the kernel's.
	Network identity.Network
}

// Target is a worker and the address of its notification service, host:port.
type Target struct {
	Subject identity.Subject
	Addr    string
}

// Pusher delivers to every target its latest update and its latest loss. Each target has its own
// goroutine and connection, so that a target that hangs delays no other. Its methods are safe for
// concurrent use.
type Pusher struct {
	cfg   PusherConfig
	retry time.Duration // the pause after a first failed attempt; it doubles up to maxRetry
	// acked, if not nil, is called from the target's goroutine when it has acknowledged an update
	// or a loss, with the number of the latest update that it knows.
	acked func(incarnation string, seq uint64)
	wake  chan struct{} // of capacity 1: there are targets to start
	lines retry.Gate    // of what targets have not acknowledged

	mu      sync.Mutex
	targets map[string]*target // by incarnation
	fresh   []*target          // targets without a goroutine yet
}

// target is a worker with what it must be sent.
type target struct {
	Target
	wake chan struct{} // capacity 1: want has changed
	// ctx ends with Forget and with Run.
	ctx    context.Context
	forget context.CancelFunc

	mu        sync.Mutex
	want      state
	supersede context.CancelFunc // ends the current attempt
}

// state is everything that a target must know.
type state struct {
	version uint64 // increases with every change; 0: nothing to send
	update  Update
	loss    Loss
	pushed  time.Time // when the update was set
}

func (w state) request() *notifypb.HostsUpdatedRequest {
	req := &notifypb.HostsUpdatedRequest{
		Seq: w.update.Seq, Change: uint32(w.update.Change), Generation: w.update.Generation,
		LostGeneration: w.loss.Generation, LostRanks: make([]uint32, len(w.loss.Ranks)),
	}
	for i, r := range w.loss.Ranks {
		req.LostRanks[i] = uint32(r)
	}
	return req
}

func (w state) String() string {
	if w.loss.Generation == 0 {
		return fmt.Sprintf("update %d", w.update.Seq)
	}
	return fmt.Sprintf("update %d and the loss of generation %d", w.update.Seq, w.loss.Generation)
}

// NewPusher returns a pusher without targets. It starts nothing.
func NewPusher(cfg PusherConfig) *Pusher {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = defaultTimeout
	}
	return &Pusher{cfg: cfg, retry: defaultRetry, wake: make(chan struct{}, 1), targets: make(map[string]*target)}
}

// Run delivers until ctx ends and returns nil once the goroutines of all targets have ended. It
// must be called once.
func (p *Pusher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.wake:
		}
		p.mu.Lock()
		fresh := p.fresh
		p.fresh = nil
		p.mu.Unlock()
		for _, t := range fresh {
			wg.Go(func() { p.serve(ctx, t) })
		}
	}
}

// Push sets the update of each target. It is sent repeatedly until the target acknowledges it, a
// later Push supersedes it, or the target is forgotten; other targets are not affected. An update
// whose number does not exceed the target's last one is ignored. A target with a new address is a
// new target. Push never blocks; before Run it only stores the update.
func (p *Pusher) Push(targets []Target, u Update) {
	p.set(targets, func(w *state) bool {
		newer := u.Seq > w.update.Seq
		if newer {
			w.update, w.pushed = u, time.Now()
		}
		return newer
	})
}

// PushLoss sets the loss of each target; otherwise it is like Push. A loss is ignored for a target
// whose last loss is of a later generation, or of the same one with as many ranks.
func (p *Pusher) PushLoss(targets []Target, l Loss) {
	p.set(targets, func(w *state) bool {
		newer := l.supersedes(w.loss)
		if newer {
			w.loss = l
		}
		return newer
	})
}

// set applies change to what each target must know.
func (p *Pusher) set(targets []Target, change func(*state) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, to := range targets {
		t, ok := p.targets[to.Subject.Incarnation]
		if ok && t.Target != to {
			t.forget()
			ok = false
		}
		if !ok {
			t = &target{Target: to, wake: make(chan struct{}, 1)}
			t.ctx, t.forget = context.WithCancel(context.Background())
			t.supersede = func() {}
			p.targets[to.Subject.Incarnation] = t
			p.fresh = append(p.fresh, t)
		}
		t.set(change)
	}
	signal(p.wake)
}

// Forget stops deliveries to a target, if there is one. It cancels a current attempt without
// waiting for it.
func (p *Pusher) Forget(incarnation string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t, ok := p.targets[incarnation]; ok {
		delete(p.targets, incarnation)
		t.forget()
	}
}

func (t *target) set(change func(*state) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if change(&t.want) {
		t.want.version++
		t.supersede()
		signal(t.wake)
	}
}

// begin returns what the target must know and a context that ends after the timeout or when that is
// superseded.
func (t *target) begin(timeout time.Duration) (context.Context, context.CancelFunc, state) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.wake: // it refers to what is returned here
	default:
	}
	ctx, cancel := context.WithTimeout(t.ctx, timeout)
	t.supersede = cancel
	return ctx, cancel, t.want
}

// superseded reports whether the target must know something newer than w. wake is then signalled.
func (t *target) superseded(w state) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.want.version > w.version
}

func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// serve is the goroutine of one target.
func (p *Pusher) serve(run context.Context, t *target) {
	defer t.forget()
	defer context.AfterFunc(run, t.forget)()
	conn, err := wire.NewClientBy(p.cfg.Network.Dial, t.Addr, p.cfg.Credentials.ClientTLS(t.Subject), maxRetry)
	if err != nil {
		p.cfg.Log.Errorf("notify: %v cannot be notified: %v", t.Subject, err)
		return
	}
	defer conn.Close()
	rpc := notifypb.NewNotificationClient(conn)
	var acked, seq uint64
	pause, failures := p.retry, 0
	for t.ctx.Err() == nil {
		var again <-chan time.Time // nil: nothing to repeat
		switch w, err := p.attempt(t, rpc, acked); {
		case t.ctx.Err() != nil:
			return
		case err == nil && w.version > acked:
			acked, pause, failures = w.version, p.retry, 0
			if w.update.Seq > seq && p.cfg.Delivered != nil {
				p.cfg.Delivered(time.Since(w.pushed))
			}
			seq = w.update.Seq
			if p.acked != nil {
				p.acked(t.Subject.Incarnation, w.update.Seq)
			}
		case err != nil && !t.superseded(w):
			failures++
			if loud(failures) {
				p.tell(t, w, pause, err)
			}
			again = time.After(pause)
			pause = min(2*pause, maxRetry)
		}
		select {
		case <-t.ctx.Done():
		case <-t.wake:
			pause = p.retry
		case <-again:
		}
	}
}

// tell logs that a target has not acknowledged, which many may do at once.
func (p *Pusher) tell(t *target, w state, pause time.Duration, err error) {
	if more, tell := p.lines.Pass(time.Now()); tell {
		p.cfg.Log.Warnf("notify: %v at %s has not acknowledged %v, again in %v: %s%s",
			t.Subject, t.Addr, w, pause, status.Convert(err).Message(), more)
	}
}

// loud reports whether the nth consecutive failure is logged: the second, fourth, eighth and so on.
// With a thousand targets a first attempt may time out without a fault.
func loud(failures int) bool { return failures > 1 && failures&(failures-1) == 0 }

// attempt sends the target what it must know if that is newer than the acknowledged version. It
// waits for a connection within its timeout, so that it succeeds as soon as the service is up.
func (p *Pusher) attempt(t *target, rpc notifypb.NotificationClient, acked uint64) (state, error) {
	ctx, cancel, w := t.begin(p.cfg.Timeout)
	defer cancel()
	if w.version <= acked {
		return w, nil
	}
	_, err := rpc.HostsUpdated(ctx, w.request(), grpc.WaitForReady(true))
	return w, err
}
