package tasks

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"runtime"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// defaultPatience is how long a client waits for a scheduler that is unreachable.
const defaultPatience = time.Minute

// releaseWithin is how long the scheduler may keep the result of a task after the client has
// received it. The client's next message, not a separate one, tells the scheduler to release it.
const releaseWithin = 5 * time.Millisecond

// ConnectConfig configures the connection to the scheduler. The zero value is for a worker of a
// job, and for a program started by hvdrun tasks run.
type ConnectConfig struct {
	// Dial returns a new connection to the scheduler. Nil: Connect uses the scheduler of this
	// process's job.
	Dial func(ctx context.Context) (net.Conn, error)
	// Window is the largest number of unfinished tasks, beyond which Submit waits. 0: the
	// scheduler's limit.
	Window int
	// Patience is how long the scheduler may be unreachable. After that all tasks fail, as does
	// Connect. 0: a minute.
	Patience time.Duration
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Pool is a client of a scheduler. It reconnects when a connection breaks, without losing tasks. It
// is safe for concurrent use.
type Pool struct {
	cfg     ConnectConfig
	session uint64
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu     sync.Mutex
	tasks  map[uint64]*pending // unfinished tasks
	last   uint64
	failed error // why the pool has ended; nil: it has not
	outlet
	kinds
	admission
	unwritten
	holdings
	questions []question // without an answer, in order
}

// outlet sends the client's messages to the scheduler.
type outlet struct {
	log  logrus.FieldLogger
	link *link.Link[*taskspb.ToTasks] // nil: not connected
	soon *time.Timer                  // pushes what was Put
	due  bool                         // soon is running
}

// send sends a part if there is a connection. Otherwise it drops it, because the next connection
// repeats what matters.
func (o *outlet) send(part proto.Message, add func(*taskspb.ToTasks)) {
	if o.include(part, add); o.link != nil {
		o.link.Push()
	}
}

// include is like send for a part that may wait for the next message. The part must be within the
// bounds of package link.
func (o *outlet) include(part proto.Message, add func(*taskspb.ToTasks)) {
	if o.link == nil {
		return
	}
	if err := o.link.Put(part, add); err != nil {
		o.log.WithError(err).Error("tasks: a message to the scheduler was not sent")
	}
}

// later makes sure that what was included is sent soon.
func (o *outlet) later() {
	if !o.due {
		o.due = true
		o.soon.Reset(releaseWithin)
	}
}

// kinds are the groups of tasks that a client has submitted. The scheduler identifies them by their
// numbers.
type kinds struct {
	groups []*taskspb.TaskGroup
	index  map[string]uint32
}

// number returns the number of a group, and the group itself if it is new.
func (k *kinds) number(f *function, d queue.Demand) (n uint32, new *taskspb.TaskGroup, err error) {
	key := f.name + " " + d.String()
	n, ok := k.index[key]
	switch {
	case ok:
		return n, nil, nil
	case len(k.groups) >= link.MaxFunctions:
		return 0, nil, fmt.Errorf("tasks: %s: the pool has submitted %d kinds of tasks, which differ in their functions or their needs; that is the maximum",
			f.name, len(k.groups))
	}
	new = &taskspb.TaskGroup{Function: f.wire()}
	for _, a := range d {
		new.Demand = append(new.Demand, &taskspb.Amount{Name: a.Name, Milli: a.Milli})
	}
	n = uint32(len(k.groups))
	k.groups = append(k.groups, new)
	k.index[key] = n
	return n, new, nil
}

// pending is a task from its client's point of view.
type pending struct {
	pool   *Pool
	fn     *function
	n      uint64
	submit *taskspb.SubmitTask // nil once the scheduler has recorded it, or when it is over
	needs  []any               // tasks and refs that are its arguments, which must be kept; nil when it is over
	spills []blob.ID           // arguments that were stored for it
	result *taskspb.TaskResult // nil until it is over
	cost   int64               // number of bytes that it takes in the scheduler until then
	err    error               // set if it is over and has not succeeded
	over   chan struct{}       // closed when it is over; nil: nobody waits
	after  []func()            // functions to call when it is over
	// cancelled means that the scheduler has been asked to cancel the task.
	cancelled bool
}

// Connect returns a client of the scheduler. It blocks until the client is connected. If the
// scheduler is unreachable, for example because the job is being resumed, it waits for up to
// Patience. Its error wraps ErrNoJob if there is no job. The caller must call Close.
func Connect(ctx context.Context, cfg ConnectConfig) (*Pool, error) {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Patience <= 0 {
		cfg.Patience = defaultPatience
	}
	if cfg.Dial == nil {
		dial, err := ownDial()
		if err != nil {
			return nil, err
		}
		cfg.Dial = dial
	}
	p := &Pool{
		cfg: cfg, session: newSession(), tasks: map[uint64]*pending{}, outlet: outlet{log: cfg.Log}, kinds: kinds{index: map[string]uint32{}},
		admission: admission{room: make(chan struct{})}, unwritten: unwritten{kept: map[uint64]bool{}}, holdings: holdings{puts: map[blob.ID]*holding{}},
	}
	p.soon = time.AfterFunc(time.Hour, p.pushSoon)
	p.soon.Stop()
	first, err := reach(ctx, cfg.Patience, cfg.Log, true, p.hello)
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	p.wg.Go(func() { p.run(life, first) })
	return p, nil
}

func newSession() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// hello connects once, and sends everything that the scheduler may not have received.
func (p *Pool) hello(ctx context.Context) (*session, error) {
	s, err := greet(ctx, p.cfg.Dial, func(net.Conn) *taskspb.TasksHello {
		host, _ := os.Hostname()
		return &taskspb.TasksHello{Session: p.session, Host: queue.Cut(host, 200), Pid: uint32(os.Getpid())}
	})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	after := p.welcomed(s)
	p.mu.Unlock()
	for _, f := range after {
		f()
	}
	return s, nil
}

// welcomed sets up a new connection, and returns functions to call after the lock is released. The
// caller holds the lock.
func (p *Pool) welcomed(s *session) (after []func()) {
	p.link = s.link
	p.accept(s.first.GetAccepted())
	p.newLimits(int(s.first.GetWelcome().GetWindow()), p.cfg.Window)
	p.mayHave(s.first.GetWindowBytes())
	p.introduce()
	if !s.first.GetWelcome().GetKnown() {
		for _, t := range p.tasks {
			if t.submit == nil {
				after = append(after, p.end(t, nil, fmt.Errorf("%w: %s", ErrForgotten, t.fn.name))...)
			}
		}
	}
	p.repeat()
	for _, t := range p.tasks {
		if t.cancelled {
			p.send(nil, t.cancel)
		}
	}
	return after
}

// introduce sends the groups and values to which tasks refer, and the questions of users, over a
// new connection. The caller holds the lock.
func (p *Pool) introduce() {
	for _, g := range p.groups {
		p.include(g, func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, g) })
	}
	for id, h := range p.puts {
		v := &taskspb.PutValue{Value: id[:], Size: uint64(h.size)}
		p.include(v, func(m *taskspb.ToTasks) { m.Puts = append(m.Puts, v) })
	}
	for _, q := range p.questions {
		p.include(&taskspb.ToTasks{Explain: []string{q.what}}, q.ask)
	}
	p.link.Push()
}

