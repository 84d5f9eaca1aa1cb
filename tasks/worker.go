package tasks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// worker is a worker in its own process: it runs the tasks that package queue sends it.
type worker struct {
	cfg       ServeConfig
	session   uint64
	rank      int
	hostStore *hostStore

	mu      sync.Mutex
	link    *link.Link[*taskspb.ToTasks]
	groups  map[uint32]*lease // groups for which a lease was granted
	running sync.WaitGroup
	resources
	inbox
	reports
	departure
}

func newWorker(cfg ServeConfig) (*worker, error) {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Grace <= 0 {
		cfg.Grace = defaultGrace
	}
	share, rank := 1, 0
	if cfg.Dial == nil {
		own, err := ownJob()
		if err != nil {
			return nil, err
		}
		if cfg.Host == "" {
			cfg.Host = own.slot.Host
		}
		cfg.Dial, share, rank = own.dial, max(own.slot.LocalSize, 1), own.slot.Rank
		cfg.run, cfg.credentials = own.run, own.creds
	}
	if cfg.Host == "" {
		cfg.Host, _ = os.Hostname()
	}
	for _, name := range append(slices.Collect(maps.Keys(cfg.Offers)), cfg.Host, cfg.Name) {
		if !isName(name) {
			return nil, fmt.Errorf("tasks: the name %.20q… of the worker, its host or a resource has %d bytes, or is not UTF-8; at most %d", name, len(name), link.MaxName)
		}
	}
	w := &worker{cfg: cfg, session: newSession(), rank: rank, resources: resources{total: map[string]int64{}}, groups: map[uint32]*lease{}}
	for name, n := range cfg.Offers {
		w.total[name] = int64(n*queue.Unit + 0.5)
	}
	if _, ok := w.total[queue.CPU]; !ok {
		w.total[queue.CPU] = int64(max(runtime.GOMAXPROCS(0)/share, 1)) * queue.Unit
	}
	w.free = maps.Clone(w.total)
	return w, nil
}

// hello connects once and sets up the new connection.
func (w *worker) hello(ctx context.Context) (*session, error) {
	s, err := greet(ctx, w.cfg.Dial, w.introduce)
	if err == nil {
		w.welcomed(s.link, s.first)
	}
	return s, err
}

