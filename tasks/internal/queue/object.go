package queue

import (
	"slices"
	"time"
)

// object is a stored value.
type object struct {
	id    Object
	size  int64
	hosts map[string]bool // that have it; "": the store beside the queue
	makes []*task         // tasks whose result it is
	users int             // tasks not over, and clients, that need it
	wants []*task         // that wait for it
	again bool            // a task runs again to make it
}

// takeWants returns the tasks that wait for it, which do so no more.
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

// Put says that a host has a stored value; "" is the store beside the queue. The client that has
// put it uses it until Unput.
func (q *Queue) Put(now time.Time, id Object, size int64, host string) {
	o := q.object(id)
	o.size = size
	o.users++
	q.has(now, o, host)
}

// Unput says that a client needs a stored value no more.
func (q *Queue) Unput(id Object) { q.use(id, -1) }

// Use says that a client needs a stored value, until Unput, and that it has so many bytes.
func (q *Queue) Use(id Object, size int64) {
	q.use(id, 1)
	q.objects[id].size = size
}

// Stored says that a host has a copy of a stored value. It returns whether anybody needs that.
func (q *Queue) Stored(now time.Time, id Object, host string) bool {
	o := q.objects[id]
	if o == nil {
		return false
	}
	q.has(now, o, host)
	return true
}

// has records a holder, and goes on with the tasks that wait for the value.
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

// Holders returns the hosts that have a stored value, in order, and its size.
func (q *Queue) Holders(id Object) (hosts []string, size int64) {
	o := q.objects[id]
	if o == nil {
		return nil, 0
	}
	for h := range o.hosts {
		hosts = append(hosts, h)
	}
	slices.Sort(hosts)
	return hosts, o.size
}

// use counts who needs a stored value; one that nobody needs is dropped.
func (q *Queue) use(id Object, n int) {
	o := q.objects[id]
	if o == nil {
		if n < 0 {
			return
		}
		o = q.object(id)
	}
	o.users += n
	q.drop(o)
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

// unmade is the opposite: the task is forgotten.
func (q *Queue) unmade(t *task) {
	if o := q.objects[t.result.Object]; o != nil {
		o.makes = slices.DeleteFunc(o.makes, func(m *task) bool { return m == t })
		q.drop(o)
	}
}

// inputIDs are the stored values that a task needs, of which the tasks before it have told.
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

// needObject makes a task wait for a stored value that is nowhere, and asks for it to be computed
// again.
func (q *Queue) needObject(now time.Time, t *task, id Object) {
	o := q.object(id)
	if len(o.hosts) > 0 {
		return
	}
	t.missing++
	o.wants = append(o.wants, t)
	q.rebuild(now, o, int(t.depth)+1)
}

// rebuild runs again a task whose stored result was lost, for those that wait for it.
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
		fail("a stored argument was lost, and too many results before it")
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

// lostHost forgets the copies of a host on which no worker is left, and has made again what is
// needed of them.
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
	slices.SortFunc(lost, func(a, b *task) int { return int(int64(a.order) - int64(b.order)) })
	for _, t := range lost {
		if t.state != Ready || !slices.ContainsFunc(q.inputs(t), func(o *object) bool { return len(o.hosts) == 0 }) {
			continue
		}
		q.leave(t)
		q.retry(now, t)
	}
}

// Missing says that a host does not have a stored value any more, or that it cannot be reached.
func (q *Queue) Missing(now time.Time, id Object, host string) {
	if o := q.objects[id]; o != nil {
		delete(o.hosts, host)
	}
}

// Want has a stored value made again that a client wants to read and nobody has. It returns whether
// it is there, is being made, or may come: a client was told of it by the queue before this one,
// which did not live to write down that its task was over. The task is restored, and runs again.
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
