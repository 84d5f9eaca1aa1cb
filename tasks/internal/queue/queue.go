// Package queue decides which worker runs which task. It is pure: it has no goroutine, lock, clock
// or socket. Callers pass the time and report what has happened by the methods of a Queue; the
// Actions to perform accumulate in Out.
//
// A task passes through the states of State. It first waits for the tasks whose results are its
// arguments, and then in a line of its group. A group consists of the tasks of one function with
// the same demand. Before the queue sends tasks of a group to a worker, it asks the worker for a
// lease of the group. The lease lasts while the worker is busy with the group and for leaseIdle
// after that, so that the queue does not ask for each task. The queue sends a worker the tasks that
// it can run at once and, in addition, as many as it runs in a short time. It takes back tasks that
// have not begun when another worker is idle.
package queue

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// ID identifies a task by its client and a number that the client assigns.
type ID struct{ Client, N uint64 }

// Object identifies a stored value by the SHA-256 hash of its bytes.
type Object [32]byte

// State is the state of a task.
type State uint8

// The states of a task.
const (
	Waiting   State = iota // waits for results that are its arguments
	Ready                  // waits for a worker
	Sent                   // sent to a worker, which runs it or will run it
	Succeeded              // has succeeded: its result is known
	Failed
	Cancelled
)

// String returns the name of the state for users.
func (s State) String() string {
	return [...]string{"waiting", "ready", "running", "succeeded", "failed", "cancelled"}[s]
}

// Over reports whether the state is final.
func (s State) Over() bool { return s >= Succeeded }

// Failure is the reason why a task has failed.
type Failure uint8

// The reasons.
const (
	None       Failure = iota
	ByUser             // the function has returned an error or has panicked
	Lost               // its worker was lost in each attempt
	Poison             // it has caused the loss of as many workers as a task may
	Dependency         // a task whose result is its argument has failed
	TimedOut           // it has run longer than its time limit
	Gone               // a stored argument is lost and cannot be computed again
	NoMember           // the only worker that may run it is gone
	Full               // there was no memory for its result
)

// Result is the outcome of a task.
type Result struct {
	State   State
	Failure Failure
	// Text is the text of the error. Value is the encoded result, unless that is stored as Object,
	// or the stack of a function that has panicked.
	Text   string
	Value  []byte
	Object Object
	Size   int64 // size of the stored result; 0: it is not stored
}

// Task is a task as its client requests it. It is immutable.
type Task struct {
	ID       ID
	Group    *Group // from Queue.Group
	Priority int32  // tasks with a greater priority run first
	Cost     int32  // number of bytes that it takes while it is unfinished
	// Options are options that most tasks do not set; nil: the defaults.
	*Options
	// Spec is what the caller of this package needs to send the task to a worker.
	Spec []byte
}

// Options are the options of a task. They are immutable and may be shared.
type Options struct {
	Prefer string // preferred host; "": the one that stores most of its arguments
	// Pin is the only worker that may run the task; 0: any worker.
	Pin     uint64
	Needs   []ID     // tasks whose results are its arguments
	Objects []Object // stored values that are its arguments
	// Retries is how often the task may run again after its worker was lost.
	Retries int
	// Again means that the task may also run again, equally often, after its function has failed.
	Again bool
	// TimeLimit is how long the task may run. 0: no limit.
	TimeLimit time.Duration
}

// defaults are the options of a task that sets none.
var defaults = Options{Retries: DefaultRetries}

// DefaultRetries is how often a task runs again after its worker was lost.
const DefaultRetries = 3

// Config bounds the queue. The zero value stands for the defaults.
type Config struct {
	// Term is the number of this queue among the queues of the same journal.
	Term uint32
	// Rebuilds bounds the depth to which lost results are computed again. 0: 16.
	Rebuilds int
	// Grace is how long an attempt may continue after it was asked to stop, before its worker is
	// ended. 0: forever.
	Grace time.Duration
	// Unread is the number of bytes of unread results of a client beyond which its tasks wait. 0:
	// any number.
	Unread int64
}