// introduce returns the hello message, which describes the worker and what it has.
func (w *worker) introduce(conn net.Conn) *taskspb.TasksHello {
	h := &taskspb.TasksHello{
		Session: w.session, Worker: true, Host: w.cfg.Host, Pid: uint32(os.Getpid()), Rank: uint32(max(w.rank, 0)),
		Functions: w.functions(), Name: w.cfg.Name, Beside: w.cfg.Beside,
	}
	h.Values, h.Stored = w.hostStore.provide(conn)
	for _, name := range slices.Sorted(maps.Keys(w.total)) {
		h.Offers = append(h.Offers, &taskspb.Amount{Name: name, Milli: w.total[name]})
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.held {
		h.Held = append(h.Held, a.push.GetOf())
	}
	return h
}

// functions returns the functions that the worker can run.
func (w *worker) functions() (all []*taskspb.TaskFunction) {
	functions.Lock()
	defer functions.Unlock()
	for _, f := range functions.byName {
		if !w.cfg.without[f.name] {
			all = append(all, f.wire())
		}
	}
	return all
}

// find returns the function with a name, or nil.
func (w *worker) find(name string) *function {
	functions.Lock()
	defer functions.Unlock()
	return functions.byName[name]
}

// welcomed sets up a new connection: it repeats what the scheduler has not acknowledged.
func (w *worker) welcomed(l *link.Link[*taskspb.ToTasks], m *taskspb.FromTasks) {
	w.mu.Lock()
	if w.silent {
		left := w.leaving // it leaves in order
		w.mu.Unlock()
		if left {
			l.Say(func(m *taskspb.ToTasks) { m.Left = true })
		}
		l.Flush()
		return
	}
	w.link, w.results = l, nil // the scheduler sends the results again, with their tasks
	w.acknowledge(m.GetHeard())
	w.heard = m.GetHeard() // unacknowledged results are counted from here
	for _, d := range w.unheard {
		w.put(d, func(m *taskspb.ToTasks) { m.Dones = append(m.Dones, d) })
	}
	leaving := w.leaving
	l.Say(func(m *taskspb.ToTasks) {
		m.Leaving = leaving
		for _, a := range w.held {
			if a.waits > 0 {
				m.Waits = append(m.Waits, a.push.GetOf())
			}
		}
	})
	w.mu.Unlock()
	w.hear(m)
}

// acknowledge forgets the attempts whose results the scheduler has acknowledged. The caller holds
// the lock.
func (w *worker) acknowledge(heard uint64) {
	if gone := w.reports.acknowledge(heard); gone != nil {
		w.held = slices.DeleteFunc(w.held, func(a *attempt) bool { return gone[a.push.GetOf()] })
		w.noteIdle()
	}
}

// noteIdle closes w.idle, for which leave waits, if the worker is leaving and holds neither a
// result that the scheduler needs nor an attempt whose result is wanted. The caller holds the lock.
func (w *worker) noteIdle() {
	wanted := func(a *attempt) bool { return a.ended || !a.stopped }
	if w.leaving && w.idle != nil && !slices.ContainsFunc(w.held, wanted) {
		close(w.idle)
		w.idle = nil
	}
}

// serve handles messages from the scheduler until ctx ends, over as many connections as necessary.
func (w *worker) serve(ctx context.Context, first *session) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	failed := make(chan error, 1)
	var reading sync.WaitGroup
	reading.Go(func() { failed <- w.read(life, first) })
	defer reading.Wait()
	defer end()
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	for {
		select {
		case <-alive.C:
			w.say(func(*taskspb.ToTasks) {}) // an empty message
		case err := <-failed:
			w.mu.Lock()
			w.silent = true // and no task begins any more
			w.mu.Unlock()
			w.stopAll()
			w.await()
			return err
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), errVanished) {
				w.vanish(end)
			} else {
				w.leave(w.cfg.Grace)
			}
			end()
			w.await()
			return nil
		}
	}
}

// leave gives back the tasks that have not begun, and waits for the others for up to grace.
func (w *worker) leave(grace time.Duration) {
	idle := make(chan struct{})
	w.mu.Lock()
	w.leaving, w.idle = true, idle
	w.noteIdle()
	w.mu.Unlock()
	w.say(func(m *taskspb.ToTasks) { m.Leaving = true })
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-idle:
	case <-late.C:
	}
	// Tasks that are stopped now run again elsewhere, so their errors are not reported.
	w.mu.Lock()
	w.silent = true
	if w.link != nil {
		w.link.Say(func(m *taskspb.ToTasks) { m.Left = true })
	}
	w.mu.Unlock()
	w.stopAll()
	w.mu.Lock()
	l := w.link
	w.mu.Unlock()
	if l != nil {
		l.Flush()
	}
}

// vanish ends without a message, like a process that is killed.
func (w *worker) vanish(end func()) {
	w.mu.Lock()
	l := w.link
	w.link, w.silent = nil, true
	w.mu.Unlock()
	end() // prevents another connection
	if l != nil {
		l.Close()
	}
	w.stopAll()
}

// await waits for the functions, whose contexts have ended. It waits only briefly for functions
// that ignore their contexts, so that the process can end.
func (w *worker) await() {
	ended := make(chan struct{})
	go func() {
		w.running.Wait()
		close(ended)
	}()
	late := time.NewTimer(deafTime)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
		w.cfg.Log.Warn("tasks: a function still runs although its context has ended")
	}
}

func (w *worker) stopAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.held {
		if a.cancel != nil {
			a.cancel()
		}
	}
}

// say sends a part that has only a few numbers.
func (w *worker) say(add func(*taskspb.ToTasks)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.link != nil {
		w.link.Say(add)
	}
}

// put adds a part to the next message. The part must be within the bounds of package link. The
// caller holds the lock.
func (w *worker) put(part proto.Message, add func(*taskspb.ToTasks)) {
	if w.link == nil {
		return
	}
	if err := w.link.Put(part, add); err != nil {
		w.cfg.Log.WithError(err).Error("tasks: a message to the scheduler was not sent")
	}
}

