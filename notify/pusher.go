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
	// callPatience exceeds the time in which the kernel gives up a dead connection, and the time in
	// which ten thousand workers on two cores call again: to dial those would delay them further.
	callPatience = 30 * time.Second
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

// Pusher delivers to every target its latest update and its latest loss: as the answer to the
// target's Hear, or, to one that does not call for 30 s, by a goroutine and a connection of its
// own, so that a target that hangs delays no other. Its methods are safe for concurrent use.
type Pusher struct {
	cfg   PusherConfig
	retry time.Duration // the pause after a first failed attempt; it doubles up to maxRetry
	// patience is how long a target has to call. Then it is dialed.
	patience time.Duration
	// acked, if not nil, is called when a target has acknowledged an update or a loss, with the
	// number of the latest update that it knows.
	acked func(incarnation string, seq uint64)
	// waits, if not nil, is called when a target's Hear begins to wait.
	waits func(incarnation string)
	wake  chan struct{} // of capacity 1: there are targets to start
	lines retry.Gate    // of what targets have not acknowledged
	done  chan struct{} // closed when Run ends
	last  encodedState

	mu      sync.Mutex
	targets map[string]*target // by incarnation
	fresh   []*target          // targets to dial that have no goroutine yet
}

// target is a worker with what it must be sent.
type target struct {
	Target
	wake chan struct{} // capacity 1: want has changed; nil: it was never dialed
	// ctx ends with Forget, and with Run if it is dialed.
	ctx    context.Context
	forget context.CancelFunc

	mu        sync.Mutex
	want      state
	acked     uint64             // version of want that it knows
	seq       uint64             // number of the update that it knows
	supersede context.CancelFunc // ends the current attempt
	dialed    bool               // it has a goroutine, or is to have one
	silent    bool               // it has not called in time: it is dialed at once until it calls
	call      *waitingCall       // that waits; nil: none does
	late      *time.Timer        // dials the target if it does not call; nil: it need not call, or is silent
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
	return &Pusher{
		cfg: cfg, retry: defaultRetry, patience: callPatience, wake: make(chan struct{}, 1), done: make(chan struct{}), targets: make(map[string]*target),
	}
}

// Run delivers until ctx ends and returns nil once the goroutines of all targets have ended. It
// must be called once.
func (p *Pusher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer p.expectNothing()
	defer close(p.done)
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
		switch {
		case ok && t.Addr == "": // it has called Hear before
			t.Target = to
		case ok && t.Target != to:
			t.end()
			ok = false
		}
		if !ok {
			t = p.add(to)
		}
		t.set(change, p)
	}
	signal(p.wake)
}

// add adds a target; the lock is held.
func (p *Pusher) add(to Target) *target {
	t := &target{Target: to}
	t.ctx, t.forget = context.WithCancel(context.Background())
	t.supersede = func() {}
	p.targets[to.Subject.Incarnation] = t
	return t
}

// dial has a goroutine deliver to a target that has not called in time.
func (p *Pusher) dial(t *target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.late = nil; t.ctx.Err() == nil && t.acked < t.want.version && t.call == nil && t.Addr != "" {
		t.silent = true
		p.startDialing(t)
		signal(p.wake)
	}
}

// startDialing gives a target a goroutine, unless it has one; the locks are held.
func (p *Pusher) startDialing(t *target) {
	if !t.dialed {
		t.dialed, t.wake = true, make(chan struct{}, 1)
		p.fresh = append(p.fresh, t)
	}
}

// Forget stops deliveries to a target, if there is one. It cancels a current attempt without
// waiting for it.
func (p *Pusher) Forget(incarnation string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t, ok := p.targets[incarnation]; ok {
		delete(p.targets, incarnation)
		t.end()
	}
}

// end forgets the target, and ends its call.
func (t *target) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endCall()
	t.expectNothing()
	t.forget()
}

