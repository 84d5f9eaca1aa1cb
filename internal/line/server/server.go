// Package server is the launcher's end of the lines of its workers
// (docs/reference/worker-protocol.md): it serves the sockets that workers inherit, and their
// connections to its door, and passes lines between the workers and the driver. Until a program
// says hello, it does nothing.
//
// Programs of package elastic speak the full protocol. For other programs the server sends
// heartbeats to the driver, and writes out the members of a world.
package server

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// Config configures a Server.
type Config struct {
	// Up passes a line of a worker on to the driver. It may block until the driver takes more; the
	// worker waits meanwhile. It must not keep text. A line with a latest key replaces an earlier
	// line of the worker with the same key that was not passed on yet, and may be lost.
	Up func(incarnation string, text []byte, latest string)
	// Stream serves a connection of a worker for another protocol until it ends, and closes it.
	Stream func(incarnation, protocol string, conn net.Conn)
	// Driver reports whether the driver is connected.
	Driver func() bool
	// Program is the path of hvdrun, whose folder may contain the library for collectives. Empty:
	// unknown.
	Program string
	// Log receives errors. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Server serves the lines of a launcher's workers. Its methods are safe for concurrent use.
type Server struct {
	cfg Config

	mu      sync.Mutex
	workers map[string]*worker // by incarnation
}

// worker is a worker with a process that runs or is about to run.
type worker struct {
	env    plan.Worker
	ticket []byte        // proves at the door that it is this worker; nil: it cannot
	begun  chan struct{} // closed when pid is set, or the process could not be started
	pid    int
	lines  []*talk // more than one if a process has opened another at the door
}

// New returns a Server without workers. It starts nothing.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	return &Server{cfg: cfg, workers: make(map[string]*worker)}
}

// Talk returns launch.Spec.Talk for the worker with that environment: a function that returns once
// the process has ended and all its lines have been read. From the call of Talk on, the worker may
// open a line at the door: its process can do so before the launcher knows that it runs. The caller
// must call Forget once the process has ended or could not be started.
func (s *Server) Talk(env []string) func(ctx context.Context, pid int, conn net.Conn) (cleanup func()) {
	own, err := workerOf(env)
	if err != nil {
		s.cfg.Log.Warnf("line: a process is not a worker: %v", err)
		return func(context.Context, int, net.Conn) (cleanup func()) { return nil }
	}
	w := &worker{env: own, ticket: identity.TicketOf(own.Credentials), begun: make(chan struct{})}
	s.mu.Lock()
	s.workers[own.Incarnation] = w
	s.mu.Unlock()
	return func(ctx context.Context, pid int, conn net.Conn) (cleanup func()) {
		w.pid = pid
		close(w.begun)
		t := s.speak(ctx, conn, own.Incarnation)
		if is, ok := conn.(interface{ Ended() <-chan struct{} }); ok {
			<-is.Ended() // a process between this one and the worker may have closed the socket
		}
		s.drain(own.Incarnation, t)
		return func() {
			t.close()
			s.Forget(own.Incarnation)
		}
	}
}

// Forget ends all lines of a worker whose process has ended or could not be started.
func (s *Server) Forget(incarnation string) {
	s.mu.Lock()
	w := s.workers[incarnation]
	if w == nil {
		s.mu.Unlock()
		return
	}
	delete(s.workers, incarnation)
	lines := slices.Clone(w.lines)
	s.mu.Unlock()
	select {
	case <-w.begun:
	default:
		close(w.begun)
	}
	for _, l := range lines {
		_ = l.conn.Close() // ends its goroutine
	}
}

// lastGrace bounds the time for reading lines at the door after their process has ended, and for a
// program to read why its line ends.
const lastGrace = 2 * time.Second

// drain blocks until everything has been read that an ended worker has sent over lines other than
// t, or for lastGrace.
func (s *Server) drain(incarnation string, t *talk) {
	s.mu.Lock()
	others := slices.DeleteFunc(slices.Clone(s.workers[incarnation].lines), func(l *talk) bool { return l == t })
	s.mu.Unlock()
	if len(others) == 0 {
		return
	}
	late := time.NewTimer(lastGrace)
	defer late.Stop()
	for _, l := range others {
		select {
		case <-l.read:
		case <-late.C: // a child of the process holds the connection
			return
		}
	}
}

// Serve serves a connection as a line of a worker until it ends, and closes it.
func (s *Server) Serve(ctx context.Context, conn net.Conn, incarnation string) {
	defer conn.Close()
	s.speak(ctx, conn, incarnation).close()
}

// workerOf parses a worker's environment.
func workerOf(env []string) (plan.Worker, error) {
	vars := make(map[string]string, len(env))
	for _, entry := range env {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = value
	}
	own, started, err := plan.WorkerFromEnv(func(name string) (string, bool) {
		value, is := vars[name]
		return value, is
	})
	if err == nil && !started {
		err = errors.New("it has no worker's environment")
	}
	return own, err
}