// read reads messages from the scheduler until ctx ends, over as many connections as necessary.
func (w *worker) read(ctx context.Context, first *session) error {
	return hearAll(ctx, first, 0, w.cfg.Log, w.hello, w.hear, func() bool {
		w.mu.Lock()
		l, silent := w.link, w.silent
		w.link = nil
		w.mu.Unlock()
		if l != nil {
			l.Close()
		}
		// A worker that has left must not reconnect: the scheduler would consider it a new worker
		// that runs what it has given back, and would consider it lost when that connection ends.
		return !silent
	})
}

// hear handles a message from the scheduler.
func (w *worker) hear(m *taskspb.FromTasks) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.silent {
		return // a task that began now would not be stopped
	}
	if m.GetHeard() > 0 {
		w.acknowledge(m.GetHeard())
	}
	for _, a := range m.GetAsks() {
		w.answer(a)
	}
	w.results = append(w.results, m.GetResults()...)
	if len(m.GetDrops()) > 0 {
		w.hostStore.drop(m.GetDrops())
	}
	for _, push := range m.GetPushes() {
		w.add(push, w.groups[push.GetGroup()])
	}
	for _, of := range m.GetTakeBack() {
		w.giveBack(of)
	}
	for _, s := range m.GetStops() {
		w.stop(s.GetOf())
	}
	w.begin()
}

// answer answers the request for a lease. The caller holds the lock.
func (w *worker) answer(a *taskspb.LeaseAsk) {
	of := a.GetOf()
	f := w.find(of.GetFunction().GetName())
	reply := &taskspb.LeaseAnswer{Group: a.GetGroup(), Granted: true}
	switch {
	case f == nil || !bytes.Equal(f.hash[:8], of.GetFunction().GetHash()):
		reply.Granted, reply.Why = false, fmt.Sprintf("it has no function %s with the same types", of.GetFunction().GetName())
	case w.leaving:
		reply.Granted, reply.Why = false, "it leaves"
	case w.cfg.Admit != nil:
		if err := w.cfg.Admit(of.GetFunction().GetName()); err != nil {
			reply.Granted, reply.Why = false, queue.Cut(err.Error(), link.MaxWhy)
		}
	}
	if reply.Granted {
		demand := make(map[string]int64, len(of.GetDemand()))
		for _, d := range of.GetDemand() {
			demand[d.GetName()] = d.GetMilli()
		}
		w.groups[a.GetGroup()] = &lease{fn: f, demand: queue.MakeDemand(demand)}
	}
	if w.put(reply, func(m *taskspb.ToTasks) { m.Leases = append(m.Leases, reply) }); w.link != nil {
		w.link.Push()
	}
}

func same(a, b *taskspb.Attempt) bool {
	return a.GetN() == b.GetN() && a.GetClient() == b.GetClient() && a.GetAttempt() == b.GetAttempt()
}

// giveBack gives a task back if it has not begun. The caller holds the lock.
func (w *worker) giveBack(of *taskspb.Attempt) {
	i := slices.IndexFunc(w.queued, func(a *attempt) bool { return same(a.push.GetOf(), of) })
	if i >= 0 {
		w.drop(w.queued[i])
	}
	if w.link != nil {
		w.link.Say(func(m *taskspb.ToTasks) {
			if i >= 0 {
				m.Returned = append(m.Returned, of)
			} else {
				m.Kept = append(m.Kept, of)
			}
		})
	}
}

// drop removes a task that has not begun. The caller holds the lock.
func (w *worker) drop(a *attempt) {
	w.inbox.drop(a)
	w.noteIdle()
}

// stop stops a task whose result is no longer wanted. The caller holds the lock.
func (w *worker) stop(of *taskspb.Attempt) {
	for _, a := range w.held {
		switch {
		case !same(a.push.GetOf(), of):
		case a.cancel != nil:
			a.stopped = true
			a.cancel()
			w.noteIdle()
			return
		case !a.ended:
			w.drop(a)
			w.returned(of)
			return
		default:
			return // its result was sent
		}
	}
	w.returned(of)
}