// set applies change to what the target must know, and answers its call with it. The pusher's lock
// is held.
func (t *target) set(change func(*state) bool, p *Pusher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !change(&t.want) {
		return
	}
	t.want.version++
	t.supersede()
	signal(t.wake)
	if t.call != nil {
		t.call.answer(t.want)
		t.call = nil
	}
	if t.silent {
		p.startDialing(t)
	} else {
		p.expect(t)
	}
}

// expect sets the time for a target to call, until Run ends; the target's lock is held.
func (p *Pusher) expect(t *target) {
	select {
	case <-p.done:
		return
	default:
	}
	if t.late == nil {
		t.late = time.AfterFunc(p.patience, func() { p.dial(t) })
	}
}

// expectNothing has no target be dialed.
func (p *Pusher) expectNothing() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.targets {
		t.mu.Lock()
		t.expectNothing()
		t.mu.Unlock()
	}
}

// expectNothing has the target not be dialed; its lock is held.
func (t *target) expectNothing() {
	if t.late != nil {
		t.late.Stop()
		t.late = nil
	}
}

// begin returns what the target must know, whether it is due because the target does not know it,
// and a context that ends after the timeout or when that is superseded or known.
func (t *target) begin(timeout time.Duration) (ctx context.Context, cancel context.CancelFunc, w state, due bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.wake: // it refers to what is returned here
	default:
	}
	ctx, cancel = context.WithTimeout(t.ctx, timeout)
	t.supersede = cancel
	return ctx, cancel, t.want, t.want.version > t.acked
}

// rests reports whether the target's goroutine ends, because the target calls and knows all.
func (t *target) rests() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.silent && t.acked == t.want.version {
		t.dialed = false
	}
	return !t.dialed
}

// acknowledge notes what the target knows.
func (p *Pusher) acknowledge(t *target, w state) {
	t.mu.Lock()
	news, update := w.version > t.acked, w.update.Seq > t.seq
	if news {
		t.acked, t.seq = w.version, max(t.seq, w.update.Seq)
		t.supersede()
		signal(t.wake)
		if t.acked == t.want.version {
			t.expectNothing()
		}
	}
	t.mu.Unlock()
	if news && update && p.cfg.Delivered != nil {
		p.cfg.Delivered(time.Since(w.pushed))
	}
	if news && p.acked != nil {
		p.acked(t.Subject.Incarnation, w.update.Seq)
	}
}

// superseded reports whether the target must know something newer than w, or knows it. wake is then
// signalled.
func (t *target) superseded(w state) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.want.version > w.version || t.acked >= w.version
}

func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// serve is the goroutine of one target.
func (p *Pusher) serve(run context.Context, t *target) {
	defer context.AfterFunc(run, t.forget)()
	conn, err := wire.NewClientBy(p.cfg.Network.Dial, t.Addr, p.cfg.Credentials.ClientTLS(t.Subject), maxRetry)
	if err != nil {
		p.cfg.Log.Errorf("notify: %v cannot be notified: %v", t.Subject, err)
		return
	}
	defer conn.Close()
	rpc := notifypb.NewNotificationClient(conn)
	pause, failures := p.retry, 0
	for t.ctx.Err() == nil {
		var again <-chan time.Time // nil: nothing to repeat
		switch w, due, err := p.attempt(t, rpc); {
		case t.ctx.Err() != nil:
			return
		case err == nil && due:
			pause, failures = p.retry, 0
			p.acknowledge(t, w)
		case err != nil && !t.superseded(w):
			failures++
			if loud(failures) {
				p.tell(t, w, pause, err)
			}
			again = time.After(pause)
			pause = min(2*pause, maxRetry)
		}
		if t.rests() {
			return
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

// attempt sends the target what it must know if it does not know it, which is due then. It waits
// for a connection within its timeout, so that it succeeds as soon as the service is up.
func (p *Pusher) attempt(t *target, rpc notifypb.NotificationClient) (w state, due bool, err error) {
	ctx, cancel, w, due := t.begin(p.cfg.Timeout)
	defer cancel()
	if due {
		_, err = rpc.HostsUpdated(ctx, w.request(), grpc.WaitForReady(true))
	}
	return w, due, err
}