// Tell passes a line of the driver, and the bytes after it, on to workers. ranks are their ranks in
// that line; nil: the line is the same for all. It does not block. A worker that has not said hello
// misses the line; the driver notices this from what the worker's launcher reports after the hello.
func (s *Server) Tell(workers []string, ranks []uint32, text, tail []byte) {
	var m line.Message
	if err := json.Unmarshal(text, &m); err != nil {
		s.cfg.Log.Warnf("line: a line of the driver is not JSON: %v", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, inc := range workers {
		w := s.workers[inc]
		if w == nil {
			continue
		}
		own := m
		if i < len(ranks) {
			own.Rank = int(ranks[i])
		}
		for _, t := range w.lines {
			t.told(own, text, tail)
		}
	}
}

// Standing calls say with each line that describes what a worker waits for. It is for a driver that
// may not have received these lines. say must not block, and must not call the server.
func (s *Server) Standing(say func(incarnation string, text []byte)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for inc, w := range s.workers {
		for _, t := range w.lines {
			for _, text := range t.standing() {
				say(inc, text)
			}
		}
	}
}

// running waits until the launcher knows a worker's process, and returns the worker, or nil if it
// does not run.
func (s *Server) running(ctx context.Context, incarnation string) *worker {
	of := func() *worker {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.workers[incarnation]
	}
	w := of()
	if w == nil {
		return nil
	}
	select {
	case <-w.begun: // also if ctx has ended
	default:
		select {
		case <-w.begun:
		case <-ctx.Done():
			return nil
		}
	}
	return of()
}

// holder returns the incarnation of the running worker with the ticket, or "".
func (s *Server) holder(ticket []byte) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for inc, w := range s.workers {
		if hmac.Equal(w.ticket, ticket) {
			return inc
		}
	}
	return ""
}

// enter makes lines of the driver reach the worker by this line too.
func (s *Server) enter(t *talk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.lines = append(t.lines, t)
}

func (s *Server) leave(t *talk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[t.inc]; w != nil {
		w.lines = slices.DeleteFunc(w.lines, func(l *talk) bool { return l == t })
	}
}

const (
	// mostWaiting bounds the lines that wait for a worker to read them, in addition to the newest
	// world, update and loss.
	mostWaiting = 32
	// mostQuestions is the maximum number of requests for stacks that wait for an answer.
	mostQuestions = 4
)

// talk is one line of a worker.
type talk struct {
	server *Server
	conn   net.Conn
	inc    string
	ctx    context.Context // until the line is over
	cancel context.CancelFunc
	wg     sync.WaitGroup // goroutines that hello has started
	*worker
	full  bool
	plain *plain        // nil: the program speaks the full protocol, or has not said hello
	read  chan struct{} // closed when everything that the program has sent is read

	mu sync.Mutex
	writer
	waits
}

// writer holds the lines to write to the program.
type writer struct {
	out     []outgoing
	room    *sync.Cond // signaled when out changes or the line is over
	over    bool       // no more lines are added
	writing bool       // a line is being written
}

// waits is what the worker waits for, and what it has received.
type waits struct {
	join  []byte     // the join without an answer; nil: none
	last  lastJoin   // of the last join
	look  bool       // a look is without an answer
	heard line.Heard // what the worker has received
	asked []uint64   // requests for stacks without an answer
}

// lastJoin tells the answers to a join from those to an earlier join, which a driver that takes
// over may have received again.
type lastJoin struct {
	after    uint64
	canWiden bool
}

// outgoing is a line for the worker.
type outgoing struct {
	kind string
	text []byte
	make func() []byte // returns text; nil: text is set
	tail []byte
	then func() // called once it is written; nil: none
}

// speak reads the lines of a program until it ends. The caller must close the result.
func (s *Server) speak(ctx context.Context, conn net.Conn, inc string) *talk {
	t := &talk{server: s, conn: conn, inc: inc, read: make(chan struct{})}
	defer close(t.read)
	t.room = sync.NewCond(&t.mu)
	t.ctx, t.cancel = context.WithCancel(context.WithoutCancel(ctx)) // a process that is asked to end has a grace period
	if err := t.listen(ctx); err != nil {
		s.cfg.Log.Warnf("line: worker %v: %v", inc, err)
		t.cancel()         // stops the reports that the worker is alive
		_ = t.conn.Close() // unblocks a write of the program
	}
	return t
}

// listen handles lines until the program ends. It returns an error if a line is not valid.
func (t *talk) listen(ctx context.Context) error {
	in := line.NewReader(t.conn, line.MostUp)
	for {
		text, err := in.Line()
		if err == nil {
			err = t.take(ctx, text)
		} else if _, long := errors.AsType[*line.TooLongError](err); !long {
			return nil // the program has ended
		}
		if err != nil {
			t.refuse(err)
			return err
		}
	}
}

// refuse reports to the program why its line ends. It blocks until the program has read that, or
// for lastGrace.
func (t *talk) refuse(why error) {
	_ = t.conn.SetWriteDeadline(time.Now().Add(lastGrace))
	text := line.Error(why.Error(), true)
	if t.worker != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.put(outgoing{kind: "error", text: text})
		for (len(t.out) > 0 || t.writing) && !t.over {
			t.room.Wait()
		}
		return
	}
	_, _ = t.conn.Write(append(text, '\n'))
}

