package notify

import (
	"sync"
	"time"
)

// PusherConfig configures a Pusher.
type PusherConfig struct {
	// Update and Loss tell workers, by incarnation, what they must know. What they tell may be lost
	// on its way. They must not block, and must not call the pusher.
	Update func(workers []string, u Update)
	Loss   func(workers []string, l Loss)
	// Delivered is called with the time from Push until a worker has been told of the update. It
	// must not block. Nil: it is not called.
	Delivered func(after time.Duration)
}

// Pusher keeps for each worker its latest update and its latest loss, until it has been told of
// them. Its methods are safe for concurrent use, and none blocks.
type Pusher struct {
	cfg PusherConfig

	mu      sync.Mutex
	targets map[string]*target // by incarnation
}

// target is what a worker must know and, by what its launcher says, knows.
type target struct {
	update, known Update
	loss          Loss
	knownLoss     Known
	pushed        time.Time // when update was set
}

// Known is the loss of which a worker was told.
type Known struct {
	Generation uint64
	Ranks      int
}

// NewPusher returns a pusher without targets.
func NewPusher(cfg PusherConfig) *Pusher {
	return &Pusher{cfg: cfg, targets: make(map[string]*target)}
}

// of returns a worker's target, which may be new; the lock is held.
func (p *Pusher) of(worker string) *target {
	t := p.targets[worker]
	if t == nil {
		t = &target{}
		p.targets[worker] = t
	}
	return t
}

// Push sets the update of each worker, and tells them. An update whose number does not exceed a
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

// PushLoss sets the loss of each worker, and tells them. A loss that does not supersede a worker's
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

// Heard takes that a worker was told of the update seq and of a loss. With again, the worker is
// told of what it lacks once more.
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

// lacksLoss reports whether the worker was not told of its loss.
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
