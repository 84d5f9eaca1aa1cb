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
	"github.com/hvdrun/hvdrun/internal/wire"
)

const (
	defaultRetry   = 50 * time.Millisecond
	maxRetry       = time.Second
	defaultTimeout = 2 * time.Second
)

// PusherConfig says who the driver is and how it pushes.
type PusherConfig struct {
	// Credentials are the driver's.
	Credentials *identity.Credentials
	// Log takes failed attempts. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
	// Retry is the pause after a first failed attempt; it doubles up to 1 s. Zero: 50 ms.
	Retry time.Duration
	// Timeout bounds an attempt. Zero: 2 s.
	Timeout time.Duration
	// Acked is called from the target's goroutine when it has acknowledged an update or a loss,
	// with the number of the latest update that it knows. Nil: nobody listens.
	Acked func(incarnation string, seq uint64)
}

// Target is a worker and the address of its notification service, host:port.
type Target struct {
	Subject identity.Subject
	Addr    string
}

// Pusher is the driver's side: it brings every target the latest update and the latest loss that
// are meant for it. Each target has a goroutine and a connection of its own, so that one that hangs
// delays no other. Its methods may be called from several goroutines at once.
type Pusher struct {
	cfg  PusherConfig
	wake chan struct{} // of capacity 1: there are targets to start

	mu      sync.Mutex
	targets map[string]*target // by incarnation
	fresh   []*target          // those that Run has not started
}

// target is one worker that has to know something.
type target struct {
	Target
	wake chan struct{} // of capacity 1: want has changed
	// ctx is the life of the target, which Forget ends, as does the end of Run.
	ctx    context.Context
	forget context.CancelFunc

	mu       sync.Mutex
	want     word
	overtake context.CancelFunc // ends the attempt under way
}

// word is all that a target must know.
type word struct {
	version uint64 // grows with every change; 0 for nothing
	update  Update
	loss    Loss
}

func (w word) request() *wire.HostsUpdatedRequest {
	req := &wire.HostsUpdatedRequest{
		Seq: w.update.Seq, Change: uint32(w.update.Change), Generation: w.update.Generation,
		LostGeneration: w.loss.Generation, LostRanks: make([]uint32, len(w.loss.Ranks)),
	}
	for i, r := range w.loss.Ranks {
		req.LostRanks[i] = uint32(r)
	}
	return req
}

func (w word) String() string {
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
	if cfg.Retry <= 0 {
		cfg.Retry = defaultRetry
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = defaultTimeout
	}
	return &Pusher{cfg: cfg, wake: make(chan struct{}, 1), targets: make(map[string]*target)}
}

// Run pushes until ctx ends, and returns nil when the goroutines of all targets have ended. It is
// called once.
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

// Push sets what each of the targets must know. It is repeated for each until the target has
// acknowledged it, a later Push for the target overtakes it, or the target is forgotten; other
// targets keep what they must know. An update whose number is not higher than one that was pushed
// to a target already is ignored for it. A target whose address has changed is a new one. Push
// never blocks; before Run it only takes note.
func (p *Pusher) Push(targets []Target, u Update) {
	p.set(targets, func(w *word) bool {
		newer := u.Seq > w.update.Seq
		if newer {
			w.update = u
		}
		return newer
	})
}

// PushLoss sets which ranks of their world are dead, for each of the targets, and is otherwise like
// Push. A loss of an earlier generation than one that was pushed to a target already is ignored for
// it, as is one of the same that names no more ranks.
func (p *Pusher) PushLoss(targets []Target, l Loss) {
	p.set(targets, func(w *word) bool {
		newer := l.overtakes(w.loss)
		if newer {
			w.loss = l
		}
		return newer
	})
}

// set has change change what each of the targets must know.
func (p *Pusher) set(targets []Target, change func(*word) bool) {
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
			t.overtake = func() {}
			p.targets[to.Subject.Incarnation] = t
			p.fresh = append(p.fresh, t)
		}
		t.set(change)
	}
	signal(p.wake)
}

// Forget ends all efforts for a target, whether Push was ever called for it or not. It does not
// wait for an attempt under way, which is cut off.
func (p *Pusher) Forget(incarnation string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t, ok := p.targets[incarnation]; ok {
		delete(p.targets, incarnation)
		t.forget()
	}
}

func (t *target) set(change func(*word) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if change(&t.want) {
		t.want.version++
		t.overtake()
		signal(t.wake)
	}
}

// begin returns what the target must know now, and a context that ends after the timeout or when
// that is overtaken.
func (t *target) begin(timeout time.Duration) (context.Context, context.CancelFunc, word) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.wake: // it tells of what is returned here
	default:
	}
	ctx, cancel := context.WithTimeout(t.ctx, timeout)
	t.overtake = cancel
	return ctx, cancel, t.want
}

// overtaken: there is something newer than w to tell, and wake says so.
func (t *target) overtaken(w word) bool {
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
	conn, err := wire.NewClient(t.Addr, p.cfg.Credentials.ClientTLS(t.Subject), maxRetry)
	if err != nil {
		p.cfg.Log.Errorf("notify: %v cannot be told of host changes: %v", t.Subject, err)
		return
	}
	defer conn.Close()
	rpc := wire.NewNotificationClient(conn)
	var acked uint64
	pause, failures := p.cfg.Retry, 0
	for t.ctx.Err() == nil {
		var again <-chan time.Time // nil: nothing to do before the next update
		switch w, err := p.attempt(t, rpc, acked); {
		case t.ctx.Err() != nil:
			return
		case err == nil && w.version > acked:
			acked, pause, failures = w.version, p.cfg.Retry, 0
			if p.cfg.Acked != nil {
				p.cfg.Acked(t.Subject.Incarnation, w.update.Seq)
			}
		case err != nil && !t.overtaken(w):
			failures++
			if loud(failures) {
				p.cfg.Log.Warnf("notify: %v at %s has not acknowledged %v, again in %v: %s",
					t.Subject, t.Addr, w, pause, status.Convert(err).Message())
			}
			again = time.After(pause)
			pause = min(2*pause, maxRetry)
		}
		select {
		case <-t.ctx.Done():
		case <-t.wake:
			pause = p.cfg.Retry
		case <-again:
		}
	}
}

// loud tells whether the nth failure in a row is worth a line of the log: the second, the
// fourth, the eighth. Where a thousand are told at once, a first attempt may well come too late.
func loud(failures int) bool { return failures > 1 && failures&(failures-1) == 0 }

// attempt tells the target what it must know, if that is newer than the version that it has
// acknowledged. It waits for the connection within its time, so that the word travels at the moment
// the service is there.
func (p *Pusher) attempt(t *target, rpc wire.NotificationClient, acked uint64) (word, error) {
	ctx, cancel, w := t.begin(p.cfg.Timeout)
	defer cancel()
	if w.version <= acked {
		return w, nil
	}
	_, err := rpc.HostsUpdated(ctx, w.request(), grpc.WaitForReady(true))
	return w, err
}
