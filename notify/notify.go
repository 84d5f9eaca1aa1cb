// Package notify tells workers that the hosts have changed, and who of their world is dead: a
// service in every worker that keeps the latest word, and the driver's side that brings it there.
//
// It is level-triggered. What counts is the update with the highest sequence number, and the loss
// of the latest generation; one that was overtaken is never missed, and one that comes twice does
// nothing.
package notify

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

// Update says that the hosts differ from a world's. The zero Update is the one before the first.
type Update struct {
	// Seq grows with every update of a job.
	Seq uint64
	// Change is how the hosts that are wanted now differ from the world. None: an earlier update is
	// overtaken, and the world may stay as it is.
	Change plan.Change
	// Generation is the world's.
	Generation uint64
}

// Loss says that a world cannot go on. The zero Loss is the one before the first.
type Loss struct {
	// Generation is the world's.
	Generation uint64
	// Ranks are those of its ranks whose processes are known to be dead; nobody changes the slice.
	// None: the driver has given the world up, since all of its ranks waited for each other.
	Ranks []int
}

// overtakes tells whether l is to be known where old is known already: it is of a later world, or
// names more dead of the same.
func (l Loss) overtakes(old Loss) bool {
	if l.Generation != old.Generation {
		return l.Generation > old.Generation
	}
	return len(l.Ranks) > len(old.Ranks)
}

// Service is the worker's side. Its methods may be called from several goroutines at once.
type Service struct {
	credentials *identity.Credentials
	latest      atomic.Pointer[Update]

	mu   sync.Mutex
	loss Loss
	lost chan struct{} // closed, and made anew, when loss changes
}

// NewService returns a service that has heard of nothing. It starts nothing.
func NewService(c *identity.Credentials) *Service {
	return &Service{credentials: c, lost: make(chan struct{})}
}

// Serve takes updates on ln, which it closes, from the driver of the job and from nobody else,
// until ctx ends; it is called once. It returns when all handlers have: nil after the end of ctx,
// or an error when ln fails.
func (s *Service) Serve(ctx context.Context, ln net.Listener) error {
	register := func(r grpc.ServiceRegistrar) { wire.RegisterNotificationServer(r, handler{s: s}) }
	if err := wire.Serve(ctx, ln, s.credentials.ServerTLS(identity.Driver), register, func() {}); err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	return nil
}

// Latest returns the update with the highest number heard so far, the zero Update before any. It
// never blocks and is cheap enough for every step of a training loop.
func (s *Service) Latest() Update {
	if u := s.latest.Load(); u != nil {
		return *u
	}
	return Update{}
}

// Loss returns the latest loss heard of, the zero Loss before any, and a channel that is closed
// when there is a later one. It never blocks.
func (s *Service) Loss() (Loss, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loss, s.lost
}

// hearLoss keeps l if it overtakes what is known.
func (s *Service) hearLoss(l Loss) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.overtakes(s.loss) {
		s.loss = l
		close(s.lost)
		s.lost = make(chan struct{})
	}
}

// hear keeps u if it is newer than what is known.
func (s *Service) hear(u Update) {
	for {
		old := s.latest.Load()
		if u.Seq == 0 || old != nil && old.Seq >= u.Seq || s.latest.CompareAndSwap(old, &u) {
			return
		}
	}
}

// handler keeps the methods of the wire out of Service's.
type handler struct {
	wire.UnimplementedNotificationServer
	s *Service
}

func (h handler) HostsUpdated(_ context.Context, req *wire.HostsUpdatedRequest) (*wire.HostsUpdatedReply, error) {
	if c := req.GetChange(); c&^uint32(plan.Added|plan.Removed) != 0 {
		return nil, status.Errorf(codes.InvalidArgument, "%#x is no change", c)
	}
	h.s.hear(Update{Seq: req.GetSeq(), Change: plan.Change(req.GetChange()), Generation: req.GetGeneration()})
	loss := Loss{Generation: req.GetLostGeneration(), Ranks: make([]int, len(req.GetLostRanks()))}
	for i, r := range req.GetLostRanks() {
		loss.Ranks[i] = int(r)
	}
	h.s.hearLoss(loss)
	return &wire.HostsUpdatedReply{}, nil
}
