package scaler

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// Config configures a worker. Address and Functions are required; the zero value of each other
// field works.
type Config struct {
	// Address is the address of the scheduler, as tcp://host:port or ipc:///path.
	Address   string
	Functions Functions
	// Name becomes a part of the worker's identity, which Scaler's monitors show; "": hvdrun.
	Name string
	// Slots is the number of tasks that run at a time; 0: 1, as in Scaler.
	Slots int
	// Heartbeat is the time between heartbeats; 0: 2 s. By default, the scheduler gives up a worker
	// after 60 s without one.
	Heartbeat time.Duration
	// EchoTimeout is how long an answer to a heartbeat may take before the worker reconnects; 0: 30
	// s.
	EchoTimeout time.Duration
	// GiveUp is how long the scheduler may be unreachable before Work ends; 0: 5 min.
	GiveUp time.Duration
	// LeaveTimeout is how long Work waits for the scheduler's answer when it leaves; 0: 2 s.
	LeaveTimeout time.Duration
	// Cache is the number of bytes of objects that are kept for later tasks, in addition to the
	// objects of the next ones; 0: 256 MiB.
	Cache int64
	// Message is the size of the largest message that is read, in bytes; 0: 256 MiB. A task with a
	// larger object fails.
	Message int64
	// Log receives errors; nil: nothing is logged.
	Log logrus.FieldLogger
	// Dial connects to the scheduler with an identity that no other connection has had; nil: by TCP
	// or a unix socket, without encryption, as Scaler does.
	Dial func(ctx context.Context, identity []byte) (Socket, error)

	unique []byte // random bytes of this worker
}

// ErrNoScheduler is returned by Work when the scheduler has been unreachable for too long.
var ErrNoScheduler = errors.New("scaler: the scheduler cannot be reached")

// redial is the pause between attempts to connect, and dialTime how long an attempt may take.
const (
	redial   = 500 * time.Millisecond
	dialTime = 10 * time.Second
)

func (c *Config) fill() error {
	if len(c.Functions) == 0 {
		return errors.New("scaler: a worker needs functions")
	}
	if c.Slots < 0 {
		return fmt.Errorf("scaler: Config.Slots is %d: give 0 or more", c.Slots)
	}
	fill(&c.Name, "hvdrun")
	fill(&c.Slots, 1)
	fill(&c.Heartbeat, 2*time.Second)
	fill(&c.EchoTimeout, 30*time.Second)
	fill(&c.GiveUp, 5*time.Minute)
	fill(&c.LeaveTimeout, 2*time.Second)
	fill(&c.Cache, 256<<20)
	fill(&c.Message, 256<<20)
	if len(c.Name) > 100 || strings.ContainsAny(c.Name, "|\x00") {
		return fmt.Errorf("scaler: name %q: at most 100 bytes, without |", c.Name)
	}
	if c.Log == nil {
		silent := logrus.New()
		silent.SetLevel(logrus.PanicLevel)
		c.Log = silent
	}
	if c.Dial == nil {
		if _, _, err := zmtp.Split(c.Address); err != nil {
			return err
		}
		c.Dial = func(ctx context.Context, identity []byte) (Socket, error) {
			return dial(ctx, c.Address, identity, c.Message)
		}
	}
	c.unique = make([]byte, 16)
	_, _ = rand.Read(c.unique) // never fails
	return nil
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Work runs this process as a worker of Scaler. It runs tasks until ctx ends or the scheduler shuts
// the worker down, and returns when all its calls have returned. When the connection breaks it
// reconnects, and resends results that the scheduler may not have received.
//
// A task may run more than once, as in Scaler: functions must tolerate that. The connection to the
// scheduler is neither encrypted nor authenticated: the scheduler, or anyone on the network in
// between, chooses which of the functions are called, and with which arguments.
//
// Work returns nil after a shutdown by the scheduler, context.Cause(ctx) after the end of ctx, an
// error that is ErrNoScheduler if the scheduler cannot be reached, and other errors for an invalid
// Config.
func Work(ctx context.Context, cfg Config) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	w := &worker{
		cfg: cfg, core: newCore(cfg, time.Now()), log: cfg.Log, ends: make(map[uint64]context.CancelFunc),
		done: make(chan outcome), dialing: dialing{dialed: make(chan dialed)}, timer: time.NewTimer(0),
	}
	w.calls, w.endCalls = context.WithCancel(context.WithoutCancel(ctx))
	defer w.endCalls()
	return w.run(ctx)
}

