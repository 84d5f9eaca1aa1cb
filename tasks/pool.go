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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

const (
	// mostWithTask bounds the sum of what is sent with a task.
	mostWithTask = 10 << 20
	// reachEvery is the pause between two tries to reach the scheduler.
	reachEvery = 50 * time.Millisecond
	// defaultPatience is how long a client waits for a scheduler that is out of reach.
	defaultPatience = time.Minute
)

// ConnectConfig says how the scheduler is reached. The zero value is for a worker of a job, and for
// a program that hvdrun tasks run has started.
type ConnectConfig struct {
	// Dial returns a new connection to the scheduler. Nil: to that of the job of this process.
	Dial func(ctx context.Context) (net.Conn, error)
	// Window is how many tasks may be not over at a time: Submit waits beyond it. 0: what the
	// scheduler allows.
	Window int
	// Patience is how long the scheduler may be out of reach; then all tasks fail. 0: a minute.
	Patience time.Duration
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
	last   uint64
	window int
	room   chan struct{}   // closed when there may be room in the window again
	asked  []chan<- []byte // for the status
	failed error           // nothing comes of it any more
}

// pending is a task as its client knows it.
type pending struct {
	pool   *Pool
	fn     *function
	n      uint64
	submit *wire.SubmitTask // nil when it is over
	result *wire.TaskResult // nil until it is over
	err    error            // it is over, and has not succeeded
	over   chan struct{}    // closed then; nil: nobody waits
	after  []func()         // called then
}

// Connect returns a client of the scheduler, and blocks until it is connected. The caller must call
// Close.
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
	p := &Pool{cfg: cfg, session: newSession(), index: map[string]uint32{}, tasks: map[uint64]*pending{}, room: make(chan struct{})}
	conn, r, err := p.hello(ctx)
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
	l.Send(0, func(m *wire.ToTasks) {
		m.Hello = &wire.TasksHello{Session: p.session, Host: host, Pid: uint32(os.Getpid())}
	})
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	r := link.NewReader(conn)
	welcome, err := readWelcome(r)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		l.Close()
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.link = l
	p.window = int(welcome.GetWindow())
	if p.cfg.Window > 0 {
		p.window = min(p.window, p.cfg.Window)
	}
	l.Send(0, func(m *wire.ToTasks) { m.Groups = append(m.Groups, p.groups...) })
	if len(p.asked) > 0 {
		l.Send(0, func(m *wire.ToTasks) { m.Status = true })
	}
	for _, n := range slices.Sorted(maps.Keys(p.tasks)) {
		t := p.tasks[n]
		l.Send(sizeOf(t.submit), func(m *wire.ToTasks) { m.Submits = append(m.Submits, t.submit) })
	}
	return conn, r, nil
}

func sizeOf(s *wire.SubmitTask) int { return 48 + len(s.GetArgs()) }

// refusedError is the scheduler's answer that another try is in vain.
type refusedError struct{ why string }

func (e refusedError) Error() string {
	return "tasks: refused: " + strings.TrimPrefix(e.why, "scheduler: ")
}

// readWelcome reads the scheduler's first message.
func readWelcome(r *link.Reader) (*wire.TasksWelcome, error) {
	var m wire.FromTasks
	if err := r.Read(&m); err != nil {
		return nil, fmt.Errorf("tasks: the scheduler does not answer: %w", err)
	}
	if m.GetRefused() != "" {
		return nil, refusedError{m.GetRefused()}
	}
	if m.GetWelcome() == nil {
		return nil, errors.New("tasks: the scheduler's first message is no welcome")
	}
	return m.GetWelcome(), nil
}

