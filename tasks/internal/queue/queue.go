// Package queue decides which worker runs which task. It is pure: no goroutine, lock, clock or
// socket. Methods take the time and what has happened; what is to be done collects in Out.
//
// A task goes through the states of State. It waits for the tasks whose results are its arguments,
// and then in a line of its group, which are the tasks of one function with the same demand. A
// worker is asked for a lease of a group before tasks of it are sent; the lease lasts while the
// worker is busy with the group and leaseIdle longer, so that a lease is asked for once and not for
// each task. Tasks are sent ahead of what a worker can run at once, as many as it runs in a short
// time, and those that have not begun are taken back when another worker is idle.
package queue

import (
	"container/heap"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// ID names a task: its client, and a number that the client gives.
type ID struct{ Client, N uint64 }

// Object names a stored value by the SHA-256 hash of its bytes.
type Object [32]byte

// State is where a task is in its life.
type State uint8

// The states of a task.
const (
	Waiting   State = iota // for results that are its arguments
	Ready                  // for a worker
	Sent                   // to a worker, which runs it or will
	Succeeded              // its result is known
	Failed
	Cancelled
)

// String returns the state as people see it.
func (s State) String() string {
	return [...]string{"waiting", "ready", "running", "succeeded", "failed", "cancelled"}[s]
}

// Over returns whether the state is the last of a task.
func (s State) Over() bool { return s >= Succeeded }

// Failure says why a task has failed.
type Failure uint8

// Why tasks fail.
const (
	None       Failure = iota
	ByUser             // the function has returned an error, or has panicked
	Lost               // its workers were lost, each time
	Poison             // it has ended as many workers as a task may
	Dependency         // a task whose result is its argument has failed
	TimedOut           // it has run for longer than it may
	Gone               // its stored argument is lost, and cannot be computed again
	NoMember           // its worker is gone
	Full               // there was no memory for its result
)

// Result is what became of a task.
type Result struct {
	State   State
	Failure Failure
	// Text is the error's; Value the encoded result, unless it is in the store as Object, or the
	// stack of a function that has panicked.
	Text   string
	Value  []byte
	Object Object
	Size   int64 // of the stored result; 0: it is not stored
}

// Task is what a client asks for. It is not changed.
type Task struct {
	ID       ID
	Group    *Group // by Queue.Group
	Priority int32  // greater runs first
	Cost     int32  // how many bytes it takes while it is not over
	// Options are what most tasks do without; nil: the defaults.
	*Options
	// Spec is what the caller of this package needs to send the task.
	Spec []byte
}

// Options of a task. They are not changed, and may be shared.
type Options struct {
	Prefer string // host; "": where most of its arguments are stored
	// Pin is the worker that alone may run it; 0: any.
	Pin     uint64
	Needs   []ID     // tasks whose results are arguments
	Objects []Object // stored values that are arguments
	// Retries is how often it may run again after a worker was lost.
	Retries int
	// Again: it may run again as often when its function has failed.
	Again bool
	// TimeLimit is how long it may run. 0: as long as it takes.
	TimeLimit time.Duration
}

// defaults are the options of a task without any.
var defaults = Options{Retries: DefaultRetries}

// DefaultRetries is how often a task runs again after its worker was lost.
const DefaultRetries = 3

// Config bounds the queue. The zero value means the defaults.
type Config struct {
	// Term is the number of this queue among those of the same journal.
	Term uint32
	// Poison is how many workers may be lost while they run a task. 0: 3.
	Poison int
	// Depth bounds the tasks that a worker has ahead. 0: 1,000.
	Depth int
	// Rebuilds bounds how deep lost results are made again. 0: 16.
	Rebuilds int
	// Grace is how long an attempt may go on that was told to stop, until its worker is to be
	// ended. 0: for ever.
	Grace time.Duration
	// Unread is how many bytes of results a client may have to take; then its tasks wait. 0: any.
	Unread int64
}

const (
	leaseIdle  = 500 * time.Millisecond // a lease lasts so long without a task
	leaseReply = 2 * time.Second        // a worker has so long to answer
	leaseAgain = time.Second            // a worker that has refused is asked again after it
	ahead      = 2 * time.Millisecond   // work that a worker has ahead
)

// Action is something to be done.
type Action struct {
	What    What
	Worker  uint64
	Task    ID
	Attempt uint64
	Group   *Group
	Object  Object
	Host    string
	Confirm bool // of Push: the worker is to say when it begins the task
}

// What is a kind of Action.
type What uint8

// The actions.
const (
	Push     What = iota // send the task to the worker
	Ask                  // ask the worker for a lease of the group
	TakeBack             // ask the worker for the task, if it has not begun
	Stop                 // tell the worker to cancel the attempt
	Tell                 // tell the client what became of the task
	Drop                 // remove the object from the host
	End                  // end the worker's process: the attempt does not end
)

// Group is the tasks of one function with the same demand.
type Group struct {
	Function string
	Demand   Demand
	Index    int               // among all groups, from 0
	shares   map[uint64]*share // by the client
	waiting  int               // tasks that are ready
	known    int               // tasks, those that are over too
	at       time.Time         // when one was submitted or has ended last
	pace     time.Duration     // moving average of the time that a task runs; 0: unknown
}

// line is a heap of ready tasks.
type line struct {
	name  string
	tasks []*task
}

func (l *line) Len() int { return len(l.tasks) }
func (l *line) Less(i, j int) bool {
	a, b := l.tasks[i], l.tasks[j]
	if a.Priority != b.Priority {
		return a.Priority > b.Priority
	}
	return a.order < b.order
}
func (l *line) Swap(i, j int) {
	l.tasks[i], l.tasks[j] = l.tasks[j], l.tasks[i]
	l.tasks[i].place, l.tasks[j].place = int32(i), int32(j)
}

// Push implements heap.Interface.
func (l *line) Push(x any) {
	t := x.(*task)
	t.place = int32(len(l.tasks))
	l.tasks = append(l.tasks, t)
}

// Pop implements heap.Interface.
func (l *line) Pop() any {
	last := len(l.tasks) - 1
	t := l.tasks[last]
	l.tasks[last] = nil
	l.tasks = l.tasks[:last]
	return t
}

// task is a task and where it stands. There may be a million, so what few of them have is in more.
type task struct {
	Task
	in      *line  // where it is ready
	attempt        // while it is sent
	order   uint64 // by which it came
	place   int32  // in its line
	missing int32  // results and stored values that it waits for
	users   int32  // tasks not over that need its result
	state   State
	attempts
	depth    uint8 // of making lost results again
	released bool  // the client needs the result no more
	again    bool  // it runs for the sake of its stored result alone
	// suspended: it was restored, and has not been resumed. restored: and it has not been over
	// since.
	suspended, restored bool
	*more
}

// attempt is a task's last attempt, from when it is sent to a worker until that is done with it.
type attempt struct {
	worker  *worker // to which it is sent
	number  uint64  // of all attempts of the queue
	waits   int32   // more than 0: its function waits for other tasks, and has lent its processors
	taking  bool    // it has been asked for, to run elsewhere
	unsure  bool    // its worker is to say when it begins it, and has not
	stopped bool    // it was told to stop: what it is part of is no task any more
}

// of returns the task of which an attempt is the last and is not over; nil: no task.
func (q *Queue) of(worker uint64, h Held) *task {
	t := q.tasks[h.ID]
	if t == nil || t.state != Sent || t.number != h.Attempt || t.worker.ID != worker {
		return nil
	}
	return t
}

// more is what few tasks have for long.
type more struct {
	waiters []*task // for its result
	result  Result
	early   *Result  // it has run, but those that it needs are not over
	old     *object  // its stored result that was lost, while it runs again
	killers []string // workers that were lost while they ran it
	began   time.Time
}

// rest returns where to put what few tasks have.
func (t *task) rest() *more {
	if t.more == nil {
		t.more = &more{}
	}
	return t.more
}

// Queue is all tasks, workers and stored values. It is not safe for concurrent use.
type Queue struct {
	// Out is what is to be done. The caller empties it.
	Out []Action
	// Next is when Tick is to be called; zero: not before the next change.
	Next time.Time
	// Over and Losses are tasks that have ended, and tasks that have lost a worker and will run
	// again. The caller empties them.
	Over, Losses []ID

	cfg      Config
	tasks    map[ID]*task
	objects  map[Object]*object
	last     uint64             // order of the last task
	tries    uint64             // attempts so far
	counts   [Cancelled + 1]int // tasks by state
	retried  int
	finished []finished // tasks that have ended; those that need them are still to be told
	groups
	crew
	ledger
	earlier
}

// groups are the groups of tasks; they stay.
type groups struct {
	byKey map[groupKey]*Group
	order []*Group // by which they came
}

type groupKey struct{ function, demand string }

// New returns an empty queue.
func New(cfg Config) *Queue {
	if cfg.Poison <= 0 {
		cfg.Poison = 3
	}
	if cfg.Depth <= 0 {
		cfg.Depth = 1000
	}
	if cfg.Rebuilds <= 0 {
		cfg.Rebuilds = 16
	}
	return &Queue{
		cfg: cfg, tasks: map[ID]*task{}, objects: map[Object]*object{}, groups: groups{byKey: map[groupKey]*Group{}},
		crew: crew{workers: map[uint64]*worker{}}, ledger: ledger{accounts: map[uint64]*account{}},
	}
}

// due has Tick called at a time, or before.
func (q *Queue) due(at time.Time) {
	if q.Next.IsZero() || at.Before(q.Next) {
		q.Next = at
	}
}

func (q *Queue) do(a Action) { q.Out = append(q.Out, a) }

// Group returns the group of a function's tasks with a demand.
func (all *groups) Group(function string, d Demand) *Group {
	key := groupKey{function, d.key()}
	g := all.byKey[key]
	if g == nil {
		g = &Group{Function: function, Demand: d, Index: len(all.order), shares: map[uint64]*share{}}
		all.byKey[key] = g
		all.order = append(all.order, g)
	}
	return g
}

// GroupAt returns the group with an index, or nil.
func (all *groups) GroupAt(index int) *Group {
	if index < 0 || index >= len(all.order) {
		return nil
	}
	return all.order[index]
}

// Submit adds a task. A task that is known already is told again when it is over.
func (q *Queue) Submit(now time.Time, s Task) {
	if t := q.add(s); t != nil {
		t.Group.at = now
		q.await(now, t)
	}
}

// SubmitEnded is Submit and Ended: what the task needs may be unknown.
func (q *Queue) SubmitEnded(now time.Time, s Task, r Result) {
	if t := q.add(s); t != nil && r.State.Over() && r.Size == 0 {
		q.finish(now, t, r)
	} else if t != nil {
		q.await(now, t)
	} else {
		q.Ended(now, s.ID, r)
	}
}

// add adds a task; it returns nil where the task is known.
func (q *Queue) add(s Task) *task {
	if t := q.tasks[s.ID]; t != nil {
		if t.state.Over() {
			q.do(Action{What: Tell, Task: s.ID})
		}
		return nil
	}
	q.last++
	if s.Options == nil {
		s.Options = &defaults
	}
	t := &task{Task: s, order: q.last}
	q.insert(t)
	return t
}

// insert adds a task, which waits.
func (q *Queue) insert(t *task) {
	q.tasks[t.ID] = t
	t.Group.known++
	q.counts[Waiting]++
	q.account(t.ID.Client).tasks++
	q.charge(t, 1)
	q.need(t)
}

// need counts the task as one that needs its arguments.
func (q *Queue) need(t *task) {
	for _, id := range t.Needs {
		if n := q.tasks[id]; n != nil {
			n.users++
		}
	}
	for _, o := range t.Objects {
		q.use(o, 1)
	}
}

// await makes a task wait for what it needs.
func (q *Queue) await(now time.Time, t *task) {
	t.missing = 0
	for _, id := range t.Needs {
		n := q.tasks[id]
		switch {
		case n == nil:
			q.finish(now, t, Result{State: Failed, Failure: Dependency, Text: "a task whose result is an argument is not known any more"})
			return
		case n.state == Failed || n.state == Cancelled:
			q.finish(now, t, depends(n))
			return
		}
		if !n.state.Over() {
			n.rest().waiters = append(n.rest().waiters, t)
			t.missing++
		} else if n.result.Size > 0 {
			q.needObject(now, t, n.result.Object)
		}
		if t.state.Over() {
			return
		}
	}
	for _, o := range t.Objects {
		q.needObject(now, t, o)
		if t.state.Over() {
			return
		}
	}
	if t.missing == 0 {
		q.ready(now, t)
	}
}

// depends is the result of a task that needs one which has failed. All tasks behind the one that
// has failed first have the same text, in the same memory, however many there are.
func depends(n *task) Result {
	text := n.result.Text
	if n.state == Cancelled || n.result.Failure != Dependency {
		text = DependsOn(n.Group.Name(), n.ID.N, n.state, text)
	}
	return Result{State: Failed, Failure: Dependency, Text: text}
}

// maxRoot bounds, in bytes, the text of a task in those of the tasks that depend on it: a hundred
// thousand may.
const maxRoot = 400

// DependsOn is the text of a task that depends on one which has failed or was cancelled, whether
// directly or through others.
func DependsOn(function string, n uint64, state State, text string) string {
	of := fmt.Sprintf("task %d of %s, on which it depends, ", n, function)
	if state == Cancelled {
		return of + "was cancelled"
	}
	return of + "has failed: " + Cut(text, maxRoot)
}

// Cut returns a text of at most so many bytes, and at least 50, which says how many more there
// were. It is UTF-8, as texts of messages must be.
func Cut(text string, most int) string {
	const saying = 40 // bytes of what says so
	if len(text) <= most {
		return strings.ToValidUTF8(text, "?")
	}
	kept := most - saying
	for kept > 0 && most-saying-kept < utf8.UTFMax && !utf8.RuneStart(text[kept]) {
		kept--
	}
	return fmt.Sprintf("%s… (%d bytes more)", strings.ToValidUTF8(text[:kept], "?"), len(text)-kept)
}

// shareText has a task that fails for another share the other's text, which came from a journal or
// a client.
func (q *Queue) shareText(t *task, r *Result) {
	for _, id := range t.Needs {
		if n := q.tasks[id]; r.Failure == Dependency && n != nil && n.more != nil && n.result.Text == r.Text {
			r.Text = n.result.Text
		}
	}
}

// ready puts a task into its line, and finds a worker for it.
func (q *Queue) ready(now time.Time, t *task) {
	if t.Pin != 0 {
		if why := q.workers[t.Pin].refuses(t.Group); why != "" {
			q.finish(now, t, Result{State: Failed, Failure: NoMember, Text: why})
			return
		}
	}
	q.move(t, Ready)
	of := t.Group.shares[t.ID.Client]
	if of == nil {
		of = &share{client: q.account(t.ID.Client), lines: map[string]*line{}}
		t.Group.shares[t.ID.Client] = of
	}
	name := q.lineOf(t)
	if t.in = of.lines[name]; t.in == nil {
		t.in = &line{name: name}
		of.lines[name] = t.in
	}
	heap.Push(t.in, t)
	of.waiting++
	t.Group.waiting++
	q.offer(now, t)
}

// lineOf returns the line of a task: of the worker or the host that it prefers.
func (q *Queue) lineOf(t *task) string {
	if t.Pin != 0 {
		return pinned(t.Pin)
	}
	if t.Prefer != "" || len(t.Objects) == 0 && len(t.Needs) == 0 {
		return t.Prefer
	}
	bytes := map[string]int64{}
	for _, o := range q.inputs(t) {
		for h := range o.hosts {
			bytes[h] += o.size
		}
	}
	best := ""
	for h, n := range bytes {
		if h != "" && (best == "" || n > bytes[best] || n == bytes[best] && h < best) {
			best = h
		}
	}
	return best
}

// leave removes a ready task from its line.
func (q *Queue) leave(t *task) {
	heap.Remove(t.in, int(t.place))
	of := t.Group.shares[t.ID.Client]
	if t.in.Len() == 0 {
		delete(of.lines, t.in.name)
	}
	if of.waiting--; of.waiting == 0 {
		delete(t.Group.shares, t.ID.Client)
	}
	t.in = nil
	t.Group.waiting--
}

// move counts a change of a task's state.
func (q *Queue) move(t *task, to State) {
	q.counts[t.state]--
	if t.state == Sent {
		q.account(t.ID.Client).sent--
	}
	t.state = to
	if to == Sent {
		q.account(t.ID.Client).sent++
	}
	q.counts[to]++
}

// finish ends a task, and goes on with those that need it.
func (q *Queue) finish(now time.Time, t *task, r Result) {
	if t.state == Ready {
		q.leave(t)
	}
	q.unsuspend(t)
	q.settle(t)
	q.Over = append(q.Over, t.ID)
	t.Group.at = now
	old := t.rest().old
	q.shareText(t, &r)
	q.charge(t, -1)
	q.move(t, r.State)
	t.result, t.worker, t.again, t.old, t.early = r, nil, false, nil, nil
	if r.Size == 0 {
		t.Spec = nil // it does not run again
	}
	q.charge(t, 1)
	if r.Size > 0 {
		q.made(t, r) // and what it needs is kept, so that it can be made again
	} else {
		q.unneed(t)
	}
	if !t.released {
		q.do(Action{What: Tell, Task: t.ID})
	}
	q.finished = append(q.finished, finished{t, t.waiters, old})
	t.waiters = nil
	if len(q.finished) > 1 {
		return // a caller above goes on with it: chains are long
	}
	for i := 0; i < len(q.finished); i++ {
		f := q.finished[i]
		q.finished[i] = finished{}
		q.follow(now, f)
	}
	if q.finished = q.finished[:0]; cap(q.finished) > 1<<16 {
		q.finished = nil
	}
}

// finished is a task that has ended, those that waited for it, and the stored result for whose sake
// it ran.
type finished struct {
	*task
	waiters []*task
	old     *object
}

// follow goes on with the tasks that need one which has ended.
func (q *Queue) follow(now time.Time, f finished) {
	t, old := f.task, f.old
	for _, w := range f.waiters {
		q.supplied(now, w, t)
	}
	if old != nil {
		old.again = false
		for _, w := range old.takeWants() {
			q.supplied(now, w, t)
		}
		q.drop(old)
	}
	q.forget(t)
}

// supplied goes on with a task for which a result was missing.
func (q *Queue) supplied(now time.Time, w, by *task) {
	if w.state != Waiting {
		return
	}
	if !by.state.Over() { // its stored result was lost meanwhile, and it runs again
		by.waiters = append(by.waiters, w)
		return
	}
	if by.state != Succeeded {
		q.finish(now, w, depends(by))
		return
	}
	if w.missing--; w.missing > 0 {
		return
	}
	if w.more != nil && w.early != nil {
		q.finish(now, w, *w.early)
		return
	}
	q.ready(now, w)
}

// unneed gives back what a task needed that is over.
func (q *Queue) unneed(t *task) {
	for _, id := range t.Needs {
		if n := q.tasks[id]; n != nil && n.users > 0 {
			n.users--
			q.forget(n)
		}
	}
	for _, o := range t.Objects {
		q.use(o, -1)
	}
}

// forget removes a task that nobody needs any more.
func (q *Queue) forget(t *task) {
	if !t.state.Over() || !t.released || t.users > 0 || q.tasks[t.ID] != t {
		return
	}
	q.charge(t, -1)
	delete(q.tasks, t.ID)
	t.Group.known--
	q.counts[t.state]--
	q.close(t.ID.Client)
	if t.result.Size > 0 {
		q.unmade(t)
		q.unneed(t)
	}
}

// Release says that the client needs the result of a task no more. One that is not over is
// cancelled.
func (q *Queue) Release(now time.Time, id ID) {
	t := q.tasks[id]
	if t == nil || t.released {
		return
	}
	a := q.account(id.Client)
	paused := q.paused(a)
	q.charge(t, -1)
	t.released = true
	q.charge(t, 1)
	if paused && !q.paused(a) {
		defer q.goOn(now, id.Client)
	}
	if !t.state.Over() && t.users == 0 {
		q.Cancel(now, id)
		return
	}
	q.forget(t)
}

// Cancel ends a task. One that runs is over at once for its client; its worker is told to end the
// attempt.
func (q *Queue) Cancel(now time.Time, id ID) {
	t := q.tasks[id]
	if t == nil || t.state.Over() {
		return
	}
	q.end(now, t, Result{State: Cancelled, Text: "it was cancelled"})
}

// Ended says what a client knows to have become of a task: a queue before this one has told it, and
// did not live to write it down. It does not run again, and nothing else becomes of it. A stored
// result is made again instead.
func (q *Queue) Ended(now time.Time, id ID, r Result) {
	if t := q.tasks[id]; t != nil && !t.state.Over() && !t.again && r.State.Over() && r.Size == 0 {
		q.end(now, t, r)
	}
}

// end ends a task wherever it is.
func (q *Queue) end(now time.Time, t *task, r Result) {
	if t.state == Sent {
		w := t.worker
		why := "cancelled"
		if r.State != Cancelled {
			why = "over"
		}
		q.stop(now, t, why)
		q.begin(now, w)
		defer q.fill(now, w)
	}
	q.finish(now, t, r)
}

// Result returns what became of a task that is over, or that was and runs again for the sake of its
// stored result.
func (q *Queue) Result(id ID) (Result, bool) {
	t := q.tasks[id]
	if t != nil && !t.state.Over() && t.more != nil && t.old != nil {
		return Result{State: Succeeded, Object: t.old.id, Size: t.old.size}, true
	}
	if t == nil || !t.state.Over() {
		return Result{}, false
	}
	return t.result, true
}

// Known returns whether there is a task.
func (q *Queue) Known(id ID) bool { return q.tasks[id] != nil }

// Spec returns the Spec of a task, or nil.
func (q *Queue) Spec(id ID) []byte {
	if t := q.tasks[id]; t != nil {
		return t.Spec
	}
	return nil
}

// Tasks returns the IDs of a client's tasks, in the order of their numbers.
func (q *Queue) Tasks(client uint64) []ID {
	var ids []ID
	for id := range q.tasks {
		if id.Client == client {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b ID) int {
		if a.N < b.N {
			return -1
		}
		return 1
	})
	return ids
}

// OptionsOf returns the options of a task.
func (q *Queue) OptionsOf(id ID) Options {
	if t := q.tasks[id]; t != nil {
		return *t.Options
	}
	return defaults
}