const (
	leaseIdle  = 500 * time.Millisecond // how long a lease lasts without a task
	leaseReply = 2 * time.Second        // how long a worker may take to answer
	leaseAgain = time.Second            // how long after a refusal a worker is asked again
	ahead      = 2 * time.Millisecond   // run time of the tasks that are sent ahead to a worker
	// mostLost is the number of workers that may be lost while they run a task.
	mostLost = 3
	// mostAhead is the largest number of tasks that are sent ahead to a worker.
	mostAhead = 1000
)

// Action is something for the caller to do.
type Action struct {
	What    What
	Worker  uint64
	Task    ID
	Attempt uint64
	Group   *Group
	Object  Object
	Host    string
	Confirm bool // for Push: the worker must report when it begins the task
}

// What is the kind of an Action.
type What uint8

// The actions.
const (
	Push     What = iota // send the task to the worker
	Ask                  // ask the worker for a lease of the group
	TakeBack             // ask the worker for the task, if it has not begun
	Stop                 // tell the worker to stop the attempt
	Tell                 // tell the client the outcome of the task
	Drop                 // remove the object from the host
	End                  // end the worker's process, because the attempt does not end
)

// Group is the tasks of one function with the same demand.
type Group struct {
	Function string
	Demand   Demand
	Index    int               // index among all groups, from 0
	shares   map[uint64]*share // by client
	waiting  int               // number of ready tasks
	known    int               // number of known tasks, including finished ones
	at       time.Time         // when the last task was submitted or ended
	pace     time.Duration     // moving average of the run time of a task; 0: unknown
}

// line is a heap of ready tasks.
type line struct {
	name  string
	tasks []*task
}