// run reads messages from the scheduler until ctx ends, over as many connections as necessary.
func (p *Pool) run(ctx context.Context, first *session) {
	err := hearAll(ctx, first, p.cfg.Patience, p.cfg.Log, p.hello, p.hear, func() bool {
		p.mu.Lock()
		l, closed := p.link, p.failed != nil
		p.link = nil
		p.mu.Unlock()
		if closed {
			l.Flush()
		} else {
			l.Close()
		}
		return !closed
	})
	if err != nil {
		p.fail(err)
	}
}

// hear handles a message from the scheduler.
func (p *Pool) hear(m *taskspb.FromTasks) {
	for _, text := range m.GetWarnings() {
		p.cfg.Log.Warn("tasks: " + text)
	}
	var released []uint64
	var after []func()
	p.mu.Lock()
	p.answered(m)
	p.accept(m.GetAccepted())
	p.mayHave(m.GetWindowBytes())
	for _, t := range m.GetTold() {
		delete(p.remaking, t.GetN())
		switch {
		case p.kept[t.GetN()]: // it has run again only to make its result
		case t.GetResult().GetSize() > 0 && p.tasks[t.GetN()] != nil:
			p.keep(p.tasks[t.GetN()])
		default:
			released = append(released, t.GetN())
		}
		if known := p.tasks[t.GetN()]; known != nil {
			after = append(after, p.end(known, t.GetResult(), failure(known.fn, t.GetResult()))...)
		}
	}
	p.release(released)
	p.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// release makes the scheduler forget results soon. The caller holds the lock.
func (p *Pool) release(all []uint64) {
	if len(all) == 0 || p.link == nil {
		return
	}
	p.include(&taskspb.ToTasks{Releases: all}, func(m *taskspb.ToTasks) { m.Releases = append(m.Releases, all...) })
	p.later()
}

// pushSoon sends what was Put.
func (p *Pool) pushSoon() {
	p.mu.Lock()
	p.due = false
	l := p.link
	p.mu.Unlock()
	if l != nil {
		l.Push()
	}
}

// keep makes the scheduler keep the stored result of a task until its Future is unreachable. The
// caller holds the lock.
func (p *Pool) keep(t *pending) {
	p.kept[t.n] = true
	runtime.AddCleanup(t, func(n uint64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.kept, n)
		p.send(nil, func(m *taskspb.ToTasks) { m.Releases = append(m.Releases, n) })
	}, t.n)
}