// take handles a line. An error ends the line.
func (t *talk) take(ctx context.Context, text []byte) error {
	do, err := line.Kind(text)
	switch {
	case err != nil:
		return err
	case t.worker == nil && do != "hello":
		return fmt.Errorf("the first line is %q: begin with hello", do)
	case t.worker == nil:
		return t.hello(ctx, text)
	}
	switch do {
	case "join":
		return t.asks(text)
	case "look":
		t.mu.Lock()
		t.look = true
		t.mu.Unlock()
		t.up(text, "")
	case "report":
		return t.reports(text)
	case "stacks":
		return t.located(text)
	case "ping":
		var p struct {
			ID uint64 `json:"id"`
		}
		err := json.Unmarshal(text, &p)
		t.say("pong", line.Text(line.Message{Is: "pong", ID: p.ID, Driver: t.server.cfg.Driver()}))
		return err
	case "pulse":
		if t.full {
			t.up(text, do)
			return nil
		}
	case "beat", "figures":
		if !t.full {
			return t.plain.beats(do, text)
		}
	}
	t.complain(fmt.Sprintf("this hvdrun does not know the line %q", do))
	return nil
}

func (t *talk) up(text []byte, latest string) { t.server.cfg.Up(t.inc, text, latest) }

// hello handles the first line, and begins to serve the worker.
func (t *talk) hello(ctx context.Context, text []byte) error {
	var h line.Hello
	if err := json.Unmarshal(text, &h); err != nil {
		return err
	}
	if h.Version != line.Version {
		return fmt.Errorf("the worker speaks version %d of the protocol, and this hvdrun version %d: install one version for both", h.Version, line.Version)
	}
	if len(h.Program) > 256 {
		return errors.New("the program's name is longer than 256 bytes")
	}
	t.full = h.Full
	if t.worker = t.server.running(ctx, t.inc); t.worker == nil {
		return errors.New("the worker does not run")
	}
	t.wg.Go(t.write)
	t.wg.Go(func() { // the launcher asks the worker to end
		select {
		case <-ctx.Done():
			t.say("leave", line.Down("leave", nil))
		case <-t.ctx.Done():
		}
	})
	answer := helloLine{
		Is: "hello", Version: line.Version, Run: t.env.RunID, Host: t.env.Slot.Host, Slot: t.env.Slot.Index,
		Incarnation: t.inc, Library: beside(t.server.cfg.Program),
	}
	if !t.full {
		var err error
		if t.plain, err = newPlain(t, h.Program); err != nil {
			return err
		}
		answer.Store = t.plain.store.addr()
	}
	t.say("hello", line.Text(answer))
	t.server.enter(t)
	t.hears(true)
	return nil
}

