package notify

import (
	"sync"
	"time"
)

// PusherConfig configures a Pusher.
type PusherConfig struct {
	// Update and Loss send workers, given by incarnation, what they must know. The messages may be
	// lost on their way. The functions must not block, and must not call the pusher.
	Update func(workers []string, u Update)
	Loss   func(workers []string, l Loss)
	// Delivered is called with the time from Push until a worker has acknowledged the update. It
	// must not block. Nil: it is not called.
	Delivered func(after time.Duration)
}

// Pusher keeps for each worker its latest update and its latest loss, and repeats them until the
// worker has acknowledged them. Its methods are safe for concurrent use, and none blocks.
type Pusher struct {
	cfg PusherConfig

	mu      sync.Mutex
	targets map[string]*target // by incarnation
}

// target is what a worker must know and what, according to its launcher, it knows.
type target struct {
	update, known Update
	loss          Loss
	knownLoss     Known
	pushed        time.Time // when update was set
}

// Known identifies a loss that was sent to a worker.
type Known struct {
	Generation uint64
	Ranks      int
}

// NewPusher returns a pusher that knows no workers.
func NewPusher(cfg PusherConfig) *Pusher {
	return &Pusher{cfg: cfg, targets: make(map[string]*target)}
}

// of returns a worker's target, and creates it if necessary. The caller holds the lock.
func (p *Pusher) of(worker string) *target {
	t := p.targets[worker]
	if t == nil {
		t = &target{}
		p.targets[worker] = t
	}
	return t
}

// Push sets the update of each worker and sends it. An update whose number does not exceed a
// worker's last one is ignored for that worker.
func (p *Pusher) Push(workers []string, u Update) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	newer := make([]string, 0, len(workers))
	for _, w := range workers {
		if t := p.of(w); u.Seq > t.update.Seq {
			t.update, t.pushed = u, now
			newer = append(newer, w)
		}
	}
	if len(newer) > 0 {
		p.cfg.Update(newer, u)
	}
}

// PushLoss sets the loss of each worker and sends it. A loss that does not supersede a worker's
// last one is ignored for that worker.
func (p *Pusher) PushLoss(workers []string, l Loss) {
	p.mu.Lock()
	defer p.mu.Unlock()
	newer := make([]string, 0, len(workers))
	for _, w := range workers {
		if t := p.of(w); l.Supersedes(t.loss) {
			t.loss = l
			newer = append(newer, w)
		}
	}
	if len(newer) > 0 {
		p.cfg.Loss(newer, l)
	}
}

// Heard records that a worker has received the update seq and a loss. If again is set, Heard sends
// what the worker still lacks once more.
func (p *Pusher) Heard(worker string, seq uint64, loss Known, again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[worker]
	if t == nil {
		return
	}
	if seq >= t.update.Seq && t.known.Seq < t.update.Seq {
		t.known = t.update
		if p.cfg.Delivered != nil {
			p.cfg.Delivered(time.Since(t.pushed))
		}
	}
	t.knownLoss = loss
	if again && seq < t.update.Seq {
		p.cfg.Update([]string{worker}, t.update)
	}
	if again && t.lacksLoss() {
		p.cfg.Loss([]string{worker}, t.loss)
	}
}

// lacksLoss reports whether the worker has not received its loss.
func (t *target) lacksLoss() bool {
	return t.loss.Generation > t.knownLoss.Generation ||
		t.loss.Generation == t.knownLoss.Generation && len(t.loss.Ranks) > t.knownLoss.Ranks
}

// Forget forgets a worker.
func (p *Pusher) Forget(worker string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.targets, worker)
}