// worker carries out what a core decides. Only the goroutine of Work uses it.
type worker struct {
	cfg     Config
	core    *core
	log     logrus.FieldLogger
	sampler sampler

	link    *link
	old     []byte     // identity of the last connection
	pending [][][]byte // messages to send on the current connection
	dialing

	calls    context.Context
	endCalls context.CancelFunc
	ends     map[uint64]context.CancelFunc
	done     chan outcome
	timer    *time.Timer
	wg       sync.WaitGroup // calls and dials
}

// dialing is the state of a worker's attempts to connect.
type dialing struct {
	under  bool      // an attempt is in progress
	told   bool      // the log has said that attempts fail
	retry  time.Time // when to try again
	dialed chan dialed
}

// due reports whether to try now, if there is no connection.
func (d *dialing) due(now time.Time) bool { return !d.under && !now.Before(d.retry) }

// failed records that an attempt has failed, and reports whether to log that.
func (d *dialing) failed(now time.Time) (tell bool) {
	tell, d.told = !d.told, true
	d.retry = now.Add(redial)
	return tell
}

type outcome struct {
	run     uint64
	result  []byte
	err     error
	profile profile
}

type dialed struct {
	socket Socket
	err    error
}

func (w *worker) run(ctx context.Context) error {
	dialCtx, stop := context.WithCancel(ctx)
	err := w.loop(ctx, dialCtx)
	stop()
	w.endCalls()
	w.leave()
	w.disconnect()
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		w.wg.Wait()
	}()
	for {
		select {
		case d := <-w.dialed:
			if d.err == nil {
				d.socket.Close()
			}
		case <-w.done:
		case <-settled:
			return err
		}
	}
}

// loop runs until the worker must leave.
func (w *worker) loop(ctx, dialCtx context.Context) error {
	for !w.core.leaving {
		now := time.Now()
		if w.core.gone(now) {
			return fmt.Errorf("%w for %v at %s", ErrNoScheduler, w.cfg.GiveUp, w.cfg.Address)
		}
		if w.link == nil && w.due(now) {
			w.dial(dialCtx)
		}
		w.core.tick(now, func() usage { return w.sampler.look(now) })
		w.perform()
		w.arm(now)
		in, failed, out, next := w.ways()
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case d := <-w.dialed:
			w.connect(d)
		case r := <-in:
			w.receive(r)
		case err := <-failed:
			w.broken(err)
		case out <- next:
			w.pending[0] = nil
			w.pending = w.pending[1:]
		case o := <-w.done:
			w.finish(o)
		case <-w.timer.C:
		}
		w.perform()
	}
	return nil
}

// ways returns the channels of the link and the next message to send. They are nil without a link
// or a message.
func (w *worker) ways() (in chan received, failed chan error, out chan [][]byte, next [][]byte) {
	if w.link == nil {
		return nil, nil, nil, nil
	}
	if len(w.pending) > 0 {
		out, next = w.link.out, w.pending[0]
	}
	return w.link.in, w.link.failed, out, next
}

func (w *worker) arm(now time.Time) {
	at := w.core.due()
	if w.link == nil && !w.under && w.retry.Before(at) {
		at = w.retry
	}
	w.timer.Reset(max(0, at.Sub(now)))
}

