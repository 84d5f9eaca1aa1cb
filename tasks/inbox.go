package tasks

import (
	"context"
	"slices"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// resources are the worker's resources: the total amounts, and the free ones.
type resources struct{ total, free map[string]int64 }

// take takes those resources of an attempt that of selects, n times. If n is -1, it gives them
// back.
func (r *resources) take(a *attempt, n int64, of func(resource string) bool) {
	if a.lease == nil {
		return
	}
	for _, d := range a.lease.demand {
		if of(d.Name) {
			r.free[d.Name] -= n * d.Milli
		}
	}
}

// inbox holds the tasks that were sent to this worker.
type inbox struct {
	held    []*attempt           // in the order of arrival
	queued  []*attempt           // those of held that have not begun
	results []*taskspb.ResultFor // arguments of tasks that have not arrived yet
}

// add adds a task that has arrived.
func (b *inbox) add(push *taskspb.PushTask, l *lease) {
	if len(b.results) > 0 {
		b.claim(push)
	}
	a := &attempt{push: push, lease: l}
	b.held = append(b.held, a)
	b.queued = append(b.queued, a)
}

// claim adds the results that were sent before a task to the task.
func (b *inbox) claim(push *taskspb.PushTask) {
	b.results = slices.DeleteFunc(b.results, func(r *taskspb.ResultFor) bool {
		is := same(r.GetOf(), push.GetOf())
		if is {
			push.Results = append(push.Results, r.GetResult())
		}
		return is
	})
}

// drop removes a task that has not begun.
func (b *inbox) drop(a *attempt) {
	is := func(o *attempt) bool { return a == o }
	b.queued = slices.DeleteFunc(b.queued, is)
	b.held = slices.DeleteFunc(b.held, is)
}

// reports holds the results that the scheduler has not acknowledged.
type reports struct {
	unheard []*taskspb.TaskDone
	heard   uint64 // number of results, of all so far, that it has acknowledged
}

// acknowledge removes the results that the scheduler has acknowledged, and returns their attempts.
func (r *reports) acknowledge(heard uint64) (gone map[*taskspb.Attempt]bool) {
	if heard <= r.heard || heard-r.heard > uint64(len(r.unheard)) {
		return nil
	}
	n := heard - r.heard
	gone = make(map[*taskspb.Attempt]bool, n)
	for _, d := range r.unheard[:n] {
		gone[d.GetOf()] = true
	}
	r.unheard = slices.Delete(r.unheard, 0, int(n))
	r.heard = heard
	return gone
}

// departure is the state of a worker that leaves.
type departure struct {
	leaving bool
	silent  bool          // results are no longer sent, and no task begins
	idle    chan struct{} // closed when no task is held; created by leave
}

// lease is a group of which the scheduler may send tasks.
type lease struct {
	fn     *function
	demand queue.Demand
}

// attempt is a task that was sent to this worker.
type attempt struct {
	push    *taskspb.PushTask
	lease   *lease
	cancel  context.CancelFunc // nil: it has not begun
	ended   bool               // it has ended, and the scheduler may not know that
	stopped bool               // it was asked to stop: its result is not wanted
	waits   int                // number of calls in which its function waits for tasks; above 0, it has lent its processors
}
