package queue

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// earlier counts the tasks that were restored from an earlier queue.
type earlier struct {
	suspended int // tasks that wait for Resume
	restored  int // restored tasks that are not over yet, whose clients may have the results already
}

// unsuspend records that a task does not, or no longer, wait for Resume.
func (e *earlier) unsuspend(t *task) {
	if t.suspended {
		t.suspended = false
		e.suspended--
	}
}

// settle records that a task is over.
func (e *earlier) settle(t *task) {
	if t.restored {
		t.restored = false
		e.restored--
	}
}

// Suspended returns the number of tasks that wait for Resume.
func (e *earlier) Suspended() int { return e.suspended }

// Saved is what another queue must know to continue a task, apart from its Release.
type Saved struct {
	Task
	Result  Result // its State is the state of the task
	Tries   int
	Killers []string
}

// Saved returns what another queue must know to continue a task; false: the task is unknown.
func (q *Queue) Saved(id ID) (Saved, bool) {
	t := q.tasks[id]
	if t == nil {
		return Saved{}, false
	}
	s := Saved{Task: t.Task, Tries: int(t.tries)}
	if t.more != nil {
		s.Killers = t.killers
		if t.state.Over() {
			s.Result = t.result
		} else if t.old != nil { // it runs again only to make its result
			s.Result = Result{State: Succeeded, Object: t.old.id, Size: t.old.size}
		}
	}
	return s, true
}

// AreDefaults reports whether the options equal those of a task that sets none.
func AreDefaults(o *Options) bool {
	return o == &defaults || o.Prefer == "" && o.Pin == 0 && len(o.Needs) == 0 && len(o.Objects) == 0 && o.Retries == DefaultRetries && !o.Again && o.TimeLimit == 0
}

// All returns all tasks in the order in which they arrived.
func (q *Queue) All() []ID {
	type placed struct {
		ID
		order uint64
	}
	all := make([]placed, 0, len(q.tasks))
	for id, t := range q.tasks {
		all = append(all, placed{id, t.order})
	}
	slices.SortFunc(all, func(a, b placed) int { return cmp.Compare(a.order, b.order) })
	ids := make([]ID, len(all))
	for i, p := range all {
		ids[i] = p.ID
	}
	return ids
}

// Released returns the given tasks whose clients no longer need the results.
func (q *Queue) Released(ids []ID) (all []ID) {
	for _, id := range ids {
		if t := q.tasks[id]; t != nil && t.released {
			all = append(all, id)
		}
	}
	return all
}

// Objects returns all stored values that are needed, unsorted.
func (q *Queue) Objects() []Object {
	return slices.Collect(maps.Keys(q.objects))
}

// Restore adds a task of an earlier queue. It is suspended until Resume, or until a worker joins
// that has an attempt of it. Tasks must be restored in the order in which they arrived.
func (q *Queue) Restore(s Task) {
	if q.tasks[s.ID] == nil {
		t := q.insert(s)
		t.suspended, t.restored = true, true
		q.suspended++
		q.earlier.restored++
	}
}

// RestoreOver records the result of a restored task that was over.
func (q *Queue) RestoreOver(now time.Time, id ID, r Result) {
	t := q.tasks[id]
	switch {
	case t == nil || !r.State.Over():
	case t.suspended:
		q.unsuspend(t)
		q.finish(now, t, r)
	case t.state == Succeeded && r.State == Succeeded && t.result.Size > 0 && r.Size > 0 && t.result.Object != r.Object:
		q.unmade(t) // it had run again
		t.result = r
		q.made(t, r)
	}
}

// RestoreLosses records how often a restored task has run again, and which workers were lost while
// they ran it.
func (q *Queue) RestoreLosses(id ID, tries int, killers []string) {
	if t := q.tasks[id]; t != nil {
		t.tries, t.deaths = uint8(min(tries, 255)), uint8(min(len(killers), 255))
		t.rest().killers = killers
	}
}

// Resume continues the restored tasks.
func (q *Queue) Resume(now time.Time) {
	if q.suspended == 0 {
		return
	}
	for _, id := range q.All() {
		if t := q.tasks[id]; t != nil && t.suspended {
			q.unsuspend(t)
			q.await(now, t)
		}
	}
}

// finishRestored ends a restored task whose result a worker has brought, once the tasks that it
// needs are over. These had succeeded in the earlier queue, but if that was not recorded they run
// again, and may be cancelled or fail then. In that case the task fails too.
func (q *Queue) finishRestored(now time.Time, t *task, r Result) {
	missing := int32(0)
	for _, id := range t.Needs {
		n := q.tasks[id]
		switch {
		case n == nil || n.state == Succeeded:
		case n.state.Over():
			q.finish(now, t, depends(n))
			return
		default:
			n.rest().waiters = append(n.rest().waiters, t)
			missing++
		}
	}
	if missing == 0 {
		q.finish(now, t, r)
		return
	}
	q.move(t, Waiting)
	t.missing, t.rest().early = missing, &r
}

// TellAgain sends a client the outcomes of its tasks that are over once more.
func (q *Queue) TellAgain(client uint64) {
	for _, id := range q.Tasks(client) {
		if t := q.tasks[id]; t.state.Over() && !t.released {
			q.do(Action{What: Tell, Task: id})
		}
	}
}
