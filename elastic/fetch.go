package elastic

import (
	"context"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	fetchReports = 5 * time.Second // interval of progress reports during a fetch
	fetchedCount = ^uint64(0)      // Count of the snapshotID of a fetched state; no save uses it
	bytesPerMega = 1e6
)

// arrive enters the first world, after it has fetched the state if possible. synced means that it
// has also synchronised.
func (r *runner) arrive() (synced bool, _ error) {
	if at, err := r.catchUp(); at != apart || err != nil {
		return at == synchronised, err
	}
	if err := r.fetch(); err != nil {
		return false, err
	}
	return false, r.worker.enterFirst(r.ctx, r.refetch())
}

// fetch sets the parts in memory to the newest commit of the other workers, if there is one. It
// only logs errors, because the sync sends everything that is missing.
func (r *runner) fetch() error {
	s, w := r.state, r.worker
	from, ok := w.meeting.(supplier)
	layout, memory := s.parts.memory()
	if !ok || len(memory) == 0 {
		return nil
	}
	w.doing.enter(line.Fetches)
	sources, err := from.sources(r.ctx)
	w.prepared() // from now on, arriving bytes show that the worker is alive
	if err != nil || len(sources) == 0 {
		return r.ctx.Err() // joining reports the reason
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
	if err := s.adopt(taken.Changed); err != nil {
		return err
	}
	w.log.Debugf("fetched commit %d: %.1f MB in %d rounds, %v", taken.Number, float64(taken.Bytes)/bytesPerMega, taken.Rounds, time.Since(began))
	return nil
}

// reportFetching makes the driver extend this worker's start timeout. It does not block.
func (w *Worker) reportFetching() {
	w.reports.Go(func() { _ = w.meeting.Report(w.reports.ctx, line.Fetching, 0, 0) })
}

// adopt saves the fetched state, and marks the save as different from the root's, so that a sync
// compares the two. It computes the checksums for that before the join, while no rank waits.
// changed marks the chunks that others have changed meanwhile; nil: unknown.
func (s *State) adopt(changed []bool) error {
	s.watch.begin()
	if changed != nil {
		s.watch.arm(changed)
	}
	if err := s.save(s.commits); err != nil {
		return err
	}
	s.saved.mark, s.saved.clean = snapshotID{Count: fetchedCount}, true
	for _, p := range s.parts.memoryIn(s.saved.Last().Blobs()) {
		p.Prepare()
	}
	return nil
}

// A worker that waits for its first world after it has fetched a commit, as spares do, repeatedly
// fetches what has changed since. What is still missing when the world begins is sent by the sync.

const (
	refetchPause = 50 * time.Millisecond // shortest pause between two rounds
	refetchShare = 4                     // pause after a round, as a multiple of its duration, so that it costs the others little
	refetchMost  = 5 * time.Second       // longest pause
)

// refetch repeatedly fetches what has changed, in a goroutine that uses the state, until stop is
// called. stop waits until it has ended. If the state was never fetched, refetch does nothing.
func (r *runner) refetch() (stop func()) {
	s := r.state
	from, ok := s.worker.meeting.(supplier)
	if !ok || s.saved.mark.Count != fetchedCount {
		return func() {}
	}
	ctx, cancel := context.WithCancel(r.ctx)
	var fetching sync.WaitGroup
	fetching.Go(func() {
		for pause := refetchPause; retry.Pause(ctx, pause) == nil; {
			began := time.Now()
			r.refetchOnce(ctx, from)
			pause = min(max(refetchPause, refetchShare*time.Since(began)), refetchMost)
		}
	})
	return func() {
		cancel()
		fetching.Wait()
	}
}

// refetchOnce takes the newest commit. If it is interrupted, the memory holds parts of two commits;
// the sync notices that by saved.clean, and goes back to the last commit that was taken completely.
func (r *runner) refetchOnce(ctx context.Context, from supplier) {
	s := r.state
	sources, err := from.sources(ctx)
	if err != nil || len(sources) == 0 {
		return
	}
	layout, memory := s.parts.memory()
	options := transfer.Options{}
	if s.saved.clean {
		for _, p := range s.parts.memoryIn(s.saved.Last().Blobs()) {
			options.Have = append(options.Have, p.Sums()...)
		}
	}
	s.saved.clean = false
	taken, err := transfer.Take(ctx, sources, layout, memory, options)
	if err != nil || ctx.Err() != nil {
		return
	}
	if err := s.adopt(nil); err != nil {
		return
	}
	s.worker.log.Debugf("fetched again, commit %d: %d bytes", taken.Number, taken.Bytes)
}