// perform performs the actions of the core.
func (w *worker) perform() {
	a := w.core.take()
	for _, note := range a.note {
		w.log.Warnf("scaler: %s", note)
	}
	for _, m := range a.send {
		w.pending = append(w.pending, encode(m))
	}
	for _, run := range a.stop {
		if end := w.ends[run]; end != nil {
			end()
		}
	}
	for _, s := range a.start {
		ctx, end := context.WithCancel(w.calls)
		w.ends[s.run] = end
		w.wg.Go(func() { w.done <- call(ctx, s) })
	}
	if a.broken {
		w.broken(errors.New("it has not echoed a heartbeat in time"))
	}
}

// call calls a function, and converts a panic to an error.
func call(ctx context.Context, s start) (o outcome) {
	began := time.Now()
	o.run = s.run
	defer func() {
		if p := recover(); p != nil {
			o.result, o.err = nil, fmt.Errorf("scaler: the function panics: %v", p)
		}
		o.profile.Duration = float32(time.Since(began).Seconds())
	}()
	o.result, o.err = s.fn(ctx, s.args)
	return o
}

func (w *worker) finish(o outcome) {
	w.ends[o.run]()
	delete(w.ends, o.run)
	w.core.finished(o.run, o.result, o.err, o.profile)
}

func (w *worker) dial(ctx context.Context) {
	w.under = true
	identity := newIdentity(w.cfg.Name)
	w.wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, dialTime)
		defer cancel()
		socket, err := w.cfg.Dial(ctx, identity)
		w.dialed <- dialed{socket, err}
	})
}

// newIdentity returns an identity in the form of those of Scaler's workers.
func newIdentity(name string) []byte {
	unique := make([]byte, 16)
	_, _ = rand.Read(unique) // never fails
	return fmt.Appendf(nil, "%d|%s|%x", os.Getpid(), name, unique)
}

func (w *worker) connect(d dialed) {
	w.under = false
	now := time.Now()
	if d.err != nil {
		if w.dialing.failed(now) {
			w.log.Warnf("scaler: the worker keeps trying to connect: %v", d.err)
		}
		return
	}
	w.told = false
	w.link = newLink(d.socket)
	id := d.socket.Identity()
	w.core.connected(now, id, w.old, w.sampler.look(now))
	w.old = id
}

func (w *worker) receive(r received) {
	var large *zmtp.TooLargeError
	switch {
	case errors.As(r.err, &large):
		w.log.Warnf("scaler: %v", r.err)
		if string(large.First) == (*objectResponse)(nil).kind() {
			w.core.tooLarge(r.err)
		}
		return
	case r.err != nil:
		w.broken(r.err)
		return
	}
	m, err := decode(r.frames)
	if err != nil {
		w.log.Warnf("%v", err)
		return
	}
	w.core.message(time.Now(), m)
}

// broken ends a connection. Another attempt follows after a pause.
func (w *worker) broken(err error) {
	w.log.Warnf("scaler: the connection to the scheduler has ended: %v", err)
	w.disconnect()
	w.core.disconnected()
	w.retry = time.Now().Add(redial)
}

func (w *worker) disconnect() {
	if w.link != nil {
		w.link.close()
	}
	w.link, w.pending = nil, nil
}

// leave tells the scheduler that the worker leaves, so that it gives the worker's tasks to others,
// and waits for its answer.
func (w *worker) leave() {
	w.core.leaving = true
	if w.link == nil {
		return
	}
	w.core.send(&disconnectRequest{w.core.id})
	w.perform()
	w.timer.Reset(w.cfg.LeaveTimeout)
	for {
		in, failed, out, next := w.ways()
		select {
		case r := <-in:
			if r.err != nil {
				return // the scheduler has ended
			}
			if m, err := decode(r.frames); err == nil {
				if _, ok := m.(*disconnectResponse); ok {
					return
				}
			}
		case <-failed:
			return
		case out <- next:
			w.pending = w.pending[1:]
		case o := <-w.done:
			w.finish(o)
			w.perform()
		case <-w.timer.C:
			w.log.Debug("scaler: the scheduler does not acknowledge that the worker leaves")
			return
		}
	}
}
