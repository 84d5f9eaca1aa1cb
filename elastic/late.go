package elastic

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/plan"
)

// InitOption configures Init.
type InitOption struct{}

// Late is accepted and changes nothing: [Init] decides by itself whether the worker enters its
// first world there or in [Run].
//
// Deprecated: no program needs it.
var Late = InitOption{}

// firstWorld is the entry of a worker into its first world, by enterFirst alone: Init calls it
// where the job has no world yet, otherwise Run does, or a call of Group before it.
type firstWorld struct {
	mu      sync.Mutex // held while entering
	outside bool       // in no world yet; guarded by mu once Init has returned
	stop    func()     // ends the reports of prepare; nil: there are none

	none atomic.Pointer[collective.Group] // the group of a worker whose train runs before; nil: it does not
}

// refuses returns the error of a collective operation in no world.
func (f *firstWorld) refuses() error {
	return collective.Barrier(context.Background(), f.none.Load())
}

// preparing is a meeting whose driver may have a world already.
type preparing interface {
	// trains reports whether the job has a world. Errors count as no: joining reports why.
	trains(ctx context.Context) bool
}

// stayOut leaves it to Run or Group to enter the first world. Until then the worker has the place
// of the trial assignment for which the process was started.
func (w *Worker) stayOut(env plan.Worker) {
	slots := make([]plan.Slot, max(env.Size, env.Slot.Rank+1))
	slots[env.Slot.Rank] = env.Slot
	w.member.Store(&membership{world: rendezvous.World{World: plan.World{Slots: slots}}, slot: env.Slot, unwatch: func() {}})
	w.prepare()
}

const (
	prepareReports = time.Second      // interval of the reports of a worker between Init and Run
	prepareBound   = 10 * time.Minute // until when they are made: as long as the others wait for slots
)