// end records the outcome of a task, and returns functions to call after the lock is released. The
// caller holds the lock.
func (p *Pool) end(t *pending, r *taskspb.TaskResult, err error) []func() {
	delete(p.tasks, t.n)
	t.submit, t.needs, t.result, t.err = nil, nil, r, err
	for _, id := range t.spills {
		defer p.drop(id)
	}
	t.spills = nil
	if t.over != nil {
		close(t.over)
	}
	p.free(len(p.tasks), t.cost)
	after := t.after
	t.after = nil
	return after
}

// fail ends all tasks, and all questions without an answer.
func (p *Pool) fail(err error) {
	p.mu.Lock()
	if p.failed == nil {
		p.failed = err
	}
	var after []func()
	for _, t := range p.tasks {
		after = append(after, p.end(t, nil, err)...)
	}
	p.retry()
	for _, q := range p.questions {
		close(q.answer)
	}
	p.questions = nil
	p.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// Err returns the reason why the pool has ended: it was closed, the scheduler was unreachable for
// longer than Patience, or the scheduler has refused the client. It returns nil while the pool
// works or tries to reconnect.
func (p *Pool) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// Close ends the client. Unfinished tasks are cancelled and end with ErrClosed.
func (p *Pool) Close() error {
	p.mu.Lock()
	closed := p.failed != nil
	if !closed {
		p.send(nil, func(m *taskspb.ToTasks) { m.Left = true })
	}
	l, c := p.link, p.takeSpare()
	p.mu.Unlock()
	p.fail(ErrClosed)
	if c != nil {
		_ = c.Close()
	}
	if l != nil && !closed {
		l.Flush()
	}
	p.cancel()
	p.soon.Stop()
	p.wg.Wait()
	return nil
}

// checkSubmit returns an error if a task or its options exceed their bounds.
func checkSubmit(s *taskspb.SubmitTask, o *options) error {
	of := s.GetOptions()
	why := link.TooLarge(s, len(of.GetNeeds())+len(of.GetValues()), of.GetPrefer())
	switch {
	case !isName(o.prefer):
		return fmt.Errorf("the host %.20q… of Prefer has %d bytes, or is not UTF-8; at most %d", o.prefer, len(o.prefer), link.MaxName)
	case len(o.demand) > link.MaxAmounts-1:
		return fmt.Errorf("the task demands %d resources; at most %d are allowed", len(o.demand), link.MaxAmounts-1)
	case why != "":
		return errors.New(why)
	}
	for name := range o.demand {
		if !isName(name) {
			return fmt.Errorf("the resource %.20q… has %d bytes, or is not UTF-8; at most %d", name, len(name), link.MaxName)
		}
	}
	return nil
}

// isName reports whether text is valid as a name.
func isName(text string) bool { return len(text) <= link.MaxName && utf8.ValidString(text) }

// group returns the number of the group of a function's tasks with these options. The caller holds
// the lock.
func (p *Pool) group(f *function, o *options) (uint32, error) {
	demand := o.demand
	if _, ok := demand[queue.CPU]; !ok {
		demand = maps.Clone(demand)
		if demand == nil {
			demand = make(map[string]int64, 1)
		}
		demand[queue.CPU] = queue.Unit
	}
	n, g, err := p.number(f, queue.MakeDemand(demand))
	if g != nil {
		p.send(g, func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, g) })
	}
	return n, err
}

