package scaler

import (
	"bytes"
	"crypto/md5"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// core decides what a worker does. It has no goroutine, lock, clock or socket: its owner reports by
// its methods what has happened, and takes the actions to perform from out.
type core struct {
	cfg Config
	id  []byte // identity of the connection; nil: not connected
	out actions

	jobs    map[string]*job // by task ID
	runs    map[uint64]*job // jobs that run, including those that were taken back
	queued  queue
	fetched int // number of jobs that wait for objects or are ready to run
	ready   queue
	numbers uint64

	store    *store
	requests []request         // requests without an answer, in order
	wanted   map[string][]*job // by object ID

	outbox
	answers answers
	beat    beat
	leaving bool
}

// outbox holds the results that the scheduler may not have received.
type outbox struct {
	sent []sent
	held int // number of bytes of these results
}

// keep adds a result.
func (o *outbox) keep(s sent) {
	o.sent = append(o.sent, s)
	o.held += s.bytes
}

// heard removes the results that were sent before the given number of heartbeats.
func (o *outbox) heard(beats uint64) {
	n := 0
	for n < len(o.sent) && o.sent[n].beats < beats {
		o.held -= o.sent[n].bytes
		n++
	}
	clear(o.sent[:n])
	o.sent = o.sent[n:]
}

// answers are the tasks of a connection that have been answered. Only the last maxAnswers are kept.
type answers struct {
	tasks map[string]bool
	order []string // oldest first
}

// add records that a task has been answered.
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

// forget removes a task that the scheduler has sent again.
func (a *answers) forget(task []byte) { delete(a.tasks, string(task)) }

// actions are what the owner of the core must do.
type actions struct {
	send  []outgoing
	start []start
	stop  []uint64 // runs whose contexts must be cancelled
	note  []string // lines for the log
	// broken requests another connection.
	broken bool
}

// start requests a call.
type start struct {
	run  uint64
	fn   Func
	args [][]byte
}

// job is a task that this worker has.
type job struct {
	task   *task
	number uint64 // increases with each job
	place  int    // index in its queue
	state  jobState
	// missing is the number of objects that have not arrived. used are the objects that have.
	missing int
	used    map[string]*object
	// canceled means that the client does not want the result. The call continues until it returns.
	canceled bool
}

type jobState int

const (
	isQueued jobState = iota
	isFetching
	isReady
	isRunning
	isOver // taken back while it was running, or done
)

// request is an objectRequest without an answer.
type request struct{ ids [][]byte }

// sent is a result that was sent. It is kept until the scheduler has answered a heartbeat that was
// sent after it, and is sent again on another connection.
type sent struct {
	messages []outgoing
	bytes    int
	beats    uint64 // number of heartbeats sent before it
}

// beat is the state of the heartbeats.
type beat struct {
	count   uint64    // number of heartbeats sent so far
	waiting bool      // the last one has not been echoed yet
	last    time.Time // when the last one was sent
	contact time.Time // time of the last echo, or of the start
	latency time.Duration
}

const (
	// maxJobs is the largest number of tasks that a scheduler may give a worker: a hundred times
	// what Scaler's scheduler gives by default.
	maxJobs = 100_000
	// maxAnswers is the largest number of tasks remembered as answered.
	maxAnswers = 1 << 16
	// maxHeld is the number of bytes of unacknowledged results beyond which the next heartbeat is
	// sent early.
	maxHeld = 8 << 20
)

func newCore(cfg Config, now time.Time) *core {
	return &core{
		cfg: cfg, jobs: make(map[string]*job), runs: make(map[uint64]*job),
		store: newStore(cfg.Cache), wanted: make(map[string][]*job), beat: beat{contact: now},
	}
}

// take returns the actions to perform and clears them.
func (c *core) take() actions {
	a := c.out
	c.out = actions{}
	return a
}

func (c *core) send(m ...outgoing) {
	if c.id != nil {
		c.out.send = append(c.out.send, m...)
	}
}

func (c *core) notef(format string, args ...any) {
	c.out.note = append(c.out.note, fmt.Sprintf(format, args...))
}

// connected handles a new connection, which has a new identity. The router of the scheduler keeps
// the old identity until it notices that the connection has ended, and refuses another connection
// with the same identity. connected sends the results that may have been lost first, and then makes
// the scheduler give the tasks of the old identity to others.
func (c *core) connected(now time.Time, id []byte, old []byte, u usage) {
	c.id = id
	for _, s := range c.sent {
		c.send(s.messages...)
	}
	for i := range c.sent {
		c.sent[i].beats = c.beat.count
	}
	if old != nil {
		c.send(&disconnectRequest{old})
	}
	c.beat.waiting = false
	c.heartbeat(now, u)
}

// disconnected drops jobs that do not run, because the scheduler gives them to others. Running
// calls continue: their results are right for whichever worker has the task then.
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

// forget removes a job that is not running.
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

// message handles a message from the scheduler.
func (c *core) message(now time.Time, m message) {
	switch m := m.(type) {
	case *task:
		c.task(m)
	case *taskCancel:
		c.cancel(m)
	case *objectInstruction:
		if m.Kind != deleteObjects {
			c.notef("the scheduler sends an object instruction %q, which is not for workers", m.Kind)
			return
		}
		for _, id := range m.IDs {
			c.store.delete(string(id))
		}
	case *objectResponse:
		c.objects(m)
	case *heartbeatEcho:
		c.echo(now)
	case *disconnect:
		c.leaving = c.leaving || m.Kind == shutdown
	}
}

func (c *core) task(t *task) {
	if c.leaving {
		return // the scheduler will get it back with all others
	}
	if j := c.jobs[string(t.ID)]; j != nil {
		// It has been running since before the connection broke, or was sent twice: one result
		// suffices.
		j.canceled = false
		return
	}
	if len(c.jobs) >= maxJobs {
		c.notef("task %x is given back: there are %d already", t.ID, len(c.jobs))
		c.send(&taskResult{ID: t.ID, Status: canceled, Profile: profile{Absent: true}})
		return
	}
	c.numbers++
	j := &job{task: t, number: c.numbers}
	c.jobs[string(t.ID)] = j
	c.answers.forget(t.ID)
	c.queued.add(j)
	c.advance()
}

// advance requests the objects of the next jobs, and starts as many jobs as there are free slots.
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

// fetch requests the objects of a job that are not stored here.
func (c *core) fetch(j *job) {
	j.state = isFetching
	c.fetched++
	j.used = make(map[string]*object)
	for _, a := range j.task.Args {
		if a.Kind != argObject {
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
	c.send(&objectRequest{IDs: ids})
}

// arrived makes a job ready if it misses no object.
func (c *core) arrived(j *job) {
	if j.state == isFetching && j.missing == 0 {
		j.state = isReady
		c.ready.add(j)
	}
}

// objects handles an answer to an object request. The IDs in an answer are those of the request. If
// some objects are missing, the answer does not show which, so each is requested again by itself.
func (c *core) objects(m *objectResponse) {
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
	case m.Kind == contentFound && len(m.Contents) == len(m.IDs):
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

// tooLarge handles an answer that exceeds the size limit of a message. It is the answer to the
// oldest request, because answers arrive in the order of the requests.
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

// start starts a call, if the task names a known function.
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

// finished handles the return of a call.
func (c *core) finished(run uint64, result []byte, err error, p profile) {
	j := c.runs[run]
	delete(c.runs, run)
	switch {
	case j.state == isOver: // it was taken back
	case c.leaving: // the scheduler will get the task back
		c.over(string(j.task.ID), j)
	case j.canceled:
		c.over(string(j.task.ID), j)
		c.report(nil, &taskResult{ID: j.task.ID, Status: canceled, Profile: profile{Absent: true}})
	default:
		c.result(j, result, err, p)
	}
	if !c.leaving {
		c.advance()
	}
}

// fail ends a job that has not started.
func (c *core) fail(j *job, err error) {
	if j.state == isFetching {
		c.fetched--
	}
	c.result(j, nil, err, profile{Absent: true})
}

// result sends the outcome of a task: first the object, then the result that refers to it.
func (c *core) result(j *job, content []byte, err error, p profile) {
	status := success
	if err != nil {
		status, content = failed, exceptionOf(err)
	}
	c.numbers++
	id := c.resultID(j.task)
	name := fmt.Appendf(nil, "<res %x>", id[:3])
	c.report(
		&objectInstruction{Kind: createObjects, User: j.task.Source, objects: objects{[][]byte{id}, [][]byte{name}, [][]byte{content}}},
		&taskResult{ID: j.task.ID, Status: status, Profile: p, Results: [][]byte{id}},
	)
	c.over(string(j.task.ID), j)
}

// resultID returns an ID that no other result has.
func (c *core) resultID(t *task) []byte {
	unique := md5.Sum(binary.BigEndian.AppendUint64(append(append([]byte{}, c.cfg.unique...), t.ID...), c.numbers))
	return objectID(t.Source, unique[:])
}

func exceptionOf(err error) []byte {
	if call, ok := errors.AsType[*CallError](err); ok {
		return exception(call.Class, call.Text)
	}
	return exception("RuntimeError", err.Error())
}

// report sends a result and keeps it until the scheduler has received it.
func (c *core) report(object *objectInstruction, r *taskResult) {
	s := sent{messages: []outgoing{r}, bytes: 128, beats: c.beat.count}
	if object != nil {
		s.messages = []outgoing{object, r}
		s.bytes += len(object.Contents[0])
	}
	c.keep(s)
	c.answers.add(r.ID)
	c.send(s.messages...)
}

// cancel takes a task back: without Force on behalf of its client, with Force to give it to another
// worker. A client always gets an answer, even if the result has been sent, because the scheduler
// has dropped that result. The scheduler would attribute a second answer to the worker that now has
// the task, so a task that was given back or has a result gets no further answer.
func (c *core) cancel(m *taskCancel) {
	j := c.jobs[string(m.ID)]
	if j == nil && m.Force && c.answers.tasks[string(m.ID)] {
		return
	}
	answer := &taskResult{ID: m.ID, Status: canceled, Profile: profile{Absent: true}}
	if j != nil && m.Retrieve {
		answer.Results = j.task.encode()
	}
	switch {
	case j == nil:
		answer.Status = notFound
	case j.state != isRunning:
		c.forget(string(m.ID), j)
	case m.Force:
		c.out.stop = append(c.out.stop, j.number)
		c.over(string(m.ID), j)
	default: // answered when the call returns
		c.out.stop = append(c.out.stop, j.number)
		j.canceled = true
		return
	}
	if m.Force {
		c.answers.add(m.ID)
		c.send(answer) // a new connection begins with a disconnectRequest, which also serves
	} else {
		c.report(nil, answer)
	}
	c.advance()
}