// asks handles a join.
func (t *talk) asks(text []byte) error {
	var j line.Joining
	err := json.Unmarshal(text, &j)
	if err == nil {
		err = j.Check()
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	waits := t.join != nil
	t.mu.Unlock()
	if waits {
		t.complain("a join before the last one was answered")
		return nil
	}
	if t.plain != nil {
		t.plain.asks(&j)
		text = line.Up("join", j)
	}
	t.mu.Lock()
	t.join, t.last = slices.Clone(text), lastJoin{j.After, j.CanWiden}
	t.mu.Unlock()
	t.up(text, "")
	return nil
}

// reports handles a report.
func (t *talk) reports(text []byte) error {
	var r line.ReportLine
	if err := json.Unmarshal(text, &r); err != nil {
		return err
	}
	if t.plain != nil && !t.plain.reports(&r) {
		return nil
	}
	if err := r.Check(); err != nil {
		t.complain(err.Error())
		return nil
	}
	t.up(line.Up("report", r), "")
	return nil
}

// located handles the answer to a request for stacks.
func (t *talk) located(text []byte) error {
	var s line.StacksLine
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	t.mu.Lock()
	at := slices.Index(t.asked, s.ID)
	if at >= 0 {
		t.asked = slices.Delete(t.asked, at, at+1)
	}
	t.mu.Unlock()
	if at < 0 {
		return nil
	}
	if !t.full {
		s = line.StacksLine{ID: s.ID, Worker: stacksOf(s.Text)}
	}
	t.up(line.Up("stacks", s), "stacks")
	return nil
}

// hears reports to the driver what the worker has received. again requests what it lacks.
func (t *talk) hears(again bool) {
	t.mu.Lock()
	h := t.heard
	t.mu.Unlock()
	h.Again = again
	t.up(line.Up("heard", h), "")
}

// standing returns the lines that describe what the worker waits for.
func (t *talk) standing() (all [][]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.join != nil {
		all = append(all, t.join)
	}
	if t.look {
		all = append(all, line.Up("look", nil))
	}
	h := t.heard
	h.Again = true
	return append(all, line.Up("heard", h))
}

// told handles a line of the driver. It does not block.
func (t *talk) told(m line.Message, text, tail []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := outgoing{kind: m.Is, text: text, tail: tail}
	switch m.Is {
	case "world", "dismissed":
		if t.join == nil || m.Is == "world" && m.Generation <= t.last.after {
			return
		}
		t.join = nil
		if m.Is == "world" && t.plain != nil {
			o.tail, o.make = nil, func() []byte { return t.plain.world(m, tail) }
		} else if m.Is == "world" {
			o.text = line.Text(m)
		}
	case "widen":
		if t.join == nil || !t.last.canWiden {
			return
		}
		t.join = nil // the worker joins again
		if t.plain != nil {
			t.plain.widens()
		}
	case "looked":
		if !t.look {
			return
		}
		t.look = false
	case "updated":
		if m.Seq <= t.heard.Seq {
			return
		}
		o.then = func() { t.acknowledge(func(h *line.Heard) { h.Seq = max(h.Seq, m.Seq) }) }
	case "lost":
		loss := notify.Loss{Generation: m.Generation, Ranks: m.Ranks}
		o.then = func() {
			t.acknowledge(func(h *line.Heard) { h.LostGeneration, h.LostRanks = loss.Generation, len(loss.Ranks) })
		}
		if t.plain != nil {
			t.plain.loss = loss
		}
	case "stacks":
		if len(t.asked) >= mostQuestions {
			t.asked = t.asked[1:] // the oldest remains without an answer
		}
		t.asked = append(t.asked, m.ID)
	case "error":
		if m.Fatal {
			t.join = nil
		}
	default:
		return
	}
	t.put(o)
}

// acknowledge records what the worker has received, and reports it to the driver.
func (t *talk) acknowledge(change func(*line.Heard)) {
	t.mu.Lock()
	change(&t.heard)
	t.mu.Unlock()
	t.hears(false)
}

// put queues a line for the worker. A newer world, looked, updated or lost replaces a queued one;
// the lock is held.
func (t *talk) put(o outgoing) {
	switch o.kind {
	case "world", "looked", "updated", "lost":
		t.out = slices.DeleteFunc(t.out, func(old outgoing) bool { return old.kind == o.kind })
	}
	t.out = append(t.out, o)
	t.room.Broadcast()
}

// say queues a line. It blocks while mostWaiting lines wait because the program does not read.
func (t *talk) say(kind string, text []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.out) >= mostWaiting && !t.over {
		t.room.Wait()
	}
	t.put(outgoing{kind: kind, text: text})
}

// behind reports whether the program does not read its lines.
func (t *talk) behind() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.out) >= mostWaiting
}

// complain reports to the program that its line has no effect.
func (t *talk) complain(text string) { t.say("error", line.Error(text, false)) }

// write writes queued lines until the line is over.
func (t *talk) write() {
	for {
		t.mu.Lock()
		for len(t.out) == 0 && !t.over {
			t.room.Wait()
		}
		if len(t.out) == 0 {
			t.mu.Unlock()
			return
		}
		o := t.out[0]
		t.out, t.writing = slices.Delete(t.out, 0, 1), true
		t.mu.Unlock()
		if o.make != nil {
			o.text = o.make()
		}
		lines := net.Buffers{o.text, []byte{'\n'}, o.tail}
		_, err := lines.WriteTo(t.conn)
		t.mu.Lock()
		t.writing = false
		t.over = t.over || err != nil // the program has ended; listen notices that too
		t.room.Broadcast()
		t.mu.Unlock()
		if err == nil && o.then != nil {
			o.then()
		}
	}
}

// close ends the goroutines that hello has started.
func (t *talk) close() {
	t.mu.Lock()
	t.over = true // write ends once the queued lines are written
	t.room.Broadcast()
	t.mu.Unlock()
	t.cancel()
	t.server.leave(t)
	_ = t.conn.Close() // interrupts a write too
	t.wg.Wait()
	if t.plain != nil {
		t.plain.close()
	}
}