// submit sends a task as soon as the window has room.
func (p *Pool) submit(ctx context.Context, f *function, o *options, args []any) (*pending, error) {
	in, err := p.arguments(f, args)
	if err != nil {
		return nil, err
	}
	t := &pending{pool: p, fn: f}
	for {
		p.mu.Lock()
		if err = p.failed; err == nil {
			err = p.add(t, o, in)
		}
		l, room := p.link, p.room
		p.mu.Unlock()
		var large *spillError
		switch {
		case errors.As(err, &large):
			err = p.spill(ctx, in, large.arg)
		case errors.Is(err, errNoRoom):
			err = p.waitFor(ctx, room, f)
		case err != nil:
		case l != nil:
			if err := l.Wait(ctx); err != nil {
				t.Cancel()
				return nil, err
			}
			return t, nil
		default:
			return t, nil
		}
		if err != nil {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.dropAll(in)
			return nil, err
		}
	}
}

// add sends a task. The error is a *spillError if an argument must be stored first, and errNoRoom
// if the largest number of unfinished tasks is reached. The caller holds the lock.
func (p *Pool) add(t *pending, o *options, in []input) error {
	if len(p.tasks) >= p.window {
		return errNoRoom
	}
	e, err := p.encodeInputs(t.fn, in)
	var missing *DependencyError
	if errors.As(err, &missing) {
		t.err = missing
		p.dropAll(in)
		return nil
	} else if err != nil {
		return err
	}
	submit := &taskspb.SubmitTask{N: p.last + 1, Priority: o.priority, Args: e.args}
	if len(e.needs) > 0 || len(e.values) > 0 || o.prefer != "" || o.retries != 0 || o.again || o.limit > 0 || o.pin != 0 {
		submit.Options = &taskspb.TaskOptions{
			Prefer: o.prefer, Pin: o.pin, Needs: e.needs, Values: e.values, Retries: uint32(queue.DefaultRetries + o.retries), Again: o.again,
			LimitMs: uint64((o.limit + time.Millisecond - 1).Milliseconds()),
		}
	}
	if err := checkSubmit(submit, o); err != nil {
		return fmt.Errorf("tasks: %s: %w", t.fn.name, err)
	}
	if submit.Group, err = p.group(t.fn, o); err != nil {
		return err
	}
	t.cost = int64(queue.TaskCost + proto.Size(submit))
	if !p.take(t.cost) {
		return errNoRoom
	}
	p.last++
	t.submit, t.n, t.needs, t.spills = submit, p.last, e.keep, e.spills
	p.tasks[t.n] = t
	p.remember(t.submit)
	p.send(t.submit, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, t.submit) })
	return nil
}
