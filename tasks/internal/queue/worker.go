package queue

import (
	"container/heap"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
)

// Worker is a process that runs tasks.
type Worker struct {
	ID   uint64
	Name string // for users
	Rank int    // rank of the process when it was started
	Host string
	// Functions are the functions that the worker has.
	Functions map[string]bool
	// Offers are the amounts of its resources.
	Offers map[string]int64
}

// worker is a worker with its state.
type worker struct {
	Worker
	free    map[string]int64
	sent    []*task // in the order in which they were sent
	running int     // number of tasks at the front of sent that have begun, as far as is known
	leases  []lease // by index of the group
	leaving bool
	trains  bool      // it is a member of a world, and runs no tasks meanwhile
	asked   int       // number of tasks that it was asked to give back and has not answered for
	askedAt time.Time // time of the last such request
	in      *pool     // the pool that it is in
	place   int       // its index in that pool
	done    int
	stopped int       // number of attempts in sent that were asked to stop and have not ended
	endAt   time.Time // when to request the worker's end because of them, first or again
}

// lease is a worker's permission to send it tasks of a group.
type lease struct {
	state leaseState
	at    time.Time // when the lease was requested, refused or last used
	why   string    // why the lease was refused
	sent  int       // number of tasks of the group that are with the worker
}

// crew holds the workers.
type crew struct {
	workers map[uint64]*worker
	list    []*worker // in the order of arrival
	idle    pool      // workers that have nothing to do
	roomy   pool      // other workers that may be sent more
}

// pool is a set of workers from which any may be taken.
type pool struct {
	list []*worker
	next int // index at which the next search begins
}

// add adds a worker.
func (c *crew) add(w *worker) {
	c.workers[w.ID] = w
	c.list = append(c.list, w)
}

// remove removes a worker and returns it, or nil if there is no such worker.
func (c *crew) remove(id uint64) *worker {
	w := c.workers[id]
	if w == nil {
		return nil
	}
	delete(c.workers, id)
	c.list = slices.DeleteFunc(c.list, func(o *worker) bool { return o == w })
	w.leave()
	return w
}

type leaseState uint8

const (
	noLease leaseState = iota
	leaseAsked
	leaseGranted
	leaseRefused
)

func (w *worker) lease(g *Group) *lease {
	for len(w.leases) <= g.Index {
		w.leases = append(w.leases, lease{})
	}
	return &w.leases[g.Index]
}

func pinned(worker uint64) string { return "#" + strconv.FormatUint(worker, 16) }

// Held is an attempt that a worker has when it joins.
type Held struct {
	ID      ID
	Attempt uint64
}

// Join adds a worker, or reconnects it. held are the attempts that it still has from its last
// connection, or from an earlier queue. The queue asks it to stop those that it should no longer
// have.
func (q *Queue) Join(now time.Time, wk Worker, held []Held) {
	w := q.workers[wk.ID]
	if w == nil {
		w = &worker{Worker: wk, free: maps.Clone(wk.Offers)}
		q.crew.add(w)
	}
	w.Functions = wk.Functions
	q.unheard(now, w, held)
	for _, h := range held {
		if t := q.of(w.ID, h); t != nil {
			t.unsure = false
			continue
		}
		t := q.tasks[h.ID]
		if w.stoppedAttempt(h) != nil {
			t = nil
		}
		if t == nil || t.state != Ready && !t.suspended || t.Pin != 0 && t.Pin != wk.ID {
			q.do(Action{What: Stop, Worker: w.ID, Task: h.ID, Attempt: h.Attempt})
			continue
		}
		if t.suspended {
			q.unsuspend(t)
		} else {
			q.leave(t)
		}
		q.send(now, w, t, h.Attempt)
	}
	q.fill(now, w)
}

// unheard takes back the tasks that a worker has never received because its connection broke.
func (q *Queue) unheard(now time.Time, w *worker, held []Held) {
	w.asked = 0
	for i := range w.leases {
		w.leases[i] = lease{sent: w.leases[i].sent}
	}
	has := make(map[Held]bool, len(held))
	for _, h := range held {
		has[h] = true
	}
	for _, t := range slices.Clone(w.sent) {
		q.setWaits(t, 0) // the worker reports it again
		if t.taking = false; !has[Held{t.ID, t.number}] {
			if q.unsend(t); !t.stopped {
				q.attemptEnded(now, t, takenBack, Result{}, w.Name)
			}
		}
	}
	q.begin(now, w)
}

