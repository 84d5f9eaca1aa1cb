// Package server is the launcher's end of the lines of its workers
// (docs/reference/worker-protocol.md): it serves the sockets that workers inherit, and connections
// of workers to its door, passes lines on to the driver, and lines of the driver to workers. Until
// a program says hello, it does nothing.
//
// Programs of package elastic speak the full protocol. For the others it makes heartbeats, and
// writes out the members of a world.
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
	// Up passes a line of a worker on to the driver. It may block until the driver takes more; then
	// the worker waits. It must not keep text. A line with latest takes the place of one of the
	// worker's that was not passed on yet, has the same latest, and may be lost.
	Up func(incarnation string, text []byte, latest string)
	// Stream serves a connection of a worker for another protocol, which it closes, until that
	// ends.
	Stream func(incarnation, protocol string, conn net.Conn)
	// Driver reports whether the driver is connected.
	Driver func() bool
	// Program is the path of hvdrun; the library for collectives may be in the same folder. Empty:
	// unknown.
	Program string
	// Log receives errors. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Server has the lines of a launcher's workers. Its methods are safe for concurrent use.
type Server struct {
	cfg Config

	mu      sync.Mutex
	workers map[string]*worker // by incarnation
}

// worker is a worker whose process runs.
type worker struct {
	env    plan.Worker
	ticket []byte // by which it proves at the door that it is this worker; nil: it cannot
	pid    int
	lines  []*talk // several where a process has opened a further one at the door
}

// New returns a Server without workers. It starts nothing.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	return &Server{cfg: cfg, workers: make(map[string]*worker)}
}

// Talk returns launch.Spec.Talk for the worker with that environment: it returns when the process
// has ended, and all its lines have been read.
func (s *Server) Talk(env []string) func(ctx context.Context, pid int, conn net.Conn) (cleanup func()) {
	return func(ctx context.Context, pid int, conn net.Conn) (cleanup func()) {
		own, err := workerOf(env)
		if err != nil {
			s.cfg.Log.Warnf("line: a process that is no worker: %v", err)
			return nil
		}
		s.mu.Lock()
		s.workers[own.Incarnation] = &worker{env: own, ticket: identity.TicketOf(own.Credentials), pid: pid}
		s.mu.Unlock()
		t := s.speak(ctx, conn, own.Incarnation)
		if is, ok := conn.(interface{ Ended() <-chan struct{} }); ok {
			<-is.Ended() // a process between this one and the worker may have closed the socket
		}
		s.drain(own.Incarnation, t)
		return func() {
			t.close()
			s.mu.Lock()
			w := s.workers[own.Incarnation]
			delete(s.workers, own.Incarnation)
			others := slices.Clone(w.lines)
			s.mu.Unlock()
			for _, l := range others {
				_ = l.conn.Close() // its goroutine ends it
			}
		}
	}
}

// lastGrace is how long lines of a process that has ended are read which it has opened at the door.
const lastGrace = 2 * time.Second

// drain blocks until all has been read that a worker, whose process has ended, has said by other
// lines than t.
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

// Serve serves a line of a worker by a connection of its own, which it closes. It blocks until that
// ends.
func (s *Server) Serve(ctx context.Context, conn net.Conn, incarnation string) {
	defer conn.Close()
	s.speak(ctx, conn, incarnation).close()
}

// workerOf reads a worker's environment.
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
		err = errors.New("it has no environment of one")
	}
	return own, err
}

// Tell passes a line of the driver, and what follows it, on to workers. ranks are those of the
// workers; nil: the line is the same for all. It does not block. A worker that has not said hello
// misses it: what its launcher says for it then shows that.
func (s *Server) Tell(workers []string, ranks []uint32, text, tail []byte) {
	var m line.Message
	if err := json.Unmarshal(text, &m); err != nil {
		s.cfg.Log.Warnf("line: a line of the driver that is not JSON: %v", err)
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

// Standing calls say with each line by which a driver that has heard nothing, or may have lost
// something, knows what workers wait for. It must not block, and not call the server.
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

// running returns a worker; nil: it does not run.
func (s *Server) running(incarnation string) *worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.workers[incarnation]
}

// holder returns the incarnation of the worker that has that ticket; "": none that runs.
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

// enter has lines of the driver reach the worker by this line too.
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
	// mostWaiting bounds the lines that wait for a worker to read them, besides the newest world,
	// update and loss.
	mostWaiting = 32
	// mostQuestions is how many questions for stacks may wait for an answer.
	mostQuestions = 4
)

// talk is one line of a worker.
type talk struct {
	server *Server
	conn   net.Conn
	inc    string
	ctx    context.Context // until the line is over
	cancel context.CancelFunc
	wg     sync.WaitGroup // what hello has started
	*worker
	full  bool
	plain *plain        // of a program that does not speak the full protocol; nil: it does, or has not said hello
	read  chan struct{} // closed when all that the program has said is read

	mu sync.Mutex
	writer
	waits
}