func (l *line) Len() int { return len(l.tasks) }
func (l *line) Less(i, j int) bool {
	return before(l.tasks[i], l.tasks[j])
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

// task is a task with its state. There may be a million, so fields that few tasks need are in more.
type task struct {
	Task
	in      *line  // the line in which it is ready
	attempt        // set while it is sent
	order   uint64 // of arrival
	place   int32  // index in its line
	missing int32  // number of results and stored values that it waits for
	users   int32  // number of unfinished tasks that need its result
	state   State
	attempts
	depth    uint8 // depth in a chain of results that are computed again
	released bool  // the client no longer needs the result
	again    bool  // it runs only to make its stored result again
	// suspended means that the task was restored and has not been resumed. restored means that it
	// was restored and has not been over since.
	suspended, restored bool
	*more
}

// attempt is a task's last attempt, from the moment when it is sent to a worker until the worker is
// done with it.
type attempt struct {
	worker  *worker // the worker to which it was sent
	number  uint64  // unique among the attempts of the queue
	waits   int32   // above 0: its function waits for other tasks, and has lent its processors
	taking  bool    // its worker was asked to give it back, to run elsewhere
	unsure  bool    // its worker must report when it begins, and has not yet
	stopped bool    // it was asked to stop, and no longer belongs to a task
}

// of returns the unfinished task whose last attempt is h on the given worker, or nil.
func (q *Queue) of(worker uint64, h Held) *task {
	t := q.tasks[h.ID]
	if t == nil || t.state != Sent || t.number != h.Attempt || t.worker.ID != worker {
		return nil
	}
	return t
}

// more holds fields that few tasks need for long.
type more struct {
	waiters []*task // tasks that wait for its result
	result  Result
	early   *Result  // its result, if it has run but tasks that it needs are not over
	old     *object  // the lost stored result that the task runs again to make
	killers []string // names of workers that were lost while they ran it
	began   time.Time
}

// rest returns t.more, which it creates if necessary.
func (t *task) rest() *more {
	if t.more == nil {
		t.more = &more{}
	}
	return t.more
}

// Queue holds all tasks, workers and stored values. It is not safe for concurrent use.
type Queue struct {
	// Out are the actions to perform, in order. The caller empties it.
	Out []Action
	// Next is when Tick must be called; zero: not before the next change.
	Next time.Time
	// Over are tasks that have ended. Losses are tasks that have lost a worker and will run again.
	// The caller empties both.
	Over, Losses []ID

	cfg      Config
	tasks    map[ID]*task
	objects  map[Object]*object
	last     uint64             // order of the last task
	tries    uint64             // number of attempts so far
	counts   [Cancelled + 1]int // number of tasks by state
	retried  int
	finished []finished // tasks that have ended, until follow has continued those that need them
	groups
	crew
	ledger
	earlier
}

// groups are the groups of tasks. They are never deleted.
type groups struct {
	byKey map[groupKey]*Group
	order []*Group // in the order of creation
}

type groupKey struct{ function, demand string }

// New returns an empty queue.
func New(cfg Config) *Queue {
	if cfg.Rebuilds <= 0 {
		cfg.Rebuilds = 16
	}
	return &Queue{
		cfg: cfg, tasks: map[ID]*task{}, objects: map[Object]*object{}, groups: groups{byKey: map[groupKey]*Group{}},
		crew: crew{workers: map[uint64]*worker{}}, ledger: ledger{accounts: map[uint64]*account{}},
	}
}

// due makes the caller call Tick at the given time, or earlier.
func (q *Queue) due(at time.Time) {
	if q.Next.IsZero() || at.Before(q.Next) {
		q.Next = at
	}
}

func (q *Queue) do(a Action) { q.Out = append(q.Out, a) }

// Group returns the group of a function's tasks with the given demand, which it creates if
// necessary.
func (all *groups) Group(function string, d Demand) *Group {
	key := groupKey{function, d.String()}
	g := all.byKey[key]
	if g == nil {
		g = &Group{Function: function, Demand: d, Index: len(all.order), shares: map[uint64]*share{}}
		all.byKey[key] = g
		all.order = append(all.order, g)
	}
	return g
}

// GroupAt returns the group with the given index, or nil.
func (all *groups) GroupAt(index int) *Group {
	if index < 0 || index >= len(all.order) {
		return nil
	}
	return all.order[index]
}

// Submit adds a task. If the queue knows the task already, it sends the client the outcome again
// once the task is over.
func (q *Queue) Submit(now time.Time, s Task) {
	if t := q.add(s); t != nil {
		t.Group.at = now
		q.await(now, t)
	}
}

// SubmitEnded is like Submit followed by Ended. Tasks and values that the task needs may be
// unknown.
func (q *Queue) SubmitEnded(now time.Time, s Task, r Result) {
	if t := q.add(s); t != nil && r.State.Over() && r.Size == 0 {
		q.finish(now, t, r)
	} else if t != nil {
		q.await(now, t)
	} else {
		q.Ended(now, s.ID, r)
	}
}

// add adds a task and returns it, or nil if the task is known already.
func (q *Queue) add(s Task) *task {
	if t := q.tasks[s.ID]; t != nil {
		if t.state.Over() {
			q.do(Action{What: Tell, Task: s.ID})
		}
		return nil
	}
	return q.insert(s)
}

// insert adds a task in the state Waiting.
func (q *Queue) insert(s Task) *task {
	if s.Options == nil {
		s.Options = &defaults
	}
	q.last++
	t := &task{Task: s, order: q.last}
	q.tasks[t.ID] = t
	t.Group.known++
	q.counts[Waiting]++
	q.account(t.ID.Client).tasks++
	q.charge(t, 1)
	q.need(t)
	return t
}

// need counts the task as a user of its arguments.
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

// await makes a task wait for what it needs, or makes it ready if nothing is missing. It ends the
// task if something that it needs has failed or is lost.
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

// depends returns the result of a task that depends on n, which has failed or was cancelled. All
// tasks that depend, directly or indirectly, on the same failed task share one text in memory,
// however many there are.
func depends(n *task) Result {
	text := n.result.Text
	if n.state == Cancelled || n.result.Failure != Dependency {
		text = DependsOn(n.Group.Name(), n.ID.N, n.state, text)
	}
	return Result{State: Failed, Failure: Dependency, Text: text}
}

// maxRoot bounds, in bytes, the text of a failed task within the texts of tasks that depend on it,
// of which there may be a hundred thousand.
const maxRoot = 400

// DependsOn returns the error text of a task that depends, directly or through others, on a task
// that has failed or was cancelled.
func DependsOn(function string, n uint64, state State, text string) string {
	of := fmt.Sprintf("task %d of %s, on which it depends, ", n, function)
	if state == Cancelled {
		return of + "was cancelled"
	}
	return of + "has failed: " + Cut(text, maxRoot)
}

// Cut shortens a text that has more than most bytes, which must be at least 50. The result has up
// to most bytes, including a note of how many bytes are missing. The result is valid UTF-8, as
// messages require.
func Cut(text string, most int) string {
	const saying = 40 // length of the note
	if len(text) <= most {
		return strings.ToValidUTF8(text, "?")
	}
	kept := most - saying
	for kept > 0 && most-saying-kept < utf8.UTFMax && !utf8.RuneStart(text[kept]) {
		kept--
	}
	return fmt.Sprintf("%s… (%d bytes more)", strings.ToValidUTF8(text[:kept], "?"), len(text)-kept)
}

// shareText makes r, the result of a task that fails because of another task, share the text of the
// other task's result, if r contains a copy of that text from a journal or a client.
func (q *Queue) shareText(t *task, r *Result) {
	for _, id := range t.Needs {
		if n := q.tasks[id]; r.Failure == Dependency && n != nil && n.more != nil && n.result.Text == r.Text {
			r.Text = n.result.Text
		}
	}
}

// ready puts a task into its line and finds a worker for it.
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
	q.assign(now, t)
}