// prepare has the driver extend the start timeout until the worker joins: as long as it is in no
// world, nobody else sees whether it is alive.
func (w *Worker) prepare() {
	ctx, stop := context.WithTimeout(w.reports.ctx, prepareBound)
	w.first.stop = stop
	w.reports.Go(func() {
		tick := time.NewTicker(prepareReports)
		defer tick.Stop()
		for {
			_ = w.meeting.Report(ctx, rendezvous.Fetching, 0, 0) // a failure is not the worker's: it still joins
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
}

// prepared ends prepare.
func (w *Worker) prepared() {
	if w.first.stop != nil {
		w.first.stop()
	}
}

// enterFirst enters the first world, unless that has happened. It calls called once the driver has
// answered the join.
func (w *Worker) enterFirst(ctx context.Context, called func()) error {
	defer called()
	w.first.mu.Lock()
	defer w.first.mu.Unlock()
	if !w.first.outside {
		return nil
	}
	w.prepared()
	if err := w.enter(ctx, called, rendezvous.Joining{}); err != nil {
		return err
	}
	w.first.outside = false
	return nil
}

// isOutside reports whether the worker has been in no world yet.
func (w *Worker) isOutside() bool {
	w.first.mu.Lock()
	defer w.first.mu.Unlock()
	return w.first.outside
}

// firstGroup enters the first world for a program that computes together with others before Run. If
// that fails, the operations of the group fail with the error.
func (w *Worker) firstGroup() *collective.Group {
	if err := w.enterFirst(w.reports.ctx, func() {}); err != nil {
		none := collective.Local(1)[0]
		none.Abort(err)
		return none
	}
	return w.group()
}

// supplier is a meeting through which workers fetch each other's commits.
type supplier interface {
	// give lets other workers have what is supplied; nil ends it.
	give(*transfer.Supply)
	// sources returns some workers that may have a commit.
	sources(ctx context.Context) ([]transfer.Source, error)
}

const (
	lookBound    = 5 * time.Second // timeout of asking the driver for sources
	mostSources  = 8               // limits the workers that one fetch asks
	fetchReports = 5 * time.Second // interval of progress reports during a fetch
	fetchedCount = ^uint64(0)      // Count of the imageID of a fetched state; no save uses it
	bytesPerMega = 1e6
)

// arrive enters the first world after fetching the state, if possible. synced: it has synchronised
// too.
func (r *runner) arrive() (synced bool, _ error) {
	if at, err := r.rehearse(); at != apart || err != nil {
		return at == synchronised, err
	}
	if err := r.fetch(); err != nil {
		return false, err
	}
	return false, r.worker.enterFirst(r.ctx, r.follow())
}

// fetch sets the parts in memory to the newest commit of the other workers, if there is one. Errors
// are only logged, because the sync sends everything that is missing.
func (r *runner) fetch() error {
	s, w := r.state, r.worker
	from, ok := w.meeting.(supplier)
	layout, memory := s.parts.memory()
	if !ok || len(memory) == 0 {
		return nil
	}
	w.doing.enter(rendezvous.Fetches)
	look, cancel := context.WithTimeout(r.ctx, lookBound)
	sources, err := from.sources(look)
	cancel()
	w.prepared() // from now on the bytes that arrive show that the worker is alive
	if err != nil || len(sources) == 0 {
		return r.ctx.Err() // joining reports why
	}
	w.reportFetching()
	began := time.Now()
	lastReport := began
	taken, err := transfer.Take(r.ctx, sources, layout, memory, transfer.Options{
		Progress: func(have, of int64) {
			if now := time.Now(); now.Sub(lastReport) >= fetchReports {
				lastReport = now
				w.log.Infof("fetching the state: %.0f of %.0f MB", float64(have)/bytesPerMega, float64(of)/bytesPerMega)
				w.reportFetching()
			}
		},
		Rejected: func(_ int, err error) { w.log.Debugf("a worker does not supply the state: %v", err) },
	})
	if err != nil {
		w.log.Infof("fetching the state failed, so the sync sends all of it: %v", err)
		if err := s.Restore(); err != nil {
			return err
		}
		return r.ctx.Err()
	}
	s.watch.begin()
	if taken.Changed != nil {
		s.watch.arm(taken.Changed)
	}
	if err := s.save(s.commits); err != nil {
		return err
	}
	s.adopt()
	w.log.Debugf("fetched commit %d: %.1f MB in %d rounds, %v", taken.Number, float64(taken.Bytes)/bytesPerMega, taken.Rounds, time.Since(began))
	return nil
}

// reportFetching makes the driver extend the start timeout. It does not block.
func (w *Worker) reportFetching() {
	w.reports.Go(func() { _ = w.meeting.Report(w.reports.ctx, rendezvous.Fetching, 0, 0) })
}

// adopt marks the fetched save as different from the root's, so that a sync compares the two. It
// computes the checksums for that before the join, while no rank waits.
func (s *State) adopt() {
	s.saved.mark, s.saved.clean = imageID{Count: fetchedCount}, true
	for _, p := range s.parts.memoryIn(s.saved.Last().Blobs()) {
		p.Prepare()
	}
}

// supply lets other workers fetch this state's commits.
func (s *State) supply() {
	to, ok := s.worker.meeting.(supplier)
	layout, memory := s.parts.memory()
	if !ok || len(memory) == 0 {
		return
	}
	if s.feed == nil {
		s.feed = s.newFeed()
	}
	to.give(&transfer.Supply{Feed: s.feed, Newest: func() *transfer.Commit {
		number, blobs := s.saved.Lend()
		if blobs == nil {
			return nil
		}
		return &transfer.Commit{Number: number, Layout: layout, Blobs: s.parts.memoryIn(blobs)}
	}})
}

// withdraw undoes supply.
func (s *State) withdraw() {
	if to, ok := s.worker.meeting.(supplier); ok {
		to.give(nil)
	}
	if s.feed != nil {
		s.feed.End()
		s.feed = nil
	}
}

func (d *driven) give(s *transfer.Supply) { d.supply.Store(s) }

// visited serves a connection of another worker.
func (d *driven) visited(conn net.Conn) {
	if err := transfer.Serve(conn, d.supply.Load); err != nil {
		ownLog().Debugf("elastic: serving the state to another worker: %v", err)
	}
}

func (d *driven) trains(ctx context.Context) bool {
	look, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	world, err := d.Look(look)
	return err == nil && world.Generation > 0
}

func (d *driven) sources(ctx context.Context) ([]transfer.Source, error) {
	world, err := d.Look(ctx)
	if err != nil {
		return nil, err
	}
	addrs := world.DataAddrs()
	var sources []transfer.Source
	for _, rank := range rand.Perm(len(addrs)) {
		if len(sources) < mostSources {
			sources = append(sources, func(ctx context.Context) (net.Conn, error) {
				return d.endpoint.Visit(ctx, world.Generation, world.Key, addrs[rank])
			})
		}
	}
	return sources, nil
}