// Lose removes a worker that is gone. The loss counts as an attempt of each task that the worker
// had begun. If no worker was lost with a task before, the loss counts if the task may have begun;
// otherwise only if the worker had confirmed that it began. This matters because the workers of a
// host that dies are lost one after another, and meanwhile tasks are sent to those that are not
// lost yet.
func (q *Queue) Lose(now time.Time, id uint64) { q.gone(now, id, true) }

// Left removes a worker that has left as requested. Its attempts do not count.
func (q *Queue) Left(now time.Time, id uint64) { q.gone(now, id, false) }

func (q *Queue) gone(now time.Time, id uint64, lost bool) {
	w := q.crew.remove(id)
	if w == nil {
		return
	}
	q.lostHost(now, w.Host)
	sent, running := w.sent, w.running
	w.sent, w.running = nil, 0
	for i, t := range sent {
		t.waits = 0
		if t.worker = nil; t.stopped {
			continue
		}
		how := takenBack
		if lost && i < running && !t.unsure {
			how = workerLost
		}
		q.attemptEnded(now, t, how, Result{}, w.Name)
	}
	q.failPinned(now, id, workerGone)
}

// Reasons why tasks that are pinned to a worker fail.
const (
	workerGone   = "its worker is gone"
	workerTrains = "its worker trains"
)

// refuses returns the reason why a worker will never run tasks of a group that are pinned to it;
// "": it may. w is nil if the worker is gone.
func (w *worker) refuses(g *Group) string {
	switch {
	case w == nil:
		return workerGone
	case w.trains:
		return workerTrains
	case !w.serves(g):
		return "its worker has no such function, or offers less than " + g.Demand.String()
	}
	return ""
}

// failPinned ends the ready tasks that are pinned to a worker that does not run them.
func (q *Queue) failPinned(now time.Time, id uint64, why string) {
	for _, g := range q.order {
		for _, s := range g.shares {
			if l := s.lines[pinned(id)]; l != nil {
				for _, t := range slices.Clone(l.tasks) {
					q.finish(now, t, Result{State: Failed, Failure: NoMember, Text: why})
				}
			}
		}
	}
}

