package elastic

import (
	"context"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
)

// A worker that waits at the door for its first world, as spares do, follows the commits of those
// that train: it fetches again what has changed since it fetched last. What a world lacks when it
// begins, the sync sends.

const (
	followPause = 50 * time.Millisecond // shortest time between two rounds
	followShare = 4                     // a round is followed by a pause of so many times its time, so that it costs the others little
	followMost  = 5 * time.Second       // longest pause
)

// follow follows the commits of the other workers until stop is called, which waits for the end. It
// uses the state meanwhile. A state that was never fetched is not followed.
func (r *runner) follow() (stop func()) {
	s := r.state
	from, ok := s.worker.meeting.(supplier)
	if !ok || s.saved.mark.Count != fetchedCount {
		return func() {}
	}
	ctx, cancel := context.WithCancel(r.ctx)
	var following sync.WaitGroup
	following.Go(func() {
		pause := time.NewTimer(followPause)
		defer pause.Stop()
		for {
			select {
			case <-pause.C:
			case <-ctx.Done():
				return
			}
			began := time.Now()
			r.followOnce(ctx, from)
			pause.Reset(min(max(followPause, followShare*time.Since(began)), followMost))
		}
	})
	return func() {
		cancel()
		following.Wait()
	}
}

// followOnce takes the newest commit. If it is cut short, the memory holds parts of two commits;
// the sync notices by saved.clean, and goes back to the last one that was taken whole.
func (r *runner) followOnce(ctx context.Context, from supplier) {
	s := r.state
	look, cancel := context.WithTimeout(ctx, lookBound)
	sources, err := from.sources(look)
	cancel()
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
	s.watch.begin()
	if err := s.save(s.commits); err != nil {
		return
	}
	s.adopt()
	s.worker.log.Debugf("followed to commit %d: %d bytes", taken.Number, taken.Bytes)
}