// writer is what is written to the program.
type writer struct {
	out     []outgoing
	room    *sync.Cond // out is shorter, or the line is over
	over    bool       // nothing more is written
	writing bool       // a line is being written
}

// waits is what the worker waits for, and what it was told.
type waits struct {
	join  []byte     // that waits for its answer; nil: none
	last  lastJoin   // what is to be known of it
	look  bool       // one waits for its answer
	heard line.Heard // what the worker was told
	asked []uint64   // questions for stacks
}

// lastJoin tells the answers to a join from those to an earlier one, which a driver that takes over
// may have been sent again.
type lastJoin struct {
	after    uint64
	canWiden bool
}

// outgoing is a line for the worker.
type outgoing struct {
	kind string
	text []byte
	make func() []byte // makes text; nil: it is there
	tail []byte
	then func() // called once it is written; nil: nothing
}

// speak reads the lines of a program until it ends. The caller must close what it returns.
func (s *Server) speak(ctx context.Context, conn net.Conn, inc string) *talk {
	t := &talk{server: s, conn: conn, inc: inc, read: make(chan struct{})}
	defer close(t.read)
	t.room = sync.NewCond(&t.mu)
	t.ctx, t.cancel = context.WithCancel(context.WithoutCancel(ctx)) // a process that is asked to end has its grace
	if err := t.listen(ctx); err != nil {
		s.cfg.Log.Warnf("line: worker %v: %v", inc, err)
	}
	return t
}

// listen reads lines until the program ends, and returns what was wrong with them.
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

// refuse tells the program why its line ends.
func (t *talk) refuse(why error) {
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

// take does what a line asks for. An error ends the line.
func (t *talk) take(ctx context.Context, text []byte) error {
	do, err := line.Kind(text)
	switch {
	case err != nil:
		return err
	case t.worker == nil && do != "hello":
		return fmt.Errorf("%q before hello", do)
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
	t.complain(fmt.Sprintf("%q is nothing that this hvdrun does", do))
	return nil
}

func (t *talk) up(text []byte, latest string) { t.server.cfg.Up(t.inc, text, latest) }

// hello begins to act for the worker.
func (t *talk) hello(ctx context.Context, text []byte) error {
	var h line.Hello
	if err := json.Unmarshal(text, &h); err != nil {
		return err
	}
	if h.Version != line.Version {
		return fmt.Errorf("version %d of the protocol; this hvdrun speaks version %d", h.Version, line.Version)
	}
	if len(h.Program) > 256 {
		return errors.New("a program's name of more than 256 bytes")
	}
	t.full = h.Full
	if t.worker = t.server.running(t.inc); t.worker == nil {
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

// asks takes a join.
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

// reports takes a report.
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

// located takes the answer to a question for stacks.
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

// hears tells the driver what the worker was told. again: it is to be told what it lacks.
func (t *talk) hears(again bool) {
	t.mu.Lock()
	h := t.heard
	t.mu.Unlock()
	h.Again = again
	t.up(line.Up("heard", h), "")
}

// standing returns what the worker waits for.
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

// told takes a line of the driver. It does not block.
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
		t.join = nil // it joins again
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
			t.asked = t.asked[1:] // it will not be answered
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

// acknowledge tells the driver that the worker was told.
func (t *talk) acknowledge(change func(*line.Heard)) {
	t.mu.Lock()
	change(&t.heard)
	t.mu.Unlock()
	t.hears(false)
}

// put appends a line for the worker, in place of an older one of a kind of which the newest counts;
// the lock is held.
func (t *talk) put(o outgoing) {
	switch o.kind {
	case "world", "looked", "updated", "lost":
		t.out = slices.DeleteFunc(t.out, func(old outgoing) bool { return old.kind == o.kind })
	}
	t.out = append(t.out, o)
	t.room.Broadcast()
}

// say has a line written. It blocks while too many wait, because the program does not read.
func (t *talk) say(kind string, text []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.out) >= mostWaiting && !t.over {
		t.room.Wait()
	}
	t.put(outgoing{kind: kind, text: text})
}

// complain tells the program of a line that has no effect.
func (t *talk) complain(text string) { t.say("error", line.Error(text, false)) }

// write writes lines until the line is over.
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
		t.over = t.over || err != nil // the program has ended, which listen notices
		t.room.Broadcast()
		t.mu.Unlock()
		if err == nil && o.then != nil {
			o.then()
		}
	}
}

// end has nothing more be written than what waits.
func (t *talk) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	t.room.Broadcast()
}

// close ends what hello has started.
func (t *talk) close() {
	t.end()
	t.cancel()
	t.server.leave(t)
	_ = t.conn.Close() // also what is being written
	t.wg.Wait()
	if t.plain != nil {
		t.plain.close()
	}
}
