package scaler

import (
	"bytes"
	"crypto/md5"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// core decides what a worker does. It has no goroutine, lock, clock or socket: its methods are told
// what has happened, and leave what is to be done in out, which its owner takes.
type core struct {
	cfg Config
	id  []byte // identity of the connection, nil without one
	out actions

	jobs    map[string]*job // by task
	runs    map[uint64]*job // those that run, of tasks taken back too
	queued  queue
	fetched int // jobs that wait for objects, or are about to run
	ready   queue
	numbers uint64

	store    *store
	requests []request         // those without an answer, in order
	wanted   map[string][]*job // by object

	outbox
	answers answers
	beat    beat
	leaving bool
}

// outbox is the results that the scheduler may not have.
type outbox struct {
	sent []sent
	held int // bytes of them
}

// keep keeps a result.
func (o *outbox) keep(s sent) {
	o.sent = append(o.sent, s)
	o.held += s.bytes
}

// heard forgets the results that were sent before as many heartbeats.
func (o *outbox) heard(beats uint64) {
	n := 0
	for n < len(o.sent) && o.sent[n].beats < beats {
		o.held -= o.sent[n].bytes
		n++
	}
	clear(o.sent[:n])
	o.sent = o.sent[n:]
}

// answers are the tasks of a connection that have had an answer: of many, the last ones.
type answers struct {
	tasks map[string]bool
	order []string // the oldest first
}

// add remembers that a task has had an answer.
func (a *answers) add(task []byte) {
	if a.tasks[string(task)] {
		return
	}
	if len(a.order) == maxAnswers {
		delete(a.tasks, a.order[0])
		a.order = a.order[1:]
	}
	if a.tasks == nil {
		a.tasks = make(map[string]bool)
	}
	a.tasks[string(task)] = true
	a.order = append(a.order, string(task))
}

// forget is for a task that comes again.
func (a *answers) forget(task []byte) { delete(a.tasks, string(task)) }

// actions are for core's owner to do.
type actions struct {
	send  []Message
	start []start
	stop  []uint64 // runs whose context is to end
	note  []string // for the log
	// broken asks for another connection.
	broken bool
}

// start asks for a call.
type start struct {
	run  uint64
	fn   Func
	args [][]byte
}

// job is a task that this worker has.
type job struct {
	task   *Task
	number uint64 // rises with each job
	place  int    // in a queue
	state  jobState
	// missing are objects that have not come; used are those that have.
	missing int
	used    map[string]*object
	// canceled says that the client wants no result. The call goes on until it returns.
	canceled bool
}

type jobState int

const (
	isQueued jobState = iota
	isFetching
	isReady
	isRunning
	isOver // taken back while it ran, or done
)

// request is an ObjectRequest without an answer.
type request struct{ ids [][]byte }

// sent is a result. It is kept until the scheduler has answered a heartbeat sent after it, and is
// sent again on another connection.
type sent struct {
	messages []Message
	bytes    int
	beats    uint64 // heartbeats that were sent before it
}

// beat is the state of heartbeats.
type beat struct {
	count   uint64    // heartbeats so far
	waiting bool      // for an echo of the last one
	last    time.Time // when it was sent
	contact time.Time // last echo, or the beginning
	latency time.Duration
}

const (
	// maxJobs bounds the tasks that a scheduler may give a worker: a hundred times what Scaler's
	// gives by default.
	maxJobs = 100_000
	// maxAnswers bounds the tasks that are known to have had an answer.
	maxAnswers = 1 << 16
	// maxHeld is how many bytes of results wait for an echo before the next heartbeat comes early.
	maxHeld = 8 << 20
)

func newCore(cfg Config, now time.Time) *core {
	return &core{
		cfg: cfg, jobs: make(map[string]*job), runs: make(map[uint64]*job),
		store: newStore(cfg.Cache), wanted: make(map[string][]*job), beat: beat{contact: now},
	}
}

// take returns what is to be done.
func (c *core) take() actions {
	a := c.out
	c.out = actions{}
	return a
}

func (c *core) send(m ...Message) {
	if c.id != nil {
		c.out.send = append(c.out.send, m...)
	}
}

func (c *core) notef(format string, args ...any) {
	c.out.note = append(c.out.note, fmt.Sprintf(format, args...))
}

// connected reports a connection with a new identity. A router keeps the old one for as long as it
// does not know that it has gone, and refuses another connection of the same name. The results that
// may be lost come first, then the scheduler gives the tasks of the old identity to others.
func (c *core) connected(now time.Time, id []byte, old []byte, u usage) {
	c.id = id
	for _, s := range c.sent {
		c.send(s.messages...)
	}
	for i := range c.sent {
		c.sent[i].beats = c.beat.count
	}
	if old != nil {
		c.send(&DisconnectRequest{old})
	}
	c.beat.waiting = false
	c.heartbeat(now, u)
}

// disconnected drops what the scheduler gives to others. What runs goes on: the results are right
// whoever has the task then.
func (c *core) disconnected() {
	c.id = nil
	c.requests, c.answers = nil, answers{}
	clear(c.wanted)
	for id, j := range c.jobs {
		if j.state != isRunning {
			c.forget(id, j)
		}
	}
}

// forget removes a job that does not run.
func (c *core) forget(id string, j *job) {
	switch j.state {
	case isQueued:
		c.queued.remove(j)
	case isReady:
		c.ready.remove(j)
		c.fetched--
	case isFetching:
		c.fetched--
	}
	c.over(id, j)
}

func (c *core) over(id string, j *job) {
	j.state = isOver
	for _, o := range j.used {
		c.store.release(o)
	}
	j.used = nil
	if c.jobs[id] == j {
		delete(c.jobs, id)
	}
}

// message reports what the scheduler has sent.
func (c *core) message(now time.Time, m Message) {
	switch m := m.(type) {
	case *Task:
		c.task(m)
	case *TaskCancel:
		c.cancel(m)
	case *ObjectInstruction:
		if m.Kind != Delete {
			c.notef("the scheduler sends an object instruction %q, which is not for workers", m.Kind)
			return
		}
		for _, id := range m.IDs {
			c.store.delete(string(id))
		}
	case *ObjectResponse:
		c.objects(m)
	case *HeartbeatEcho:
		c.echo(now)
	case *Disconnect:
		c.leaving = c.leaving || m.Kind == Shutdown
	case *DisconnectResponse:
	default:
		c.notef("the scheduler sends a message of type %s, which is not for workers", m.kind())
	}
}

func (c *core) task(t *Task) {
	if c.leaving {
		return // the scheduler gets it back with all others
	}
	if j := c.jobs[string(t.ID)]; j != nil {
		// It runs since before the connection broke, or has come twice: one result serves.
		j.canceled = false
		return
	}
	if len(c.jobs) >= maxJobs {
		c.notef("task %x is given back: there are %d already", t.ID, len(c.jobs))
		c.send(&TaskResult{ID: t.ID, Status: Canceled, Profile: Profile{Absent: true}})
		return
	}
	c.numbers++
	j := &job{task: t, number: c.numbers}
	c.jobs[string(t.ID)] = j
	c.answers.forget(t.ID)
	c.queued.add(j)
	c.advance()
}

// advance fetches for the next jobs, and starts as many as there are slots.
func (c *core) advance() {
	for {
		switch {
		case len(c.ready) > 0 && len(c.runs) < c.cfg.Slots:
			c.start(c.ready.next())
		case len(c.queued) > 0 && c.fetched < c.cfg.Slots:
			c.fetch(c.queued.next())
		default:
			return
		}
	}
}

// fetch asks for the objects of a job that are not here.
func (c *core) fetch(j *job) {
	j.state = isFetching
	c.fetched++
	j.used = make(map[string]*object)
	for _, a := range j.task.Args {
		if a.Kind != ArgObject {
			c.fail(j, &CallError{"ValueError", "an argument is the result of another task: the scheduler has not filled it in"})
			return
		}
	}
	var ask [][]byte
	need := func(id []byte) {
		key := string(id)
		if j.used[key] != nil {
			return
		}
		if o := c.store.use(key); o != nil {
			j.used[key] = o
			return
		}
		waiting := c.wanted[key]
		for _, other := range waiting {
			if other == j {
				return
			}
		}
		if len(waiting) == 0 {
			ask = append(ask, id)
		}
		c.wanted[key] = append(waiting, j)
		j.missing++
	}
	need(j.task.Function)
	for _, a := range j.task.Args {
		need(a.ID)
	}
	if len(ask) > 0 {
		c.ask(ask)
	}
	c.arrived(j)
}

func (c *core) ask(ids [][]byte) {
	c.requests = append(c.requests, request{ids})
	c.send(&ObjectRequest{IDs: ids})
}

// arrived makes a job ready that misses nothing.
func (c *core) arrived(j *job) {
	if j.state == isFetching && j.missing == 0 {
		j.state = isReady
		c.ready.add(j)
	}
}

// objects reports an answer. The IDs of an answer are those of its request; where some are missing
// it does not say which, so that each is asked for alone.
func (c *core) objects(m *ObjectResponse) {
	at := -1
	for i, r := range c.requests {
		if equal(r.ids, m.IDs) {
			at = i
			break
		}
	}
	if at < 0 {
		c.notef("the scheduler sends %d objects that were not asked for", len(m.IDs))
		return
	}
	c.requests = append(c.requests[:at:at], c.requests[at+1:]...)
	switch {
	case m.Kind == Content && len(m.Contents) == len(m.IDs):
		for i, id := range m.IDs {
			c.object(string(id), bytes.Clone(m.Contents[i]))
		}
	case len(m.IDs) == 1:
		c.lost(string(m.IDs[0]), &CallError{"LookupError", fmt.Sprintf("the scheduler does not have the object %x", m.IDs[0])})
	default:
		c.askEach(m.IDs)
	}
	c.advance()
}

func (c *core) askEach(ids [][]byte) {
	for _, id := range ids {
		if len(c.wanted[string(id)]) > 0 {
			c.ask([][]byte{id})
		}
	}
}

// tooLarge reports an answer that was larger than a message may be: the first that is due, as
// answers come in the order of the requests.
func (c *core) tooLarge(err error) {
	if len(c.requests) == 0 {
		return
	}
	ids := c.requests[0].ids
	c.requests = c.requests[1:]
	if len(ids) == 1 {
		c.lost(string(ids[0]), &CallError{"MemoryError", fmt.Sprintf("the object %x: %v", ids[0], err)})
	} else {
		c.askEach(ids)
	}
	c.advance()
}

func equal(a, b [][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

func (c *core) object(id string, content []byte) {
	c.store.put(id, content)
	for _, j := range c.unwant(id) {
		if j.state == isFetching {
			j.used[id] = c.store.use(id)
			j.missing--
			c.arrived(j)
		}
	}
	c.store.trim()
}

func (c *core) lost(id string, why *CallError) {
	for _, j := range c.unwant(id) {
		if j.state == isFetching {
			c.fail(j, why)
		}
	}
}

func (c *core) unwant(id string) []*job {
	waiting := c.wanted[id]
	delete(c.wanted, id)
	return waiting
}

// start starts a call, if the task names a function.
func (c *core) start(j *job) {
	c.fetched--
	j.state = isRunning
	fn, err := c.cfg.find(j.used[string(j.task.Function)].content)
	if err != nil {
		c.fail(j, err)
		return
	}
	args := make([][]byte, len(j.task.Args))
	for i, a := range j.task.Args {
		args[i] = j.used[string(a.ID)].content
	}
	c.runs[j.number] = j
	c.out.start = append(c.out.start, start{j.number, fn, args})
}

// finished tells that a call has returned.
func (c *core) finished(run uint64, result []byte, err error, p Profile) {
	j := c.runs[run]
	delete(c.runs, run)
	switch {
	case j.state == isOver: // taken back
	case c.leaving: // the scheduler gets the task back
		c.over(string(j.task.ID), j)
	case j.canceled:
		c.over(string(j.task.ID), j)
		c.report(nil, &TaskResult{ID: j.task.ID, Status: Canceled, Profile: Profile{Absent: true}})
	default:
		c.result(j, result, err, p)
	}
	if !c.leaving {
		c.advance()
	}
}

// fail ends a job that has not begun.
func (c *core) fail(j *job, err error) {
	if j.state == isFetching {
		c.fetched--
	}
	c.result(j, nil, err, Profile{Absent: true})
}

// result sends what a task has come to: the object first, then the result that names it.
func (c *core) result(j *job, content []byte, err error, p Profile) {
	status := Success
	if err != nil {
		status, content = Failed, exceptionOf(err)
	}
	c.numbers++
	id := c.resultID(j.task)
	name := fmt.Appendf(nil, "<res %x>", id[:3])
	c.report(
		&ObjectInstruction{Kind: Create, User: j.task.Source, Objects: Objects{[][]byte{id}, [][]byte{name}, [][]byte{content}}},
		&TaskResult{ID: j.task.ID, Status: status, Profile: p, Results: [][]byte{id}},
	)
	c.over(string(j.task.ID), j)
}

// resultID returns an id that no other result has.
func (c *core) resultID(t *Task) []byte {
	unique := md5.Sum(binary.BigEndian.AppendUint64(append(append([]byte{}, c.cfg.unique...), t.ID...), c.numbers))
	return ObjectID(t.Source, unique[:])
}

func exceptionOf(err error) []byte {
	if call, ok := errors.AsType[*CallError](err); ok {
		return Exception(call.Class, call.Text)
	}
	return Exception("RuntimeError", err.Error())
}

// report sends a result and keeps it until the scheduler has it.
func (c *core) report(object *ObjectInstruction, r *TaskResult) {
	s := sent{messages: []Message{r}, bytes: 128, beats: c.beat.count}
	if object != nil {
		s.messages = []Message{object, r}
		s.bytes += len(object.Contents[0])
	}
	c.keep(s)
	c.answers.add(r.ID)
	c.send(s.messages...)
}

// cancel takes a task back: without force for its client, with force for another worker. A client
// always gets an answer, even where the result has gone out: the scheduler has dropped that. A
// second answer to the scheduler would be taken for one of the worker that has the task now, so
// that a task which was given back, or has a result, gets none.
func (c *core) cancel(m *TaskCancel) {
	j := c.jobs[string(m.ID)]
	if j == nil && m.Force && c.answers.tasks[string(m.ID)] {
		return
	}
	answer := &TaskResult{ID: m.ID, Status: Canceled, Profile: Profile{Absent: true}}
	if j != nil && m.Retrieve {
		answer.Results = j.task.encode()
	}
	switch {
	case j == nil:
		answer.Status = NotFound
	case j.state != isRunning:
		c.forget(string(m.ID), j)
	case m.Force:
		c.out.stop = append(c.out.stop, j.number)
		c.over(string(m.ID), j)
	default: // it is answered when the call returns
		c.out.stop = append(c.out.stop, j.number)
		j.canceled = true
		return
	}
	if m.Force {
		c.answers.add(m.ID)
		c.send(answer) // another connection begins with a DisconnectRequest, which serves as well
	} else {
		c.report(nil, answer)
	}
	c.advance()
}
