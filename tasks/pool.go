package tasks

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
)

const (
	// reachEvery is the pause between two tries to reach the scheduler.
	reachEvery = 50 * time.Millisecond
	tellAfter  = 2 * time.Second  // from when on failures to reach the scheduler are told
	tellEvery  = 10 * time.Second // and how often at most
	// defaultPatience is how long a client waits for a scheduler that is out of reach.
	defaultPatience = time.Minute
)

// releaseWithin is how long the scheduler may keep the result of a task that the client has: it is
// told so with what the client says next, without a message of its own.
const releaseWithin = 5 * time.Millisecond

// mostUnaccepted is how many tasks that are over a client remembers, beyond what it needs.
const mostUnaccepted = 1000

// ConnectConfig says how the scheduler is reached. The zero value is for a worker of a job, and for
// a program that hvdrun tasks run has started.
type ConnectConfig struct {
	// Dial returns a new connection to the scheduler. Nil: to that of the job of this process.
	Dial func(ctx context.Context) (net.Conn, error)
	// Window is how many tasks may be not over at a time: Submit waits beyond it. 0: what the
	// scheduler allows.
	Window int
	// Patience is how long the scheduler may be out of reach; then all tasks fail, and Connect
	// does. 0: a minute.
	Patience time.Duration
	// Progress, if not nil, is where Map shows how many of its tasks are over: a bar on a terminal,
	// a line now and then elsewhere.
	Progress *os.File
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Pool is a client of a scheduler. It reconnects when a connection breaks; no task is lost by that.
// It is safe for concurrent use.
type Pool struct {
	cfg     ConnectConfig
	session uint64
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu     sync.Mutex
	link   *link.Link[*wire.ToTasks] // nil: there is no connection
	groups []*wire.TaskGroup
	index  map[string]uint32   // of groups
	tasks  map[uint64]*pending // not over
	kept   map[uint64]bool     // over, and their results are stored
	puts   map[blob.ID]*holding
	spare  *transfer.Client // a connection for values; nil: none is kept
	last   uint64
	// unaccepted are tasks that the scheduler has not written down, in their order, those that are
	// over too. Those before them are not repeated.
	unaccepted []*wire.SubmitTask
	connects   int             // hellos so far
	remaking   map[uint64]bool // over, and repeated at the last of them for the sake of their results
	window     int
	// mostBytes is how many bytes of tasks that are not over the scheduler takes; 0: any number.
	// bytes is how many they have, and short how many that may have least for which Submit waits.
	mostBytes, bytes, short int64

	room   chan struct{}   // closed when there may be room in the window again
	asked  []chan<- []byte // for the status
	wonder []question      // that have no answer
	failed error           // nothing comes of it any more
	soon   *time.Timer     // sends what was put for the scheduler
	due    bool            // soon will fire
}

// pending is a task as its client knows it.
type pending struct {
	pool   *Pool
	fn     *function
	n      uint64
	submit *wire.SubmitTask // nil when the scheduler has written it down, or it is over
	needs  []any            // what it has for arguments: tasks and refs, which must stay; nil when it is over
	spills []blob.ID        // arguments that were stored for it
	result *wire.TaskResult // nil until it is over
	cost   int64            // bytes that it takes of the scheduler until then
	err    error            // it is over, and has not succeeded
	over   chan struct{}    // closed then; nil: nobody waits
	after  []func()         // called then
	// cancelled: the scheduler has been asked to end it.
	cancelled bool
}

// Connect returns a client of the scheduler, and blocks until it is connected. Where the scheduler
// is out of reach, because the job is being resumed, it waits for no longer than the patience.
// Its error wraps ErrNoJob where there is no job. The caller must call Close.
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
		cfg: cfg, session: newSession(), index: map[string]uint32{}, tasks: map[uint64]*pending{}, room: make(chan struct{}),
		kept: map[uint64]bool{}, puts: map[blob.ID]*holding{},
	}
	p.soon = time.AfterFunc(time.Hour, p.pushSoon)
	p.soon.Stop()
	var conn net.Conn
	var r *link.Reader
	err := reach(ctx, cfg.Patience, cfg.Log, func(ctx context.Context) (err error) {
		conn, r, err = p.hello(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	p.wg.Go(func() { p.run(life, conn, r) })
	return p, nil
}

func newSession() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// hello connects once, and says all that the scheduler may not have heard.
func (p *Pool) hello(ctx context.Context) (net.Conn, *link.Reader, error) {
	conn, err := p.cfg.Dial(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("tasks: connecting to the scheduler: %w", err)
	}
	l := link.New(conn, func() *wire.ToTasks { return &wire.ToTasks{} })
	host, _ := os.Hostname()
	l.Say(func(m *wire.ToTasks) {
		m.Hello = &wire.TasksHello{Session: p.session, Host: queue.Cut(host, 200), Pid: uint32(os.Getpid())}
	})
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	r := link.NewReader(conn)
	first, err := readWelcome(r)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		l.Close()
		return nil, nil, err
	}
	p.mu.Lock()
	var forgotten []func()
	defer func() {
		p.mu.Unlock()
		for _, f := range forgotten {
			f()
		}
	}()
	p.link = l
	p.accept(first.GetAccepted())
	p.mostBytes = 0
	p.mayHave(first.GetWindowBytes())
	welcome := first.GetWelcome()
	p.window = int(welcome.GetWindow())
	if p.cfg.Window > 0 {
		p.window = min(p.window, p.cfg.Window)
	}
	p.introduce()
	if !welcome.GetKnown() {
		for _, t := range p.tasks {
			if t.submit == nil {
				forgotten = append(forgotten, p.end(t, nil, fmt.Errorf("%w: %s", ErrForgotten, t.fn.name))...)
			}
		}
	}
	ends := p.ends()
	p.unaccepted = p.repeated(ends)
	p.connects++
	p.remaking = map[uint64]bool{}
	for _, t := range p.unaccepted {
		end := ends[t.GetN()]
		delete(ends, t.GetN())
		if p.tasks[t.GetN()] == nil && end == nil {
			p.remaking[t.GetN()] = true
		}
		part := &wire.ToTasks{Submits: []*wire.SubmitTask{t}} // in one message, since it may need what is unknown
		if end != nil {
			part.Ends = []*wire.TaskTold{{N: t.GetN(), Result: end}}
		}
		p.send(part, func(m *wire.ToTasks) {
			m.Submits, m.Ends = append(m.Submits, part.GetSubmits()...), append(m.Ends, part.GetEnds()...)
		})
	}
	for n, end := range ends {
		told := &wire.TaskTold{N: n, Result: end}
		p.send(told, func(m *wire.ToTasks) { m.Ends = append(m.Ends, told) })
	}
	for _, t := range p.tasks {
		if t.cancelled {
			p.send(nil, t.cancel)
		}
	}
	return conn, r, nil
}

// introduce says over a new connection what tasks refer to, and asks again what people have asked;
// the lock is held.
func (p *Pool) introduce() {
	for _, g := range p.groups {
		p.include(g, func(m *wire.ToTasks) { m.Groups = append(m.Groups, g) })
	}
	if len(p.asked) > 0 {
		p.include(nil, func(m *wire.ToTasks) { m.Status = true })
	}
	for id, h := range p.puts {
		v := &wire.PutValue{Value: id[:], Size: uint64(h.size)}
		p.include(v, func(m *wire.ToTasks) { m.Puts = append(m.Puts, v) })
	}
	for _, w := range p.wonder {
		p.include(&wire.ToTasks{Explain: []string{w.what}}, func(m *wire.ToTasks) { m.Explain = append(m.Explain, w.what) })
	}
	p.link.Push()
}

// ends returns what has become of tasks that are arguments of those which are not over. The
// scheduler may have taken the place of one that told it and did not write it down. Stored results
// are left out: another scheduler may have to make them again. The lock is held.
func (p *Pool) ends() map[uint64]*wire.TaskResult {
	all := map[uint64]*wire.TaskResult{}
	for _, t := range p.tasks {
		for _, need := range t.needs {
			if n, ok := need.(*pending); ok && n.result != nil && n.result.GetSize() == 0 {
				all[n.n] = n.result
			}
		}
	}
	return all
}

// repeated returns those of the tasks which the scheduler has not written down that another
// scheduler must know: they are not over, or their result is stored and kept, or is an argument of
// such a task. What those need whose ends are told is not repeated. The lock is held.
func (p *Pool) repeated(ends map[uint64]*wire.TaskResult) (all []*wire.SubmitTask) {
	needed := make(map[uint64]bool)
	for _, t := range slices.Backward(p.unaccepted) {
		if p.tasks[t.GetN()] == nil && !p.kept[t.GetN()] && !needed[t.GetN()] {
			continue
		}
		all = append(all, t)
		if ends[t.GetN()] != nil {
			continue
		}
		for _, n := range t.GetOptions().GetNeeds() {
			needed[n] = true
		}
	}
	slices.Reverse(all)
	return all
}

// refusedError is the scheduler's answer that another try is in vain.
type refusedError struct{ why string }

func (e refusedError) Error() string {
	return "tasks: refused: " + strings.TrimPrefix(e.why, "scheduler: ")
}

// readWelcome reads the scheduler's first message.
func readWelcome(r *link.Reader) (*wire.FromTasks, error) {
	m := &wire.FromTasks{}
	if err := r.Read(m); err != nil {
		return nil, fmt.Errorf("tasks: the scheduler does not answer: %w", err)
	}
	if m.GetRefused() != "" {
		return nil, refusedError{m.GetRefused()}
	}
	if m.GetWelcome() == nil {
		return nil, errors.New("tasks: the scheduler's first message is no welcome")
	}
	return m, nil
}

// run reads what the scheduler says until ctx ends, over as many connections as it takes.
func (p *Pool) run(ctx context.Context, conn net.Conn, r *link.Reader) {
	for {
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		err := p.listen(r)
		stop()
		p.mu.Lock()
		l, closed := p.link, p.failed != nil
		p.link = nil
		p.mu.Unlock()
		if closed || ctx.Err() != nil {
			l.Flush()
			return
		}
		l.Close()
		p.cfg.Log.Debugf("tasks: the connection to the scheduler has ended: %v", err)
		failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
		for since := time.Now(); ; {
			if conn, r, err = p.hello(ctx); err == nil {
				break
			}
			if ctx.Err() == nil {
				failures.Warn(p.cfg.Log, time.Now(), "tasks: the scheduler is not reached", err)
			}
			var refused refusedError
			if errors.As(err, &refused) || time.Since(since) > p.cfg.Patience {
				p.fail(err)
				return
			}
			select {
			case <-time.After(reachEvery):
			case <-ctx.Done():
				p.fail(ErrClosed)
				return
			}
		}
	}
}

func (p *Pool) listen(r *link.Reader) error {
	var m wire.FromTasks
	for {
		if err := r.Read(&m); err != nil {
			return err
		}
		if text := m.GetStatus(); len(text) > 0 {
			p.answered(text)
		}
		p.explained(m.GetExplained())
		for _, text := range m.GetWarnings() {
			p.cfg.Log.Warn("tasks: " + text)
		}
		var released []uint64
		var after []func()
		p.mu.Lock()
		p.accept(m.GetAccepted())
		p.mayHave(m.GetWindowBytes())
		for _, t := range m.GetTold() {
			delete(p.remaking, t.GetN())
			switch {
			case p.kept[t.GetN()]: // it has run again for the sake of its result
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
}

// release has the scheduler forget results soon; the lock is held.
func (p *Pool) release(all []uint64) {
	if len(all) == 0 || p.link == nil {
		return
	}
	p.include(&wire.ToTasks{Releases: all}, func(m *wire.ToTasks) { m.Releases = append(m.Releases, all...) })
	if !p.due {
		p.due = true
		p.soon.Reset(releaseWithin)
	}
}

// pushSoon sends what was put.
func (p *Pool) pushSoon() {
	p.mu.Lock()
	p.due = false
	l := p.link
	p.mu.Unlock()
	if l != nil {
		l.Push()
	}
}

// accept notes that tasks up to a number are written down; the lock is held.
func (p *Pool) accept(n uint64) {
	i := 0
	for ; i < len(p.unaccepted) && p.unaccepted[i].GetN() <= n; i++ {
		if t := p.tasks[p.unaccepted[i].GetN()]; t != nil {
			t.submit = nil
		}
		p.unaccepted[i] = nil
	}
	p.unaccepted = p.unaccepted[i:]
}

// keep has the scheduler keep the stored result of a task until nothing has its Future any more;
// the lock is held.
func (p *Pool) keep(t *pending) {
	p.kept[t.n] = true
	runtime.AddCleanup(t, func(n uint64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.kept, n)
		p.send(nil, func(m *wire.ToTasks) { m.Releases = append(m.Releases, n) })
	}, t.n)
}

// end records what became of a task, and returns what is to be called; the lock is held.
func (p *Pool) end(t *pending, r *wire.TaskResult, err error) []func() {
	delete(p.tasks, t.n)
	t.submit, t.needs, t.result, t.err = nil, nil, r, err
	for _, id := range t.spills {
		defer p.drop(id)
	}
	t.spills = nil
	if t.over != nil {
		close(t.over)
	}
	p.bytes -= t.cost
	if len(p.tasks) == p.window-1 || p.short > 0 && p.hasRoom(p.short) {
		p.again()
	}
	after := t.after
	t.after = nil
	return after
}

// send sends where there is a connection; the next one repeats what counts. The lock is held.
func (p *Pool) send(part proto.Message, add func(*wire.ToTasks)) {
	if p.include(part, add); p.link != nil {
		p.link.Push()
	}
}

// include is send of what may wait for what is sent next. It is within its bounds.
func (p *Pool) include(part proto.Message, add func(*wire.ToTasks)) {
	if p.link == nil {
		return
	}
	if err := p.link.Put(part, add); err != nil {
		p.cfg.Log.WithError(err).Error("tasks: the scheduler cannot be told")
	}
}

// fail ends all tasks.
func (p *Pool) fail(err error) {
	p.mu.Lock()
	if p.failed == nil {
		p.failed = err
	}
	var after []func()
	for _, t := range p.tasks {
		after = append(after, p.end(t, nil, err)...)
	}
	p.again()
	p.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// mayHave notes how many bytes the scheduler takes; 0: what it said before. The lock is held.
func (p *Pool) mayHave(bytes uint64) {
	if bytes > 0 {
		p.mostBytes = int64(min(bytes, math.MaxInt64))
	}
	if p.short > 0 && p.hasRoom(p.short) {
		p.again()
	}
}

// hasRoom returns whether the scheduler takes so many bytes more; the lock is held.
func (p *Pool) hasRoom(more int64) bool { return p.mostBytes == 0 || p.bytes+more <= p.mostBytes }

// again has those try again that wait for room; the lock is held.
func (p *Pool) again() {
	p.short = 0
	close(p.room)
	p.room = make(chan struct{})
}

// Err returns why nothing more can come of the pool: it was closed, or the scheduler was out of
// reach for longer than the patience. Nil: it works, or tries to.
func (p *Pool) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// Close ends the client. Tasks that are not over are cancelled, and end with ErrClosed.
func (p *Pool) Close() error {
	p.mu.Lock()
	closed := p.failed != nil
	if !closed {
		p.send(nil, func(m *wire.ToTasks) { m.Left = true })
	}
	l, c := p.link, p.spare
	p.spare = nil
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

// checkSubmit returns an error where a task or its options are larger than may be.
func checkSubmit(s *wire.SubmitTask, o *options) error {
	needs := len(s.GetOptions().GetNeeds()) + len(s.GetOptions().GetValues())
	switch size := proto.Size(s); {
	case needs > link.MaxNeeds:
		return fmt.Errorf("%d arguments are results of tasks or stored values; at most %d may be", needs, link.MaxNeeds)
	case size > link.MaxSubmit:
		return fmt.Errorf("the task has %d bytes; at most %d may be sent", size, link.MaxSubmit)
	case !isName(o.prefer):
		return fmt.Errorf("the host %.20q… of Prefer has %d bytes, or is not UTF-8; at most %d", o.prefer, len(o.prefer), link.MaxName)
	case len(o.demand) > link.MaxAmounts-1:
		return fmt.Errorf("%d resources; at most %d", len(o.demand), link.MaxAmounts-1)
	}
	for name := range o.demand {
		if !isName(name) {
			return fmt.Errorf("the resource %.20q… has %d bytes, or is not UTF-8; at most %d", name, len(name), link.MaxName)
		}
	}
	return nil
}

// isName returns whether a text may be the name of something.
func isName(text string) bool { return len(text) <= link.MaxName && utf8.ValidString(text) }

// group returns the number of the group of a function's tasks with these options; the lock is held.
func (p *Pool) group(f *function, o *options) (uint32, error) {
	demand := o.demand
	if _, ok := demand[queue.CPU]; !ok {
		demand = maps.Clone(demand)
		if demand == nil {
			demand = make(map[string]int64, 1)
		}
		demand[queue.CPU] = queue.Unit
	}
	d := queue.MakeDemand(demand)
	key := f.name + " " + d.String()
	i, ok := p.index[key]
	if !ok && len(p.groups) >= link.MaxFunctions {
		return 0, fmt.Errorf("tasks: %s: the pool has submitted %d kinds of tasks, which differ in their functions or their needs; there may be no more",
			f.name, len(p.groups))
	}
	if !ok {
		g := &wire.TaskGroup{Function: f.wire()}
		for _, a := range d {
			g.Demand = append(g.Demand, &wire.Amount{Name: a.Name, Milli: a.Milli})
		}
		i = uint32(len(p.groups))
		p.groups = append(p.groups, g)
		p.index[key] = i
		p.send(g, func(m *wire.ToTasks) { m.Groups = append(m.Groups, g) })
	}
	return i, nil
}

// submit sends a task, once there is room in the window.
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
			return t, l.Wait(ctx)
		default:
			return t, nil
		}
		if err != nil {
			p.unspill(in)
			return nil, err
		}
	}
}

// errNoRoom has Submit wait.
var errNoRoom = errors.New("tasks: there is no room")

// roomWarnedAfter is how long Submit waits for room in the scheduler's memory before its user is
// told.
const roomWarnedAfter = 5 * time.Second

// waitFor waits for room.
func (p *Pool) waitFor(ctx context.Context, room <-chan struct{}, f *function) error {
	warn := time.NewTimer(roomWarnedAfter)
	defer warn.Stop()
	for {
		select {
		case <-room:
			return nil
		case <-warn.C:
			p.mu.Lock()
			bytes, most, short := p.bytes, p.mostBytes, p.short > 0
			p.mu.Unlock()
			if short {
				p.cfg.Log.Warnf("tasks: Submit of %s waits: %d bytes of tasks of this program are not over, and the scheduler takes %d now "+
					"(--tasks-memory); hvdrun tasks shows who has how many", f.name, bytes, most)
			}
		case <-ctx.Done():
			return fmt.Errorf("%w for a task of %s: %w", ErrQueueFull, f.name, ctx.Err())
		}
	}
}

// add sends a task; the lock is held. The error is a *spillError where an argument must be stored
// first, and errNoRoom where as many tasks are not over as may be.
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
	submit := &wire.SubmitTask{N: p.last + 1, Priority: o.priority, Args: e.args}
	if len(e.needs) > 0 || len(e.values) > 0 || o.prefer != "" || o.retries != 0 || o.again || o.limit > 0 || o.pin != 0 {
		submit.Options = &wire.TaskOptions{
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
	cost := int64(queue.TaskCost + proto.Size(submit))
	if !p.hasRoom(cost) {
		if p.short == 0 || cost < p.short {
			p.short = cost
		}
		return errNoRoom
	}
	p.last++
	p.bytes += cost
	t.cost = cost
	t.submit, t.n, t.needs, t.spills = submit, p.last, e.keep, e.spills
	p.tasks[t.n] = t
	if len(p.unaccepted) > mostUnaccepted+2*(len(p.tasks)+len(p.kept)) { // the scheduler writes nothing down
		p.unaccepted = p.repeated(nil)
	}
	p.unaccepted = append(p.unaccepted, t.submit)
	p.send(t.submit, func(m *wire.ToTasks) { m.Submits = append(m.Submits, t.submit) })
	return nil
}
