// Package notify informs workers of changed hosts and of dead ranks: a service in every worker
// keeps the latest notification, and the driver's pusher delivers it, as the answer to a call that
// the worker makes by its connection to the driver, or by a connection to the service.
//
// It is level-triggered: only the update with the highest sequence number and the loss of the
// latest generation count. Superseded notifications need not arrive, and repeated ones have no
// effect.
package notify

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/plan"
)

// Update is a change of the hosts relative to a world. The zero Update is the one before the first.
type Update struct {
	// Seq increases with every update of a job.
	Seq uint64
	// Change is how the wanted slots differ from the world. None: an earlier update was reverted
	// and the world can stay.
	Change plan.Change
	// Generation is the generation of the world.
	Generation uint64
}

// Loss is the loss of ranks of a world, which cannot continue. The zero Loss is the one before the
// first.
type Loss struct {
	// Generation is the generation of the world.
	Generation uint64
	// Ranks are the ranks whose processes are known to be dead. The slice is read-only. None: the
	// driver has given up the world because all of its ranks wait for each other.
	Ranks []int
}

// supersedes reports whether l replaces old: it is of a later world, or has more dead ranks of the
// same one.
func (l Loss) supersedes(old Loss) bool {
	if l.Generation != old.Generation {
		return l.Generation > old.Generation
	}
	return len(l.Ranks) > len(old.Ranks)
}

// Service receives notifications in a worker. Its methods are safe for concurrent use.
type Service struct {
	credentials *identity.Credentials
	latest      atomic.Pointer[Update]
	// Stacks, if not nil, is asked for the stacks of the worker, as JSON of the package
	// stacks, in place of this process: the worker is another one. It is set before Serve,
	// and called by many goroutines.
	Stacks func(ctx context.Context, mostBytes int) ([]byte, error)

	mu   sync.Mutex
	loss Loss
	news chan struct{} // closed and replaced when loss or latest changes
}

// NewService returns a service without notifications. It starts nothing.
func NewService(c *identity.Credentials) *Service {
	return &Service{credentials: c, news: make(chan struct{})}
}

// Serve receives notifications on ln, from the job's driver only, until ctx ends. It closes ln and
// must be called once. It returns when all handlers have: nil after the end of ctx, or the error of
// ln.
func (s *Service) Serve(ctx context.Context, ln *identity.Listener) error {
	register := func(r grpc.ServiceRegistrar) { notifypb.RegisterNotificationServer(r, handler{s: s}) }
	if err := wire.Serve(ctx, ln, s.credentials.ServerTLS(identity.Driver), register, func() {}); err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	return nil
}

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

// told closes the channel of Loss; the lock is held.
func (s *Service) told() {
	close(s.news)
	s.news = make(chan struct{})
}

// hearLoss stores l if it supersedes the stored loss.
func (s *Service) hearLoss(l Loss) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.supersedes(s.loss) {
		s.loss = l
		s.told()
	}
}

// hear stores u if it is newer than the stored update.
func (s *Service) hear(u Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.latest.Load(); u.Seq != 0 && (old == nil || old.Seq < u.Seq) {
		s.latest.Store(&u)
		s.told()
	}
}

// Hear receives notifications from the driver by a connection of the worker, until ctx ends or the
// driver refuses to answer, as one of an older version does: that sends them to Serve. call makes a
// call of the connection, and repeats it while the driver is unreachable.
func (s *Service) Hear(ctx context.Context, call func(context.Context, string, func(context.Context, grpc.ClientConnInterface) error) error) {
	for {
		var news *notifypb.HostsUpdatedRequest
		req := s.known()
		err := call(ctx, "hear", func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			news, err = notifypb.NewHearingClient(conn).Hear(ctx, req)
			return err
		})
		if err == nil {
			err = s.take(news)
		}
		if err != nil {
			return
		}
	}
}

// known returns what the service has heard.
func (s *Service) known() *notifypb.HearRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &notifypb.HearRequest{Seq: s.Latest().Seq, LostGeneration: s.loss.Generation, LostRanks: uint32(len(s.loss.Ranks))}
}

// take stores what is new of a notification.
func (s *Service) take(req *notifypb.HostsUpdatedRequest) error {
	if c := req.GetChange(); c&^uint32(plan.Added|plan.Removed) != 0 {
		return fmt.Errorf("%#x is not a valid change", c)
	}
	s.hear(Update{Seq: req.GetSeq(), Change: plan.Change(req.GetChange()), Generation: req.GetGeneration()})
	loss := Loss{Generation: req.GetLostGeneration(), Ranks: make([]int, len(req.GetLostRanks()))}
	for i, r := range req.GetLostRanks() {
		loss.Ranks[i] = int(r)
	}
	s.hearLoss(loss)
	return nil
}

// handler implements the gRPC service, apart from Service's own methods.
type handler struct {
	notifypb.UnimplementedNotificationServer
	s *Service
}

func (h handler) HostsUpdated(_ context.Context, req *notifypb.HostsUpdatedRequest) (*notifypb.HostsUpdatedReply, error) {
	if err := h.s.take(req); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &notifypb.HostsUpdatedReply{}, nil
}
