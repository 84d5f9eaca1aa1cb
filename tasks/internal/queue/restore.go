package queue

import (
	"cmp"
	"slices"
	"time"
)

// earlier counts the tasks of an earlier queue.
type earlier struct {
	suspended int // that wait for Resume
	restored  int // that have not been over since: a client may have the result of each
}

// restore notes that a task is one of an earlier queue.
func (e *earlier) restore(t *task) {
	t.suspended, t.restored = true, true
	e.suspended++
	e.restored++
}

// unsuspend notes that a task does not wait for Resume.
func (e *earlier) unsuspend(t *task) {
	if t.suspended {
		t.suspended = false
		e.suspended--
	}
}

// settle notes that a task is over.
func (e *earlier) settle(t *task) {
	if t.restored {
		t.restored = false
		e.restored--
	}
}

// Suspended returns how many tasks wait for Resume.
func (e *earlier) Suspended() int { return e.suspended }

// Saved is what must be known of a task to go on with it in another queue, besides Released.
type Saved struct {
	Task
	Result  Result // its State is the task's
	Tries   int
	Killers []string
}

// Saved returns what must be known of a task.
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
		} else if t.old != nil { // it runs again for the sake of its result
			s.Result = Result{State: Succeeded, Object: t.old.id, Size: t.old.size}
		}
	}
	return s, true
}

// AreDefaults returns whether options are those of a task without any.
func AreDefaults(o *Options) bool {
	return o == &defaults || o.Prefer == "" && o.Pin == 0 && len(o.Needs) == 0 && len(o.Objects) == 0 && o.Retries == DefaultRetries && !o.Again && o.TimeLimit == 0
}

// All returns all tasks, in the order in which they came.
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

// Released returns those of the tasks whose results their clients need no more.
func (q *Queue) Released(ids []ID) (all []ID) {
	for _, id := range ids {
		if t := q.tasks[id]; t != nil && t.released {
			all = append(all, id)
		}
	}
	return all
}

// Objects returns all stored values that are needed, in no order.
func (q *Queue) Objects() []Object {
	all := make([]Object, 0, len(q.objects))
	for id := range q.objects {
		all = append(all, id)
	}
	return all
}

// Restore adds a task of an earlier queue. It is suspended until Resume, or until a worker joins
// that has an attempt of it. Tasks are restored in the order in which they came.
func (q *Queue) Restore(s Task) {
	if q.tasks[s.ID] != nil {
		return
	}
	q.last++
	if s.Options == nil {
		s.Options = &defaults
	}
	t := &task{Task: s, order: q.last}
	q.restore(t)
	q.insert(t)
}

// RestoreOver says what had become of a restored task.
func (q *Queue) RestoreOver(now time.Time, id ID, r Result) {
	t := q.tasks[id]
	switch {
	case t == nil || !r.State.Over():
	case t.suspended:
		q.unsuspend(t)
		q.finish(now, t, r)
	case t.state == Succeeded && r.State == Succeeded && t.result.Size > 0 && r.Size > 0 && t.result.Object != r.Object:
		q.unmade(t) // it has run again
		t.result = r
		q.made(t, r)
	}
}

// RestoreLosses says how often a restored task has run again, and which workers were lost with it.
func (q *Queue) RestoreLosses(id ID, tries int, killers []string) {
	if t := q.tasks[id]; t != nil {
		t.tries, t.deaths = uint8(min(tries, 255)), uint8(min(len(killers), 255))
		t.rest().killers = killers
	}
}

// Resume goes on with the tasks that were restored.
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

// finishRestored ends a restored task that a worker had, once those are over which it needs. They
// had succeeded in the earlier queue, but run again where that was not written down, and may be
// cancelled then: the task is not right where one of them is not.
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

// TellAgain has a client told of its tasks that are over.
func (q *Queue) TellAgain(client uint64) {
	for _, id := range q.Tasks(client) {
		if t := q.tasks[id]; t.state.Over() && !t.released {
			q.do(Action{What: Tell, Task: id})
		}
	}
}