// returned reports that an attempt is not here. The caller holds the lock.
func (w *worker) returned(of *taskspb.Attempt) {
	if w.link != nil {
		w.link.Say(func(m *taskspb.ToTasks) { m.Returned = append(m.Returned, of) })
	}
}

// begin starts the tasks that can run, in the order of their arrival. The caller holds the lock.
func (w *worker) begin() {
	n := 0
	for ; n < len(w.queued); n++ {
		a := w.queued[n]
		if a.lease != nil && !a.lease.demand.Fits(w.free) {
			break
		}
		ctx, cancel := context.WithCancel(context.Background())
		a.cancel = cancel
		w.take(a, 1, func(string) bool { return true })
		w.running.Go(func() { w.run(ctx, a) })
	}
	if n > 0 {
		w.queued = slices.Delete(w.queued, 0, n)
	}
}

// run runs a task and reports its result.
func (w *worker) run(ctx context.Context, a *attempt) {
	defer a.cancel()
	began := time.Now()
	if limit := a.push.GetLimitMs(); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(limit)*time.Millisecond)
		defer cancel()
	}
	if a.push.GetConfirm() {
		w.confirm(ctx, a)
	}
	result := w.call(ctx, a)
	done := &taskspb.TaskDone{Of: a.push.GetOf(), Result: result, RanUs: uint64(time.Since(began).Microseconds())}
	w.mu.Lock()
	defer w.mu.Unlock()
	a.ended, a.cancel = true, func() {}
	a.push = &taskspb.PushTask{Of: done.GetOf()} // frees the arguments
	w.take(a, -1, func(name string) bool { return name != queue.CPU || a.waits == 0 })
	if w.silent {
		return
	}
	w.unheard = append(w.unheard, done)
	if len(w.unheard) > mostUnheard {
		w.acknowledge(w.heard + mostUnheard/10)
	}
	if w.put(done, func(m *taskspb.ToTasks) { m.Dones = append(m.Dones, done) }); w.link != nil {
		w.link.Push()
	}
	w.begin()
}

// confirm reports to the scheduler that a task is about to begin, because the task may end this
// process. It blocks until the report is written.
func (w *worker) confirm(ctx context.Context, a *attempt) {
	w.mu.Lock()
	l := w.link
	w.mu.Unlock()
	if l != nil {
		l.Say(func(m *taskspb.ToTasks) { m.Begun = append(m.Begun, a.push.GetOf()) })
		_ = l.Written(ctx) // if ctx ends, the task ends too
	}
}

// failed returns the result of a task that has failed. text may be of any length.
func failed(f queue.Failure, text string) *taskspb.TaskResult {
	text = queue.Cut(text, link.MaxText)
	return &taskspb.TaskResult{State: uint32(queue.Failed), Failure: uint32(f), Text: text}
}

// call decodes the arguments and calls the function.
func (w *worker) call(ctx context.Context, a *attempt) *taskspb.TaskResult {
	if a.lease == nil {
		return failed(queue.ByUser, "it was sent to a worker without a lease")
	}
	args, err := w.argumentsOf(ctx, a)
	var gone *goneError
	if errors.As(err, &gone) {
		return failed(queue.Gone, gone.Error())
	} else if err != nil {
		return failed(queue.ByUser, err.Error())
	}
	value, err := a.lease.fn.run(context.WithValue(ctx, lenderKey{}, &lender{w, a}), args)
	switch {
	case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return failed(queue.TimedOut, fmt.Sprintf("it ran for longer than %v: %v", time.Duration(a.push.GetLimitMs())*time.Millisecond, err))
	case err != nil:
		r := failed(queue.ByUser, err.Error())
		var panicked *panicError
		if errors.As(err, &panicked) {
			r.Inlined = panicked.stack[:min(len(panicked.stack), link.MaxText)]
		}
		return r
	}
	size, limit := lengthOf(value), inlineLimit
	if n := int(a.push.GetInline()); n > 0 {
		limit = min(limit, n)
	}
	if size-1 < limit {
		return &taskspb.TaskResult{State: uint32(queue.Succeeded), Inlined: slices.Concat(value...)}
	}
	id, err := w.hostStore.put(ctx, value)
	if err != nil {
		return failed(queue.ByUser, fmt.Sprintf("the result cannot be stored: %v", err))
	}
	return &taskspb.TaskResult{State: uint32(queue.Succeeded), Value: id[:], Size: uint64(size)}
}

