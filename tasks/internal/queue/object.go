package queue

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// object is a stored value.
type object struct {
	id    Object
	size  int64
	hosts map[string]bool // hosts that have it; "": the store beside the queue
	makes []*task         // tasks whose result it is
	users int             // number of unfinished tasks, and of clients, that need it
	wants []*task         // tasks that wait for it
	again bool            // a task runs again to make it
}

// takeWants returns the tasks that wait for the object, and removes them from it.
func (o *object) takeWants() []*task {
	wants := o.wants
	o.wants = nil
	return wants
}

func (q *Queue) object(id Object) *object {
	o := q.objects[id]
	if o == nil {
		o = &object{id: id, hosts: map[string]bool{}}
		q.objects[id] = o
	}
	return o
}

// Unput records that a client no longer needs a stored value.
func (q *Queue) Unput(id Object) { q.use(id, -1) }

// Use records that a client needs a stored value, until Unput, and the value's size in bytes.
func (q *Queue) Use(id Object, size int64) {
	q.use(id, 1)
	q.objects[id].size = size
}

// Stored records that a host has a copy of a stored value. It reports whether anyone needs the
// value.
func (q *Queue) Stored(now time.Time, id Object, host string) bool {
	o := q.objects[id]
	if o == nil {
		return false
	}
	q.has(now, o, host)
	return true
}

// has records that a host has the value, and continues the tasks that wait for it.
func (q *Queue) has(now time.Time, o *object, host string) {
	o.hosts[host] = true
	for _, t := range o.takeWants() {
		if t.state != Waiting {
			continue
		}
		if t.missing--; t.missing == 0 {
			q.ready(now, t)
		}
	}
}

// Holders returns the hosts that have a stored value, sorted, and its size in bytes.
func (q *Queue) Holders(id Object) (hosts []string, size int64) {
	o := q.objects[id]
	if o == nil {
		return nil, 0
	}
	return slices.Sorted(maps.Keys(o.hosts)), o.size
}

// use adds n to the number of users of a stored value, and drops the value if nobody needs it.
func (q *Queue) use(id Object, n int) {
	if n > 0 {
		q.object(id)
	}
	if o := q.objects[id]; o != nil {
		o.users += n
		q.drop(o)
	}
}

func (q *Queue) drop(o *object) {
	if o.users > 0 || len(o.makes) > 0 || len(o.wants) > 0 || o.again {
		return
	}
	delete(q.objects, o.id)
	for h := range o.hosts {
		q.do(Action{What: Drop, Object: o.id, Host: h})
	}
}

// made records that a stored value is the result of a task.
func (q *Queue) made(t *task, r Result) {
	o := q.object(r.Object)
	o.size = r.Size
	o.makes = append(o.makes, t)
}

// unmade undoes made, because the task is forgotten.
func (q *Queue) unmade(t *task) {
	if o := q.objects[t.result.Object]; o != nil {
		o.makes = slices.DeleteFunc(o.makes, func(m *task) bool { return m == t })
		q.drop(o)
	}
}

// inputIDs returns the stored values that a task needs, including the stored results of tasks on
// which it depends.
func (q *Queue) inputIDs(t *task) []Object {
	all := t.Objects
	for _, id := range t.Needs {
		if n := q.tasks[id]; n != nil && n.state == Succeeded && n.result.Size > 0 {
			all = append(slices.Clip(all), n.result.Object)
		}
	}
	return all
}

func (q *Queue) inputs(t *task) (all []*object) {
	for _, id := range q.inputIDs(t) {
		if o := q.objects[id]; o != nil {
			all = append(all, o)
		}
	}
	return all
}

// needObject makes a task wait for a stored value that no host has, and causes the value to be
// computed again. It does nothing if a host has it.
func (q *Queue) needObject(now time.Time, t *task, id Object) {
	o := q.object(id)
	if len(o.hosts) > 0 {
		return
	}
	t.missing++
	o.wants = append(o.wants, t)
	q.rebuild(now, o, int(t.depth)+1)
}

// rebuild runs a task again that makes a lost value, for the tasks that wait for the value. If that
// is impossible, these tasks fail.
func (q *Queue) rebuild(now time.Time, o *object, depth int) {
	if o.again {
		return
	}
	fail := func(text string) {
		for _, t := range o.takeWants() {
			if !t.state.Over() {
				q.finish(now, t, Result{State: Failed, Failure: Gone, Text: text})
			}
		}
	}
	switch {
	case len(o.makes) == 0:
		fail("a stored argument is on no host any more")
		return
	case depth > q.cfg.Rebuilds:
		fail("a stored argument was lost, and so were too many of the results that it depends on")
		return
	}
	m := o.makes[0]
	o.makes = slices.Delete(o.makes, 0, 1)
	q.retried++
	o.again = true
	m.again, m.depth, m.old = true, uint8(depth), o
	q.charge(m, -1)
	q.move(m, Waiting)
	m.result = Result{}
	q.charge(m, 1)
	q.await(now, m)
}

// lostHost forgets the copies on a host on which no worker is left. Ready tasks whose arguments
// were lost wait until these have been computed again.
func (q *Queue) lostHost(now time.Time, host string) {
	for _, w := range q.list {
		if w.Host == host {
			return
		}
	}
	for _, o := range q.objects {
		if o.hosts[host] && host != "" {
			delete(o.hosts, host)
		}
	}
	var lost []*task
	for _, l := range q.tasks {
		if l.state == Ready && len(q.inputIDs(l)) > 0 {
			lost = append(lost, l)
		}
	}
	slices.SortFunc(lost, func(a, b *task) int { return cmp.Compare(a.order, b.order) })
	for _, t := range lost {
		if t.state != Ready || !slices.ContainsFunc(q.inputs(t), func(o *object) bool { return len(o.hosts) == 0 }) {
			continue
		}
		q.leave(t)
		q.retry(now, t)
	}
}

// Missing records that a host no longer has a stored value, or is unreachable.
func (q *Queue) Missing(now time.Time, id Object, host string) {
	if o := q.objects[id]; o != nil {
		delete(o.hosts, host)
	}
}

// Want causes a stored value that a client wants to read to be computed again, if no host has it.
// It reports whether the value exists, is being computed, or may still appear. The latter is the
// case after a restart: the previous queue may have reported the value to the client, and died
// before it recorded that its task was over. The task is restored then, and runs again.
func (q *Queue) Want(now time.Time, id Object) bool {
	o := q.objects[id]
	if o == nil {
		return q.restored > 0
	}
	if len(o.hosts) == 0 {
		q.rebuild(now, o, 1)
	}
	return len(o.hosts) > 0 || o.again
}
