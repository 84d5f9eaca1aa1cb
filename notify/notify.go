// Package notify informs workers of changed hosts and of dead ranks. A Service in every worker
// keeps the latest notifications. The driver's Pusher sends them, and keeps what each worker must
// know until the worker's launcher acknowledges that the worker has received it.
//
// It is level-triggered: only the update with the highest sequence number and the loss of the
// latest generation count. Superseded notifications need not arrive, and repeated ones have no
// effect.
package notify

import (
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/plan"
)

// Update is a change of the hosts relative to a world. The zero Update precedes the first.
type Update struct {
	// Seq increases with every update of a job.
	Seq uint64
	// Change is how the wanted slots differ from those of the world. None: an earlier update was
	// reverted and the world can stay.
	Change plan.Change
	// Generation is the generation of the world.
	Generation uint64
}

// Loss is the loss of ranks of a world, which cannot continue. The zero Loss precedes the first.
type Loss struct {
	// Generation is the generation of the world.
	Generation uint64
	// Ranks are the ranks whose processes are known to be dead. The slice is read-only. None: the
	// driver has given up the world because all of its ranks wait for each other.
	Ranks []int
}

// Supersedes reports whether l replaces old: l concerns a later world, or the same world with more
// dead ranks.
func (l Loss) Supersedes(old Loss) bool {
	if l.Generation != old.Generation {
		return l.Generation > old.Generation
	}
	return len(l.Ranks) > len(old.Ranks)
}

// Service keeps the notifications of a worker. Its methods are safe for concurrent use.
type Service struct {
	latest atomic.Pointer[Update]

	mu   sync.Mutex
	loss Loss
	news chan struct{} // closed and replaced when loss or latest changes
}

// NewService returns a service without notifications. It starts nothing.
func NewService() *Service { return &Service{news: make(chan struct{})} }

// Latest returns the update with the highest number so far, or the zero Update. It never blocks and
// is cheap enough for every step of a training loop.
func (s *Service) Latest() Update {
	if u := s.latest.Load(); u != nil {
		return *u
	}
	return Update{}
}

// Loss returns the latest loss, or the zero Loss, and a channel that is closed when a later one, or
// a later update, arrives. It never blocks.
func (s *Service) Loss() (Loss, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loss, s.news
}

// told closes the channel that Loss returned. The caller holds the lock.
func (s *Service) told() {
	close(s.news)
	s.news = make(chan struct{})
}

// Lose stores a loss, and returns true, if it supersedes the stored one.
func (s *Service) Lose(l Loss) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	newer := l.Supersedes(s.loss)
	if newer {
		s.loss = l
		s.told()
	}
	return newer
}

// Update stores an update, and returns true, if it is newer than the stored one.
func (s *Service) Update(u Update) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.latest.Load()
	newer := u.Seq != 0 && (old == nil || old.Seq < u.Seq)
	if newer {
		s.latest.Store(&u)
		s.told()
	}
	return newer
}