// run reads what the scheduler says until ctx ends, over as many connections as it takes.
func (p *Pool) run(ctx context.Context, conn net.Conn, r *link.Reader) {
	for {
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		err := p.listen(r)
		stop()
		p.mu.Lock()
		l := p.link
		p.link = nil
		p.mu.Unlock()
		if ctx.Err() != nil {
			l.Flush()
			return
		}
		l.Close()
		p.cfg.Log.Debugf("tasks: the connection to the scheduler has ended: %v", err)
		for since := time.Now(); ; {
			if conn, r, err = p.hello(ctx); err == nil {
				break
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
		var released []uint64
		var after []func()
		p.mu.Lock()
		for _, t := range m.GetTold() {
			released = append(released, t.GetN())
			if known := p.tasks[t.GetN()]; known != nil {
				after = append(after, p.end(known, t.GetResult(), failure(known.fn, t.GetResult()))...)
			}
		}
		if len(released) > 0 {
			p.send(8*len(released), func(m *wire.ToTasks) { m.Releases = append(m.Releases, released...) })
		}
		p.mu.Unlock()
		for _, f := range after {
			f()
		}
	}
}

// end records what became of a task, and returns what is to be called; the lock is held.
func (p *Pool) end(t *pending, r *wire.TaskResult, err error) []func() {
	delete(p.tasks, t.n)
	t.submit, t.result, t.err = nil, r, err
	if t.over != nil {
		close(t.over)
	}
	if len(p.tasks) == p.window-1 {
		close(p.room)
		p.room = make(chan struct{})
	}
	after := t.after
	t.after = nil
	return after
}

// send sends where there is a connection; the next one repeats what counts. The lock is held.
func (p *Pool) send(bytes int, add func(*wire.ToTasks)) {
	if p.link != nil {
		p.link.Send(bytes, add)
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
	close(p.room)
	p.room = make(chan struct{})
	p.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// Close ends the client. Tasks that are not over are cancelled, and end with ErrClosed.
func (p *Pool) Close() error {
	p.mu.Lock()
	closed := p.failed != nil
	if !closed {
		p.send(0, func(m *wire.ToTasks) { m.Left = true })
	}
	l := p.link
	p.mu.Unlock()
	p.fail(ErrClosed)
	if l != nil && !closed {
		l.Flush()
	}
	p.cancel()
	p.wg.Wait()
	return nil
}

// group returns the number of the group of a function's tasks with these options; the lock is held.
func (p *Pool) group(f *function, o *options) uint32 {
	demand := o.demand
	if _, ok := demand["cpu"]; !ok {
		demand = maps.Clone(demand)
		if demand == nil {
			demand = make(map[string]int64, 1)
		}
		demand["cpu"] = queue.Unit
	}
	d := queue.MakeDemand(demand)
	key := f.name + " " + d.String()
	i, ok := p.index[key]
	if !ok {
		g := &wire.TaskGroup{Function: f.wire()}
		for _, a := range d {
			g.Demand = append(g.Demand, &wire.Amount{Name: a.Name, Milli: a.Milli})
		}
		i = uint32(len(p.groups))
		p.groups = append(p.groups, g)
		p.index[key] = i
		p.send(64, func(m *wire.ToTasks) { m.Groups = append(m.Groups, g) })
	}
	return i
}

// submit sends a task, once there is room in the window.
func (p *Pool) submit(ctx context.Context, f *function, o *options, args []any) (*pending, error) {
	in, err := p.arguments(f, args)
	if err != nil {
		return nil, err
	}
	for {
		p.mu.Lock()
		if p.failed != nil {
			defer p.mu.Unlock()
			return nil, p.failed
		}
		if len(p.tasks) < p.window {
			break
		}
		room := p.room
		p.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	t, l, err := p.add(f, o, in)
	p.mu.Unlock()
	if err == nil && l != nil {
		err = l.Wait(ctx)
	}
	return t, err
}

// add sends a task; the lock is held.
func (p *Pool) add(f *function, o *options, in []input) (*pending, *link.Link[*wire.ToTasks], error) {
	args, needs, err := p.encodeInputs(f, in)
	t := &pending{pool: p, fn: f}
	var missing *DependencyError
	if errors.As(err, &missing) {
		t.err = missing
		return t, nil, nil
	} else if err != nil {
		return nil, nil, err
	}
	p.last++
	t.n = p.last
	t.submit = &wire.SubmitTask{N: t.n, Group: p.group(f, o), Priority: o.priority, Args: args}
	if len(needs) > 0 || o.prefer != "" || o.retries != 0 || o.again || o.limit > 0 || o.pin != 0 {
		t.submit.Options = &wire.TaskOptions{
			Prefer: o.prefer, Pin: o.pin, Needs: needs, Retries: uint32(queue.DefaultRetries + o.retries), Again: o.again,
			LimitMs: uint64((o.limit + time.Millisecond - 1).Milliseconds()),
		}
	}
	p.tasks[t.n] = t
	p.send(sizeOf(t.submit), func(m *wire.ToTasks) { m.Submits = append(m.Submits, t.submit) })
	return t, p.link, nil
}