// Runs returns the names of the functions that a worker is running, as far as is known: up to most
// names, each once, in the order of their first tasks.
func (q *Queue) Runs(id uint64, most int) (all []string) {
	w := q.workers[id]
	if w == nil {
		return nil
	}
	for _, t := range w.sent[:w.running] {
		if name := t.Group.Name(); !t.unsure && len(all) < most && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

// Busy reports whether a worker has tasks.
func (q *Queue) Busy(id uint64) bool { w := q.workers[id]; return w != nil && len(w.sent) > 0 }

// attemptEnded continues a task whose attempt has ended: either another attempt follows, or r
// becomes the result of the task. by is the name of the worker.
func (q *Queue) attemptEnded(now time.Time, t *task, how ending, r Result, by string) {
	tries := t.tries
	another, why := t.ended(how, limits{t.Retries, t.Again, mostLost, q.cfg.Rebuilds})
	if how == workerLost {
		t.rest().killers = append(t.rest().killers, by)
		r = Result{State: Failed, Failure: why, Text: fmt.Sprintf("its worker %s was lost", by)}
	}
	switch {
	case another:
		if t.tries > tries {
			q.retried++
		}
		if how == workerLost {
			q.Losses = append(q.Losses, t.ID)
		}
		q.retry(now, t)
		return
	case why == Poison:
		r.Text = fmt.Sprintf("its worker was lost %d times while it ran: %v", t.deaths, t.killers)
	case why == Gone:
		r = Result{State: Failed, Failure: Gone, Text: "a stored argument cannot be fetched"}
	case why == None && t.restored:
		q.finishRestored(now, t, r)
		return
	}
	q.finish(now, t, r)
}

// retry makes a task wait for its next attempt, and before that for arguments that were lost.
func (q *Queue) retry(now time.Time, t *task) {
	q.move(t, Waiting)
	t.taking = false
	q.await(now, t)
}

// Leave records that a worker is leaving: it is sent nothing more, and is asked to give back the
// tasks that have not begun.
func (q *Queue) Leave(now time.Time, id uint64) {
	w := q.workers[id]
	if w == nil || w.leaving {
		return
	}
	w.leaving = true
	w.leave()
	for _, t := range w.sent[w.running:] {
		q.takeBack(now, w, t)
	}
}

// closed reports whether the worker is sent no tasks.
func (w *worker) closed() bool { return w.leaving || w.trains }

// Train records whether a worker trains. A worker that trains is sent no tasks. Its current tasks
// run elsewhere, and these attempts do not count.
func (q *Queue) Train(now time.Time, id uint64, trains bool) {
	w := q.workers[id]
	if w == nil || w.trains == trains {
		return
	}
	if w.trains = trains; !trains {
		q.fill(now, w)
		return
	}
	w.leave()
	for _, t := range slices.Clone(w.sent) {
		q.takeAway(now, w, t)
	}
	q.failPinned(now, id, workerTrains)
}

// takeAway makes a task of a worker run elsewhere. Later reports of the worker about it are
// refused.
func (q *Queue) takeAway(now time.Time, w *worker, t *task) {
	if t.worker != w || t.state != Sent || t.stopped {
		return
	}
	q.stop(now, t, "taken elsewhere")
	if t.Pin == w.ID && w.trains {
		q.finish(now, t, Result{State: Failed, Failure: NoMember, Text: workerTrains})
		return
	}
	q.attemptEnded(now, t, takenBack, Result{}, w.Name)
}

// Granted records that the worker has granted a lease of the group, in answer to Ask.
func (q *Queue) Granted(now time.Time, id uint64, g *Group) {
	w := q.workers[id]
	if w == nil {
		return
	}
	if l := w.lease(g); l.state == leaseAsked {
		l.state, l.at = leaseGranted, now
		q.due(now.Add(leaseIdle))
		q.fill(now, w)
	}
}

// Refused records that the worker has refused a lease of the group for now.
func (q *Queue) Refused(now time.Time, id uint64, g *Group, why string) {
	w := q.workers[id]
	if w == nil {
		return
	}
	l := w.lease(g)
	*l = lease{state: leaseRefused, at: now, why: why, sent: l.sent}
	q.due(now.Add(leaseAgain))
	for _, t := range slices.Clone(w.sent[w.running:]) {
		if t.Group == g {
			q.takeBack(now, w, t)
		}
	}
	q.fill(now, w)
	q.seek(now, g)
}

func (w *worker) serves(g *Group) bool { return w.knows(g) && g.Demand.Fits(w.Offers) }

// knows reports whether the worker has the function of the group.
func (w *worker) knows(g *Group) bool { return w.Functions[g.Function] }

func (q *Queue) ask(now time.Time, w *worker, g *Group) {
	l := w.lease(g)
	l.state, l.at = leaseAsked, now
	q.due(now.Add(leaseReply))
	q.do(Action{What: Ask, Worker: w.ID, Group: g})
}

// seek finds workers for the group's ready tasks, if there are any.
func (q *Queue) seek(now time.Time, g *Group) {
	for _, w := range slices.Concat(q.idle.list, q.roomy.list) {
		if g.waiting == 0 {
			return
		}
		if q.maySend(w, g) {
			q.fill(now, w)
		}
	}
}

// maySend reports whether a task of the group may be sent to the worker now, or the worker may be
// asked for a lease.
func (q *Queue) maySend(w *worker, g *Group) bool {
	if w.closed() || !w.serves(g) || !w.mayHave(q, g) {
		return false
	}
	state := w.lease(g).state
	return state == noLease || state == leaseGranted
}

// assign finds a worker for a task that has become ready: first one on its preferred host, then an
// idle one, then one that may be sent a task ahead.
func (q *Queue) assign(now time.Time, t *task) {
	if t.Pin != 0 {
		q.fill(now, q.workers[t.Pin])
		return
	}
	host := t.in.name
	if host != "" {
		q.assignTo(now, t, &q.idle, host)
	}
	q.assignTo(now, t, &q.idle, "")
	q.assignTo(now, t, &q.roomy, host)
}

// assignTo assigns the task to a worker of a pool on the given host; "": on any host.
func (q *Queue) assignTo(now time.Time, t *task, p *pool, host string) {
	for n := len(p.list); n > 0 && t.state == Ready && len(p.list) > 0; n-- {
		if p.next--; p.next < 0 || p.next >= len(p.list) {
			p.next = len(p.list) - 1
		}
		w := p.list[p.next]
		if (host == "" || w.Host == host) && q.maySend(w, t.Group) {
			q.fillUpTo(now, w, 1)
		}
	}
}

// depth returns how many tasks of the group a worker may have: those that it can run at once, and
// enough for a short time ahead.
func (q *Queue) depth(w *worker, g *Group) int {
	room := g.Demand.room(w.Offers)
	more := 1
	if g.pace > 0 {
		more = int(ahead / g.pace)
	}
	return min(room+room*more, room+mostAhead)
}

// fill sends a worker as many tasks as it may have.
func (q *Queue) fill(now time.Time, w *worker) { q.fillUpTo(now, w, mostAhead) }

// fillUpTo sends a worker at most the given number of tasks.
func (q *Queue) fillUpTo(now time.Time, w *worker, most int) {
	if w.closed() || q.workers[w.ID] != w {
		return
	}
	for ; most > 0; most-- {
		t := q.next(now, w)
		if t == nil {
			break
		}
		q.leave(t)
		q.tries++
		q.send(now, w, t, uint64(q.cfg.Term)<<40|q.tries)
		t.unsure = t.deaths > 0
		q.do(Action{What: Push, Worker: w.ID, Task: t.ID, Attempt: t.number, Group: t.Group, Confirm: t.unsure})
	}
	switch {
	case w.running == len(w.sent) && w.spare():
		w.enter(&q.idle)
		q.balance(now, w)
	case w.hasRoom(q):
		w.enter(&q.roomy)
	default:
		w.leave()
	}
}

// spare reports whether any of the worker's resources is free.
func (w *worker) spare() bool {
	for _, n := range w.free {
		if n > 0 {
			return true
		}
	}
	return len(w.free) == 0
}

// hasRoom reports whether the worker may be sent more tasks of some group.
func (w *worker) hasRoom(q *Queue) bool {
	for _, g := range q.order {
		if w.serves(g) && w.mayHave(q, g) {
			return true
		}
	}
	return false
}

func (w *worker) mayHave(q *Queue, g *Group) bool {
	if w.stopped > 0 && !g.Demand.Fits(w.free) {
		return false // a task would wait for tasks that may never end
	}
	return len(w.sent) < mostAhead && w.lease(g).sent < q.depth(w, g)
}

// next returns the ready task that should be sent to the worker. It returns nil if no task is
// suitable, or if a lease must be requested first. A task that prefers another host is taken only
// if the worker would otherwise have nothing to do.
func (q *Queue) next(now time.Time, w *worker) (best *task) {
	for _, g := range q.order {
		if g.waiting == 0 || !w.serves(g) || !w.mayHave(q, g) {
			continue
		}
		t := q.first(g, w, w.running == len(w.sent))
		if t == nil || best != nil && !before(t, best) {
			continue
		}
		switch l := w.lease(g); l.state {
		case leaseGranted:
			best = t
		case noLease:
			q.ask(now, w, g)
		}
	}
	return best
}

func before(a, b *task) bool {
	if a.Priority != b.Priority {
		return a.Priority > b.Priority
	}
	return a.order < b.order
}

// first returns the group's first task for a worker: one pinned to the worker, one for its host or
// for any host or, if the worker is idle, any task. It skips paused clients.
func (q *Queue) first(g *Group, w *worker, idle bool) (best *task) {
	for _, s := range g.shares {
		if q.paused(s.client) {
			continue
		}
		if t := s.first(w, false); t != nil && (best == nil || before(t, best)) {
			best = t
		}
	}
	for _, s := range g.shares {
		if best != nil || !idle {
			break
		}
		if !q.paused(s.client) {
			best = s.first(w, true)
		}
	}
	return best
}

func (s *share) first(w *worker, any bool) (best *task) {
	look := func(name string) {
		if l := s.lines[name]; l != nil && (best == nil || before(l.tasks[0], best)) {
			best = l.tasks[0]
		}
	}
	look("")
	if w.Host != "" {
		look(w.Host)
	}
	if len(s.lines) > 0 {
		look(pinned(w.ID))
	}
	if best == nil && any {
		for name := range s.lines {
			if name == "" || name[0] != '#' {
				look(name)
			}
		}
	}
	return best
}

// Begun records that a worker begins an attempt that it was asked to confirm.
func (q *Queue) Begun(worker uint64, h Held) {
	if t := q.of(worker, h); t != nil {
		t.unsure = false
	}
}

// send records that a task was sent to a worker.
func (q *Queue) send(now time.Time, w *worker, t *task, number uint64) {
	q.move(t, Sent)
	t.attempt = attempt{worker: w, number: number}
	w.sent = append(w.sent, t)
	w.lease(t.Group).sent++
	q.begin(now, w)
}

// begin counts the tasks for which the worker has free resources as running, because a worker
// begins tasks in the order in which they arrive.
func (q *Queue) begin(now time.Time, w *worker) {
	for w.running < len(w.sent) && w.sent[w.running].Group.Demand.Fits(w.free) {
		t := w.sent[w.running]
		t.Group.Demand.take(w.free, 1)
		if t.TimeLimit > 0 {
			t.rest().began = now
			q.due(now.Add(t.TimeLimit))
		}
		w.running++
	}
}

// unsend removes a task from its worker.
func (q *Queue) unsend(t *task) {
	w := t.worker
	q.setWaits(t, 0)
	i := slices.Index(w.sent, t)
	w.sent = slices.Delete(w.sent, i, i+1)
	if i < w.running {
		w.running--
		t.Group.Demand.take(w.free, -1)
	}
	w.lease(t.Group).sent--
	if t.stopped {
		if w.stopped--; w.stopped == 0 {
			w.endAt = time.Time{}
		}
	}
	if t.taking {
		w.asked--
		t.taking = false
	}
}

// Done records the result of an attempt, and how long it ran. Only the last attempt of a task
// counts.
func (q *Queue) Done(now time.Time, worker uint64, h Held, r Result, ran time.Duration) {
	t := q.of(worker, h)
	if t == nil {
		if w := q.workers[worker]; w != nil && r.Size > 0 {
			o := q.object(r.Object)
			q.has(now, o, w.Host)
			q.drop(o)
		}
		q.stoppedEnded(now, worker, h)
		return
	}
	w, g := t.worker, t.Group
	if r.Size > 0 {
		q.object(r.Object).hosts[w.Host] = true
	}
	q.unsend(t)
	w.done++
	if ran = max(ran, time.Microsecond); g.pace == 0 {
		g.pace = ran
	} else {
		g.pace += (ran - g.pace) / 8
	}
	w.lease(g).at = now
	q.due(now.Add(leaseIdle))
	q.begin(now, w)
	q.attemptEnded(now, t, endingOf(r), r, w.Name)
	q.fill(now, w)
}

// Returned records that a worker has given back tasks that had not begun.
func (q *Queue) Returned(now time.Time, worker uint64, all []Held) {
	w := q.workers[worker]
	if w == nil {
		return
	}
	for _, h := range all {
		t := q.of(worker, h)
		if t == nil {
			q.stoppedEnded(now, worker, h)
			continue
		}
		q.unsend(t)
		q.begin(now, w)
		q.attemptEnded(now, t, takenBack, Result{}, w.Name)
	}
	q.fill(now, w)
}

// Kept records that a worker has already begun a task that it was asked to give back.
func (q *Queue) Kept(worker uint64, h Held) {
	if t := q.of(worker, h); t != nil && t.taking {
		t.taking = false
		t.worker.asked--
	}
}

func (q *Queue) takeBack(now time.Time, w *worker, t *task) {
	if t.taking || t.stopped {
		return
	}
	t.taking = true
	w.asked++
	w.askedAt = now
	q.due(now.Add(leaseReply))
	q.do(Action{What: TakeBack, Worker: w.ID, Task: t.ID, Attempt: t.number})
}

// balance asks the worker with the most waiting tasks to give back half of them, the newest ones,
// on behalf of an idle worker.
func (q *Queue) balance(now time.Time, idle *worker) {
	var most *worker
	for _, w := range q.list {
		if w == idle || w.asked > 0 || len(w.sent)-w.running < 1 {
			continue
		}
		if most == nil || len(w.sent)-w.running > len(most.sent)-most.running {
			most = w
		}
	}
	if most == nil {
		return
	}
	queued := most.sent[most.running:]
	for i, n := len(queued)-1, (len(queued)+1)/2; i >= 0 && n > 0; i-- {
		t := queued[i]
		if t.Pin != 0 || t.stopped || !idle.serves(t.Group) || !t.Group.Demand.Fits(idle.free) {
			continue
		}
		switch idle.lease(t.Group).state {
		case noLease:
			q.ask(now, idle, t.Group) // once it is granted, balance is called again
			return
		case leaseGranted:
			q.takeBack(now, most, t)
			n--
		}
	}
}

// enter moves the worker into a pool.
func (w *worker) enter(p *pool) {
	if w.in == p {
		return
	}
	w.leave()
	w.in, w.place = p, len(p.list)
	p.list = append(p.list, w)
}

func (w *worker) leave() {
	if w.in == nil {
		return
	}
	last := w.in.list[len(w.in.list)-1]
	w.in.list[w.place], last.place = last, w.place
	w.in.list = w.in.list[:len(w.in.list)-1]
	w.in = nil
}

// Tick acts on all deadlines that have passed, and sets Next.
func (q *Queue) Tick(now time.Time) {
	q.Next = time.Time{}
	for _, w := range slices.Clone(q.list) {
		for i := range w.leases {
			q.tickLease(now, w, q.order[i], &w.leases[i])
		}
		if w.asked > 0 && q.passed(now, w.askedAt.Add(leaseReply)) {
			q.silent(now, w)
		}
		if w.stopped > 0 {
			q.tickStopped(now, w)
		}
		for _, t := range slices.Clone(w.sent[:w.running]) {
			if t.TimeLimit > 0 && t.more != nil && !t.began.IsZero() && t.worker == w && q.passed(now, t.began.Add(t.TimeLimit)) {
				q.stop(now, t, "whose time is up")
				q.finish(now, t, Result{State: Failed, Failure: TimedOut, Text: fmt.Sprintf("it ran for longer than %v", t.TimeLimit)})
				q.begin(now, w)
				q.fill(now, w)
			}
		}
	}
}

// silent handles a worker that has not answered a request to give back tasks: it gives these tasks
// to other workers, and treats the worker's leases as refused.
func (q *Queue) silent(now time.Time, w *worker) {
	for i, g := range q.order[:len(w.leases)] {
		if l := &w.leases[i]; l.state != leaseRefused {
			q.Refused(now, w.ID, g, fmt.Sprintf("it has not answered for %v", leaseReply))
		}
	}
	for _, t := range slices.Clone(w.sent) {
		if t.taking {
			q.takeAway(now, w, t)
		}
	}
	q.begin(now, w)
}

// passed reports whether the time at has passed. If not, it makes the caller call Tick then.
func (q *Queue) passed(now, at time.Time) bool {
	if now.Before(at) {
		q.due(at)
		return false
	}
	return true
}

func (q *Queue) tickLease(now time.Time, w *worker, g *Group, l *lease) {
	switch l.state {
	case leaseAsked:
		if q.passed(now, l.at.Add(leaseReply)) {
			q.Refused(now, w.ID, g, fmt.Sprintf("it has not answered for %v", leaseReply))
		}
	case leaseRefused:
		if q.passed(now, l.at.Add(leaseAgain)) {
			l.state = noLease
			q.fill(now, w)
		}
	case leaseGranted:
		if l.sent == 0 && q.passed(now, l.at.Add(leaseIdle)) {
			l.state = noLease
		}
	}
}

var _ heap.Interface = (*line)(nil)