// lineOf returns the key of the task's line: for the worker to which it is pinned, or for the host
// that it prefers.
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

// move changes a task's state and updates the counts.
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

// finish ends a task and continues the tasks that need it.
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
		t.Spec = nil // it will not run again
	}
	q.charge(t, 1)
	if r.Size > 0 {
		q.made(t, r) // what it needs is kept, so that it can be made again
	} else {
		q.unneed(t)
	}
	if !t.released {
		q.do(Action{What: Tell, Task: t.ID})
	}
	q.finished = append(q.finished, finished{t, t.waiters, old})
	t.waiters = nil
	if len(q.finished) > 1 {
		return // a caller further up the stack continues with it, because chains can be long
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

// finished is a task that has ended, with the tasks that waited for it and the lost stored result
// that it was run to make.
type finished struct {
	*task
	waiters []*task
	old     *object
}

// follow continues the tasks that need a task that has ended.
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

// supplied continues task w, which waited for the result of task by.
func (q *Queue) supplied(now time.Time, w, by *task) {
	if w.state != Waiting {
		return
	}
	if !by.state.Over() { // its stored result was lost meanwhile, so it runs again
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

// unneed undoes need for a task that is over.
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

// forget deletes a task if it is over and nobody needs it any more.
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

// Release records that the client no longer needs the result of a task. An unfinished task that no
// other task needs is cancelled.
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

// Cancel cancels a task. A running task is over at once for its client, and its worker is asked to
// stop the attempt.
func (q *Queue) Cancel(now time.Time, id ID) {
	t := q.tasks[id]
	if t == nil || t.state.Over() {
		return
	}
	q.end(now, t, Result{State: Cancelled, Text: "it was cancelled"})
}

// Ended records the outcome of a task that the client has from a previous queue, which died before
// it recorded the outcome. The task does not run again, and has no other outcome. Ended ignores the
// outcome if it is a stored result, which must be made again.
func (q *Queue) Ended(now time.Time, id ID, r Result) {
	if t := q.tasks[id]; t != nil && !t.state.Over() && !t.again && r.State.Over() && r.Size == 0 {
		q.end(now, t, r)
	}
}

// end ends a task in any state.
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

// Result returns the result of a task that is over, or that was over and runs again only to make
// its stored result.
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

// Task returns a task, which must not be changed, or nil if the task is unknown.
func (q *Queue) Task(id ID) *Task {
	if t := q.tasks[id]; t != nil {
		return &t.Task
	}
	return nil
}

// Tasks returns the IDs of a client's tasks, sorted by number.
func (q *Queue) Tasks(client uint64) []ID {
	var ids []ID
	for id := range q.tasks {
		if id.Client == client {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b ID) int { return cmp.Compare(a.N, b.N) })
	return ids
}
