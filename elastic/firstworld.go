package elastic

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// InitOption configures Init. There are no options yet.
type InitOption struct{}

// firstWorld is the entry of a worker into its first world, which only enterFirst makes. Init calls
// enterFirst if the job has no world yet; otherwise Run does, or a call of Group before Run.
type firstWorld struct {
	mu   sync.Mutex // held while entering
	stop func()     // stops the reports of prepare; nil: prepare was not called

	placed context.Context // ends when the worker is first given a place in a world
	place  func()          // ends placed

	none atomic.Pointer[collective.Group] // the group that Group returns while train runs in no world; nil: it does not
}

// refuses returns the error of collective operations while train runs in no world.
func (f *firstWorld) refuses() error {
	return collective.Barrier(context.Background(), f.none.Load())
}

// stayOut leaves the entry into the first world to Run or Group. Until then the worker has the rank
// of the trial assignment for which the process was started.
func (w *Worker) stayOut(env plan.Worker) {
	slots := make([]plan.Slot, max(env.Size, env.Slot.Rank+1))
	slots[env.Slot.Rank] = env.Slot
	w.member.Store(&membership{world: line.World{World: plan.World{Slots: slots}}, slot: env.Slot, unwatch: func() {}})
	w.prepare()
}

// prepare reports that the worker prepares until it joins.
func (w *Worker) prepare() {
	ctx, stop := context.WithCancel(w.reports.ctx)
	w.first.stop = stop
	w.reports.Go(func() {
		line.Prepare(ctx, func(ctx context.Context) {
			_ = w.meeting.Report(ctx, line.Fetching, 0, 0) // ignored on failure: the worker still joins
		})
	})
}

// prepared stops the reports that prepare started.
func (w *Worker) prepared() {
	if w.first.stop != nil {
		w.first.stop()
	}
}

// enterFirst enters the first world, unless the worker has entered it already. It calls called once
// the driver has answered the join.
func (w *Worker) enterFirst(ctx context.Context, called func()) error {
	defer called()
	w.first.mu.Lock()
	defer w.first.mu.Unlock()
	if p := w.member.Load(); p != nil && p.group != nil {
		return nil
	}
	w.prepared()
	return w.enter(ctx, called, line.Joining{})
}

// firstGroup enters the first world, for a program that uses collective operations before Run. If
// that fails, the operations of the returned group fail with the error.
func (w *Worker) firstGroup() *collective.Group {
	if err := w.enterFirst(w.reports.ctx, func() {}); err != nil {
		none := collective.Local(1)[0]
		none.Abort(err)
		return none
	}
	return w.group()
}

// trains reports whether the job has a world. Errors count as no: joining reports why.
func (d *driven) trains(ctx context.Context) bool {
	world, err := d.look(ctx)
	return err == nil && world.Generation > 0
}