// panicError is a panic of a function.
type panicError struct {
	text  string
	stack []byte
}

// Error does not include the stack, which FunctionError has.
func (e *panicError) Error() string { return e.text }

// run calls the function and encodes its result, in parts. It converts a panic to an error.
func (f *function) run(ctx context.Context, args []reflect.Value) (value [][]byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{fmt.Sprintf("panic: %v", p), debug.Stack()}
		}
	}()
	out := f.call.Call(append([]reflect.Value{reflect.ValueOf(ctx)}, args...))
	if e := out[len(out)-1]; !e.IsNil() {
		return nil, e.Interface().(error)
	}
	if f.out == nil {
		return [][]byte{{asNothing}}, nil
	}
	return encodeParts(out[0])
}

// argumentsOf returns the arguments of a task. It first fetches stored arguments to this host. The
// error is a *goneError if nobody has one of them.
func (w *worker) argumentsOf(ctx context.Context, a *attempt) ([]reflect.Value, error) {
	var all taskspb.TaskArgs
	if err := proto.Unmarshal(a.push.GetArgs(), &all); err != nil {
		return nil, err
	}
	f := a.lease.fn
	if len(all.GetArgs()) < len(f.in) {
		return nil, fmt.Errorf("it has %d arguments; %s takes %d", len(all.GetArgs()), f.name, len(f.in))
	}
	args := make([]reflect.Value, len(all.GetArgs()))
	var results map[uint64]*taskspb.TaskResult
	if n := len(a.push.GetResults()); n > 0 {
		results = make(map[uint64]*taskspb.TaskResult, n)
		for _, r := range a.push.GetResults() {
			results[r.GetN()] = r.GetResult()
		}
	}
	for i, arg := range all.GetArgs() {
		t, err := f.arg(i)
		if err != nil {
			return nil, err
		}
		inlined, object := arg.GetInlined(), arg.GetValue()
		if n := arg.GetTask(); n != 0 {
			inlined, object = results[n].GetInlined(), results[n].GetValue()
		}
		if args[i], err = w.argument(ctx, a, inlined, object, t); err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}
	}
	return args, nil
}

// argument returns an argument of type t, which was sent with the task or is stored.
func (w *worker) argument(ctx context.Context, a *attempt, inlined, object []byte, t reflect.Type) (reflect.Value, error) {
	below := refOf(t)
	if len(object) == 0 {
		if below == nil {
			return decode(inlined, t)
		}
		v, err := decode(inlined, below)
		return newRef(t, &ref{load: func(context.Context, reflect.Type) (reflect.Value, error) { return v, nil }}), err
	}
	id, ok := blob.ParseID(object)
	if !ok {
		return reflect.Value{}, errors.New("it has no name of a stored value")
	}
	if err := w.bring(ctx, a, id); err != nil {
		return reflect.Value{}, err
	}
	if below == nil {
		return w.hostStore.decode(id, t)
	}
	v, err := w.hostStore.shared(id, below)
	return newRef(t, &ref{id: id, load: func(context.Context, reflect.Type) (reflect.Value, error) { return v, nil }}), err
}

// goneError means that nobody has a stored value.
type goneError struct{ err error }

// Error returns the cause's message.
func (e *goneError) Error() string { return e.err.Error() }

// bring makes sure that a stored value is on this host, and reports to the scheduler which hosts
// lack it.
func (w *worker) bring(ctx context.Context, a *attempt, id blob.ID) error {
	var at *taskspb.ValueAt
	for _, v := range a.push.GetValues() {
		if bytes.Equal(v.GetValue(), id[:]) {
			at = v
		}
	}
	brought, lacks, err := w.hostStore.bring(ctx, id, at)
	for _, from := range lacks {
		w.say(func(m *taskspb.ToTasks) {
			m.Missing = append(m.Missing, &taskspb.MissingValue{Value: id[:], Host: from})
		})
	}
	if brought {
		w.say(func(m *taskspb.ToTasks) { m.Stored = append(m.Stored, id[:]) })
	}
	return err
}
