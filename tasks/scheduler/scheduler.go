// Package scheduler runs a queue of tasks for clients and workers. New returns a Scheduler, and its
// Handle serves one of their connections. Package queue decides which task runs where; this package
// handles the connections.
package scheduler

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/report"
)

// Config configures a Scheduler. The zero value has the defaults.
type Config struct {
	// Run is the job's run id.
	Run string
	// WorkerGrace is how long the scheduler waits for a worker whose connection has broken. 0: 500
	// ms.
	WorkerGrace time.Duration
	// ClientGrace is how long the scheduler keeps the tasks of a client whose connection has
	// broken. 0: 15 minutes.
	ClientGrace time.Duration
	// Grace is how long a function may continue after it was asked to stop. Then an event
	// job.TaskWorkerStuck requests the end of its worker's process, and again every 10 s. 0: 30 s;
	// negative: forever.
	Grace time.Duration
	// Memory is the number of bytes that the tasks of all clients and their results may take. 0: an
	// eighth of the machine's memory, and at most 2 GiB.
	Memory int64
	// Journal is the path of the file that records tasks and results. Empty: they are only in
	// memory.
	Journal string
	// Store configures the scheduler's store, for values that clients put. The store is opened for
	// the first value. If Store.Run is empty, the job's run id is used.
	Store blob.Config
	// Repeated makes clients keep all tasks and submit them again to the next scheduler of the job,
	// which may be on another machine, where the journal is missing.
	Repeated bool
	// Credentials are the driver's, for requesting values from workers. Nil: values are not
	// requested.
	Credentials *identity.Credentials
	// Event, if not nil, is called with events, at a limited rate. It must not block.
	Event func(job.TaskEvent)
	// Ran, if not nil, is called with each attempt of a task that a worker has run: the function's
	// name, and when it began and ended by this machine's clock. It must not block.
	Ran func(worker, function string, began, ended time.Time)
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

const (
	// mostUnfinished is the largest number of unfinished tasks of a client.
	mostUnfinished = 1_000_000

	defaultWorkerGrace = 500 * time.Millisecond
	defaultClientGrace = 15 * time.Minute
	// resumedGrace is how long the tasks of a client from a resumed journal are kept if the client
	// does not connect.
	resumedGrace = 24 * time.Hour
	// silence is how long a worker may be silent before it counts as lost: several times the
	// longest pause between two messages of a worker.
	silence      = 30 * time.Second
	defaultGrace = 30 * time.Second
	// helloTime bounds how long a connection may be silent before its hello.
	helloTime = 20 * time.Second
	// endedTime bounds the time of Ended if this process is short of processor time.
	endedTime = 2 * time.Second
	// maxRan bounds the run time of a task, in microseconds, as its worker reports it.
	maxRan = 1 << 48
	// tellAt is the number of bytes of received results that a worker may keep before the scheduler
	// acknowledges them.
	tellAt = 64 << 10
	// mostRan is the largest number of functions that Ended returns.
	mostRan = 8
	// mostPending is how many bytes may be pending for a peer that does not read, before its
	// connection is ended.
	mostPending = 256 << 20
)

// Scheduler serves clients and workers. New makes one. It is safe for concurrent use.
type Scheduler struct {
	cfg Config

	mu      sync.Mutex
	q       *queue.Queue
	touched []*peer // peers to which something must be sent
	alarm   alarm
	watch   *time.Timer // fires watchWorkers
	closed  bool
	wg      sync.WaitGroup // goroutines of connections
	events  *teller
	shared  *taskspb.TaskResult // result of tasks that have failed because of the same task
	roster
	debts
	values
	usage
	records
}

// alarm is the timer for Queue.Tick.
type alarm struct {
	timer *time.Timer
	at    time.Time // when it fires; zero: never
}

// set makes the alarm fire at the given time or earlier; zero: never.
func (a *alarm) set(at time.Time) {
	if !at.IsZero() && (a.at.IsZero() || at.Before(a.at)) {
		a.at = at
		a.timer.Reset(time.Until(at))
	}
}

// New returns a Scheduler without peers. The caller must call Close.
func New(cfg Config) *Scheduler {
	if cfg.WorkerGrace <= 0 {
		cfg.WorkerGrace = defaultWorkerGrace
	}
	if cfg.ClientGrace <= 0 {
		cfg.ClientGrace = defaultClientGrace
	}
	if cfg.Grace == 0 {
		cfg.Grace = defaultGrace
	}
	if cfg.Memory <= 0 {
		cfg.Memory = defaultMemory()
	}
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	// The attempts of a previous scheduler of the job, which has died, have other numbers.
	term := uint32(time.Now().UnixMilli()/100) & 0xffffff
	s := &Scheduler{
		cfg: cfg, q: queue.New(queue.Config{Term: term, Unread: cfg.Memory / unreadShare, Grace: max(cfg.Grace, 0)}),
		roster: newRoster(), events: newTeller(cfg.Event),
	}
	s.mu.Lock() // the timers' functions take it too
	s.alarm.timer = time.AfterFunc(time.Hour, s.onTimer)
	s.alarm.timer.Stop()
	s.watch = time.AfterFunc(silence/4, s.watchWorkers)
	s.owes = time.AfterFunc(time.Hour, s.payOff)
	s.owes.Stop()
	s.mu.Unlock()
	if cfg.Journal != "" {
		s.begin(cfg.Journal, nil)
	}
	return s
}

// Close ends all connections, and returns when Handle has returned for each.
func (s *Scheduler) Close() {
	s.mu.Lock()
	s.closed = true
	s.alarm.timer.Stop()
	s.watch.Stop()
	s.owes.Stop()
	var open []*link.Link[*taskspb.FromTasks]
	for _, p := range s.peers {
		if p.gone != nil {
			p.gone.Stop()
		}
		if p.link != nil {
			open = append(open, p.link)
		}
	}
	s.mu.Unlock()
	for _, l := range open {
		l.Close()
	}
	s.wg.Wait()
	if s.recorder != nil {
		close(s.recorder.stop)
		<-s.recorder.done
	}
	if s.store != nil {
		if err := s.store.Close(); err != nil {
			s.cfg.Log.WithError(err).Debug("tasks: closing the store")
		}
	}
}

var errClosed = errors.New("scheduler: closed")

// put adds a part to the message that is sent to the peer when the lock is released. part is what
// add adds; nil means that add adds only a few numbers. It returns false if the part is too large
// to be sent.
func (p *peer) put(part proto.Message, add func(*taskspb.FromTasks)) bool {
	err := p.link.Put(part, add)
	if err != nil {
		p.s.cfg.Log.WithError(err).Errorf("tasks: a message to %s was not sent", p.name)
	}
	p.touch()
	return err == nil
}

// touch makes unlock send what was put for the peer.
func (p *peer) touch() {
	if !p.touched {
		p.touched = true
		p.s.touched = append(p.s.touched, p)
	}
}

// unlock sends what was put, and releases the lock.
func (s *Scheduler) unlock() {
	var links []*link.Link[*taskspb.FromTasks]
	for _, p := range s.touched {
		if p.touched = false; p.link != nil {
			links = append(links, p.link)
		}
	}
	s.touched = s.touched[:0]
	s.mu.Unlock()
	for _, l := range links {
		l.Push()
	}
}

// Handle serves a connection until it ends, and closes it. from is the authenticated identity of
// the peer.
func (s *Scheduler) Handle(ctx context.Context, conn net.Conn, from identity.Subject) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		conn.Close()
		return errClosed
	}
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()

	r := link.NewReader(conn)
	var m taskspb.ToTasks
	_ = conn.SetReadDeadline(time.Now().Add(helloTime))
	err := r.Read(&m)
	_ = conn.SetReadDeadline(time.Time{})
	if err == nil && m.GetTransfer() {
		defer conn.Close()
		return s.transfer(ctx, conn, r)
	}
	if err == nil && m.GetHello().GetSession() == 0 {
		err = errors.New("scheduler: the connection does not begin with a hello")
	}
	if err != nil {
		conn.Close()
		return err
	}
	l := link.New(conn, func() *taskspb.FromTasks { return &taskspb.FromTasks{} })
	defer l.Close()
	p, err := s.attach(from, m.GetHello(), l)
	if err != nil {
		l.Say(func(out *taskspb.FromTasks) { out.Refused = queue.Cut(err.Error(), link.MaxWhy) })
		l.Flush()
		return err
	}
	if !p.worker {
		r.Most = link.MaxClient
	}
	for {
		if err = s.take(p, l, &m); err != nil {
			break
		}
		if err = r.Read(&m); err != nil {
			break
		}
	}
	s.detach(p, l, err)
	var greedy greedyError
	if errors.As(err, &greedy) {
		_ = conn.SetDeadline(time.Now().Add(link.LastWords)) // it may not read
		l.Say(func(out *taskspb.FromTasks) { out.Refused = err.Error() })
		for r.Read(&m) == nil { // closing with unread bytes would discard the refusal
		}
		l.Flush()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func functionKey(f *taskspb.TaskFunction) string {
	return f.GetName() + "@" + hex.EncodeToString(f.GetHash()[:min(8, len(f.GetHash()))])
}

func heldOf(a *taskspb.Attempt) queue.Held {
	return queue.Held{ID: queue.ID{Client: a.GetClient(), N: a.GetN()}, Attempt: a.GetAttempt()}
}

func attemptOf(id queue.ID, attempt uint64) *taskspb.Attempt {
	return &taskspb.Attempt{Client: id.Client, N: id.N, Attempt: attempt}
}

// take handles a message from a peer. If it returns an error, the connection ends.
func (s *Scheduler) take(p *peer, l *link.Link[*taskspb.FromTasks], m *taskspb.ToTasks) error {
	s.mu.Lock()
	defer s.unlock()
	if p.link != l {
		return errors.New("scheduler: another connection has taken the place of this one")
	}
	now := time.Now()
	p.heardAt = now
	var err error
	if p.worker {
		s.fromWorker(now, p, m)
	} else {
		err = s.fromClient(now, p, m)
	}
	s.act()
	if err == nil && l.Pending() > mostPending {
		err = fmt.Errorf("scheduler: %s does not read its messages", p.name)
	}
	return err
}

func (s *Scheduler) fromWorker(now time.Time, p *peer, m *taskspb.ToTasks) {
	id := p.session
	s.lacks(now, m.GetMissing())
	s.hasStored(p, m.GetStored(), false)
	for _, d := range m.GetDones() {
		p.heard++
		p.untold += proto.Size(d)
		r, held, ran := s.bounded(resultOf(d.GetResult())), heldOf(d.GetOf()), time.Duration(min(d.GetRanUs(), maxRan))*time.Microsecond
		if r.Size > 0 {
			s.storedHere(now, r.Object)
		}
		if s.cfg.Ran != nil {
			if t := s.q.Task(held.ID); t != nil {
				s.cfg.Ran(p.name, t.Group.Name(), now.Add(-ran), now)
			}
		}
		s.q.Done(now, id, held, r, ran)
		if r.Size > 0 {
			s.storedHere(now, r.Object)
			s.claim(r.Object)
		}
	}
	if p.leaving = p.leaving || m.GetLeaving(); len(m.GetDones()) > 0 || m.GetLeaving() {
		s.ackDones(p)
	}
	if len(m.GetReturned()) > 0 {
		all := make([]queue.Held, 0, len(m.GetReturned()))
		for _, a := range m.GetReturned() {
			all = append(all, heldOf(a))
		}
		s.q.Returned(now, id, all)
	}
	for _, a := range m.GetKept() {
		s.q.Kept(id, heldOf(a))
	}
	for _, a := range m.GetBegun() {
		s.q.Begun(id, heldOf(a))
	}
	for _, a := range m.GetWaits() {
		s.q.Waits(now, id, heldOf(a), 1)
	}
	for _, a := range m.GetWaited() {
		s.q.Waits(now, id, heldOf(a), -1)
	}
	for _, a := range m.GetLeases() {
		g := s.q.GroupAt(int(a.GetGroup()))
		switch {
		case g == nil:
		case a.GetGranted():
			s.q.Granted(now, id, g)
		default:
			s.q.Refused(now, id, g, queue.Cut(a.GetWhy(), link.MaxWhy))
		}
	}
	if m.GetLeaving() {
		s.q.Leave(now, id)
	}
	p.left = p.left || m.GetLeft()
}

func resultOf(r *taskspb.TaskResult) queue.Result {
	out := queue.Result{
		State: queue.State(r.GetState()), Failure: queue.Failure(r.GetFailure()), Text: queue.Cut(r.GetText(), link.MaxText),
		Value: r.GetInlined(), Size: int64(r.GetSize()),
	}
	if !out.State.Over() || out.State > queue.Cancelled {
		out = queue.Result{State: queue.Failed, Failure: queue.ByUser, Text: "its worker has reported no result"}
	}
	if n := len(out.Value); n > link.MaxInlined {
		out = queue.Result{State: queue.Failed, Failure: queue.ByUser,
			Text: fmt.Sprintf("its result of %d bytes was not stored; at most %d may be sent", n, link.MaxInlined)}
	}
	if out.State != queue.Succeeded || out.Size <= 0 { // only a stored result has an ID
		out.Size = 0
		return out
	}
	copy(out.Object[:], r.GetValue())
	return out
}

func (s *Scheduler) fromClient(now time.Time, p *peer, m *taskspb.ToTasks) error {
	l := p.link
	for _, g := range m.GetGroups() {
		if len(p.groups) >= link.MaxFunctions || len(g.GetFunction().GetName()) > link.MaxName || len(g.GetDemand()) > link.MaxAmounts ||
			longName(g.GetDemand()) {
			return errors.New("scheduler: the client has too many groups, or a group has too long a name or too many resources")
		}
		of := s.q.Group(functionKey(g.GetFunction()), demandOf(g.GetDemand()))
		p.groups = append(p.groups, of)
		s.watchUnserved(p, l, of, false)
		for ; s.groups <= of.Index; s.groups++ {
			group := groupOf(of)
			s.besides += costOfGroup(group)
			s.note(group, func(m *taskspb.TasksRecord) { m.Groups = append(m.Groups, group) })
		}
	}
	if err := s.putBy(now, p, m.GetPuts()); err != nil {
		return err
	}
	if err := s.submitted(now, p, m); err != nil {
		return err
	}
	for _, c := range m.GetCancels() {
		s.q.Cancel(now, queue.ID{Client: p.session, N: c.GetN()})
	}
	for _, n := range m.GetReleases() {
		s.q.Release(now, queue.ID{Client: p.session, N: n})
		s.note(nil, func(m *taskspb.TasksRecord) {
			m.Releases = append(m.Releases, &taskspb.TaskName{Client: p.session, N: n})
		})
	}
	s.unputBy(p, m.GetUnputs())
	if m.GetStatus() {
		status := s.q.Status(now)
		if s.recorder != nil && s.recorder.why != nil {
			status.Journal = s.recorder.why.Error()
		}
		status.Memory = s.memory()
		text, err := json.Marshal(status)
		if err != nil {
			return err
		}
		p.put(&taskspb.FromTasks{Status: text}, func(out *taskspb.FromTasks) { out.Status = text })
	}
	for _, what := range m.GetExplain() {
		text, err := json.Marshal(s.explain(now, what))
		if err != nil {
			return err
		}
		p.put(&taskspb.FromTasks{Explained: [][]byte{text}}, func(out *taskspb.FromTasks) { out.Explained = append(out.Explained, text) })
	}
	if m.GetLeft() {
		p.left = true
	}
	return nil
}

// unservedAfter is the pause between two checks whether any worker can run the tasks of a client.
const unservedAfter = 5 * time.Second

// watchUnserved periodically checks whether any worker can run the tasks of a group, as long as the
// client's connection lasts. If none can, it sends the client a warning with the reason. It repeats
// the warning only if a worker could run the tasks in between. told means that the warning has been
// sent.
func (s *Scheduler) watchUnserved(p *peer, l *link.Link[*taskspb.FromTasks], g *queue.Group, told bool) {
	time.AfterFunc(unservedAfter, func() {
		s.mu.Lock()
		defer s.unlock()
		if s.closed || p.link != l {
			return
		}
		why := queue.Cut(s.q.Unserved(time.Now(), g), link.MaxWhy)
		if why != "" && !told {
			p.put(&taskspb.FromTasks{Warnings: []string{why}}, func(m *taskspb.FromTasks) { m.Warnings = append(m.Warnings, why) })
		}
		s.watchUnserved(p, l, g, why != "")
	})
}

// submitted adds the tasks of a client, and the outcomes of tasks that the client already knows.
func (s *Scheduler) submitted(now time.Time, p *peer, m *taskspb.ToTasks) error {
	var ends map[uint64]queue.Result
	if n := len(m.GetEnds()); n > 0 {
		ends = make(map[uint64]queue.Result, n)
		for _, e := range m.GetEnds() {
			ends[e.GetN()] = resultOf(e.GetResult())
		}
	}
	for _, t := range m.GetSubmits() {
		if int(t.GetGroup()) >= len(p.groups) {
			return fmt.Errorf("scheduler: a task names group %d, and the client has %d", t.GetGroup(), len(p.groups))
		}
		options := optionsOf(p.session, t.GetOptions())
		task := queue.Task{
			ID: queue.ID{Client: p.session, N: t.GetN()}, Group: p.groups[t.GetGroup()], Priority: t.GetPriority(),
			Options: options, Spec: t.GetArgs(), Cost: costOf(t),
		}
		if s.q.Task(task.ID) == nil {
			if err := s.room(p, int64(task.Cost)); err != nil {
				return err
			}
		}
		of := t.GetOptions()
		if why := link.TooLarge(t, len(of.GetNeeds())+len(of.GetValues()), of.GetPrefer()); why != "" {
			t.Args, t.Options, task.Spec, task.Options, options = nil, nil, nil, nil, nil
			task.Cost = queue.TaskCost
			s.q.SubmitEnded(now, task, queue.Result{State: queue.Failed, Failure: queue.ByUser, Text: why})
			delete(ends, t.GetN())
		} else if r, ended := ends[t.GetN()]; ended {
			s.q.SubmitEnded(now, task, r)
			delete(ends, t.GetN())
		} else {
			s.q.Submit(now, task)
		}
		if options != nil {
			for _, o := range options.Objects {
				s.claim(o)
			}
		}
		p.accepted = max(p.accepted, t.GetN())
		sub := &taskspb.TaskSubmitted{Client: p.session, Group: uint32(p.groups[t.GetGroup()].Index), Task: t}
		s.note(sub, func(m *taskspb.TasksRecord) { m.Submits = append(m.Submits, sub) })
	}
	if len(m.GetSubmits()) > 0 {
		s.ackLater(p)
		s.tellWindow(p)
	}
	for n, r := range ends {
		s.q.Ended(now, queue.ID{Client: p.session, N: n}, r)
	}
	return nil
}

// explain explains why tasks do not run. what is a task's number or a function's name.
func (s *Scheduler) explain(now time.Time, what string) []report.Explanation {
	var all []report.Explanation
	if n, err := strconv.ParseUint(what, 10, 64); err == nil {
		all = s.q.ExplainTask(now, n)
	} else {
		all = s.q.ExplainFunction(now, what)
	}
	for i := range all {
		if c := s.peers[all[i].Client]; c != nil {
			all[i].By = c.name
		}
	}
	return all
}

func demandOf(amounts []*taskspb.Amount) queue.Demand {
	of := make(map[string]int64, len(amounts))
	for _, a := range amounts {
		of[a.GetName()] = a.GetMilli()
	}
	return queue.MakeDemand(of)
}

func optionsOf(client uint64, o *taskspb.TaskOptions) *queue.Options {
	if o == nil {
		return nil
	}
	out := &queue.Options{
		Prefer: o.GetPrefer(), Pin: o.GetPin(), Retries: int(min(o.GetRetries(), 200)), Again: o.GetAgain(),
		TimeLimit: time.Duration(min(o.GetLimitMs(), 1<<40)) * time.Millisecond,
	}
	for _, n := range o.GetNeeds() {
		out.Needs = append(out.Needs, queue.ID{Client: client, N: n})
	}
	for _, b := range o.GetValues() {
		if id, ok := blob.ParseID(b); ok {
			out.Objects = append(out.Objects, queue.Object(id))
		}
	}
	return out
}

// act performs the actions of the queue and sets the timer. The caller holds the lock.
func (s *Scheduler) act() {
	for i := 0; i < len(s.q.Out); i++ { // performing them may add further ones
		s.actOn(s.q.Out[i])
	}
	out := s.q.Out
	clear(out)
	s.q.Out = out[:0]
	if cap(out) > 1<<16 {
		s.q.Out = nil
	}
	s.noteOvers()
	s.tellWindows()
	if !s.closed {
		s.alarm.set(s.q.Next)
	}
}

func (s *Scheduler) actOn(a queue.Action) {
	to := a.Worker
	switch a.What {
	case queue.Tell:
		to = a.Task.Client
	case queue.Drop:
		s.drop(a)
		return
	case queue.End:
		s.stuck(a)
		return
	}
	p := s.peers[to]
	if p == nil || p.link == nil {
		return // when it reconnects, it reports what it has
	}
	switch a.What {
	case queue.Push:
		if s.q.Task(a.Task) == nil {
			return // its client has released it since: a Stop follows
		}
		push := s.pushOf(p, a)
		if !p.put(push, func(m *taskspb.FromTasks) { m.Pushes = append(m.Pushes, push) }) {
			s.q.Done(time.Now(), a.Worker, queue.Held{ID: a.Task, Attempt: a.Attempt},
				queue.Result{State: queue.Failed, Failure: queue.ByUser, Text: "it is too large to be sent to a worker"}, 0)
		}
	case queue.Ask:
		ask := &taskspb.LeaseAsk{Group: uint32(a.Group.Index), Of: groupOf(a.Group)}
		p.put(ask, func(m *taskspb.FromTasks) { m.Asks = append(m.Asks, ask) })
	case queue.TakeBack:
		p.put(nil, func(m *taskspb.FromTasks) { m.TakeBack = append(m.TakeBack, attemptOf(a.Task, a.Attempt)) })
	case queue.Stop:
		p.put(nil, func(m *taskspb.FromTasks) {
			m.Stops = append(m.Stops, &taskspb.StopTask{Of: attemptOf(a.Task, a.Attempt)})
		})
	case queue.Tell:
		s.tell(p, a.Task)
	}
}

// tell sends a client the outcome of a task. If the task has not succeeded, it sends the outcome
// only once it is recorded. Otherwise the next scheduler might run the task again, and tasks that
// depend on it might succeed although their client already knows that they cannot. The caller holds
// the lock.
func (s *Scheduler) tell(p *peer, id queue.ID) {
	r, ok := s.q.Result(id)
	switch {
	case !ok:
		return
	case r.State != queue.Succeeded && s.tellLater(id):
		return
	case r.State == queue.Failed:
		s.failed(p, id, r)
	}
	told := &taskspb.TaskTold{N: id.N, Result: s.sharedResult(r)}
	p.put(told, func(m *taskspb.FromTasks) { m.Told = append(m.Told, told) })
}

// pushOf returns the message that sends a task to a worker.
func (s *Scheduler) pushOf(p *peer, a queue.Action) *taskspb.PushTask {
	o := s.q.Task(a.Task)
	push := &taskspb.PushTask{
		Of: attemptOf(a.Task, a.Attempt), Group: uint32(a.Group.Index), Args: o.Spec, Confirm: a.Confirm,
		LimitMs: uint64(o.TimeLimit.Milliseconds()),
	}
	if s.used() > s.cfg.Memory/4*3 {
		push.Inline = inlineShort
	}
	bytes := 0
	most := mostAt // number of addresses for a value
	if len(o.Needs)+len(o.Objects) > fewValues {
		most = 1
	}
	for _, id := range o.Needs {
		r, ok := s.q.Result(id)
		if !ok {
			continue
		}
		told := &taskspb.TaskTold{N: id.N, Result: wireResult(r)}
		if r.Size > 0 {
			push.Values = append(push.Values, s.valueAt(r.Object, most))
		}
		size := proto.Size(told)
		if bytes+size > link.MaxResults {
			before := &taskspb.ResultFor{Of: push.GetOf(), Result: told}
			p.put(before, func(m *taskspb.FromTasks) { m.Results = append(m.Results, before) })
			continue
		}
		bytes += size
		push.Results = append(push.Results, told)
	}
	for _, id := range o.Objects {
		push.Values = append(push.Values, s.valueAt(id, most))
	}
	return push
}

// sharedResult is like wireResult, but consecutive tasks that fail because of the same task share
// one message, which must not be changed. The caller holds the lock.
func (s *Scheduler) sharedResult(r queue.Result) *taskspb.TaskResult {
	if r.Failure != queue.Dependency {
		return wireResult(r)
	}
	if s.shared == nil || s.shared.GetText() != r.Text {
		s.shared = wireResult(r)
	}
	return s.shared
}

func wireResult(r queue.Result) *taskspb.TaskResult {
	out := &taskspb.TaskResult{State: uint32(r.State), Failure: uint32(r.Failure), Text: r.Text, Inlined: r.Value, Size: uint64(r.Size)}
	if r.Size > 0 {
		out.Value = slices.Clone(r.Object[:])
	}
	return out
}

func (s *Scheduler) onTimer() {
	s.mu.Lock()
	defer s.unlock()
	s.alarm.at = time.Time{}
	s.q.Tick(time.Now())
	s.act()
}
