package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/python"
)

const (
	// window bounds the unacknowledged output of a worker in bytes; beyond it the worker blocks.
	window = 256 << 10
	// chunk bounds the output in one event.
	chunk = 32 << 10
	// afterEnd is added to window once a worker has ended, for the rest of the output in its pipes.
	// So the event of its end, which follows its output, does not wait for slow readers of that
	// output.
	afterEnd = 1 << 20
	// sessionVariable marks, in their environment, the processes of a session.
	sessionVariable = "HVD_SESSION"
)

var (
	errLease     = errors.New("its lease ran out")
	errTakenOver = errors.New("its driver began another session")
	errEnd       = errors.New("its driver ended it")
	errShutdown  = errors.New("the agent stops")
)

// session is the agent's side of its relation with one driver. It outlives the streams that carry
// it. The server's lock guards the fields that change.
type session struct {
	srv   *server
	id    string // raw bytes
	run   string
	lease time.Duration
	guard io.Closer // kills what workers leave behind
	log   logrus.FieldLogger
	grant
	attachment

	lines
	outbox
	workers map[string]*worker
	room    *sync.Cond    // signaled when output or lines may be emitted again
	why     error         // why the session is ending; nil: it is not
	ending  chan struct{} // closed when why is set
	ended   chan struct{} // closed when nothing is left of it

	running sync.WaitGroup // workers
}

// grant is what the driver that began a session may do.
type grant struct {
	driver  identity.Subject
	as      *runas.Rule // the user of its workers; nil: this process's user
	refusal error       // why it may start no workers; nil: it may
}

// uid returns the user id of its workers.
func (g *grant) uid() int {
	if g.as != nil {
		return int(g.as.As.UID)
	}
	return os.Geteuid()
}

// attachment describes the stream that carries a session, and its driver.
type attachment struct {
	link    *link     // nil: none is attached
	by      audit.Who // its driver
	term    uint64    // the driver's number among the drivers of the run
	contact time.Time // time of the driver's last message
	noted   int64     // the time of the latest journal record that the driver has reported
}

// outbox holds the events that the driver has not acknowledged.
type outbox struct {
	events []*agentpb.FromAgent
	last   uint64 // number of the last event
	sent   uint64 // number of the last event sent on any stream: later ones may still grow
}

// worker is the process of one incarnation.
type worker struct {
	s           *session
	id          plan.SlotID
	incarnation string
	program     string        // the first word of its command
	dir         string        // its working directory
	pid         int           // 0: not started yet
	doomed      bool          // to be killed as soon as it is started
	hurry       chan struct{} // closed when doomed is set: the launcher ends the grace period
	more        wake.Flag     // the launcher starts the grace period again
	look        wake.Flag     // the launcher checks whether a signal is ending the process
	evicted     bool          // the agent itself has asked it to end
	grace       time.Duration
	cancel      context.CancelCauseFunc
	over        bool            // its process has ended, and its output has been read
	exit        *agentpb.Exited // how the process ended, until the outbox has that event
	printed
}

// said counts the lines that a worker has sent.
type said struct {
	lines  int  // number of lines that the driver has not acknowledged
	floods bool // the log has a line about too many of them
}

// printed is the state of a worker's output.
type printed struct {
	produced, taken uint64 // bytes that became events, and that were acknowledged
	spool           spool  // the output after that
	torn            bool   // the output that became events ends within a line
	ahead           int    // unacknowledged bytes permitted beyond window
	said
}

// link is one stream of a session.
type link struct {
	wake  wake.Flag
	gone  chan struct{}   // closed when another stream has replaced it
	next  uint64          // number of the event to send next
	beats []*agentpb.Beat // to be sent back
	ends  bool            // it belongs to a command that ends the run, not to a driver
}

// live blocks until the session is over, waits for its workers to end, and frees what it holds.
func (s *session) live() {
	timer := time.NewTimer(s.lease / 2)
	defer timer.Stop()
	for waiting := true; waiting; {
		select {
		case <-timer.C:
			timer.Reset(s.checkLease())
		case <-s.ending:
			waiting = false
		}
	}
	s.srv.mu.Lock()
	lead := s.lead()
	s.srv.mu.Unlock()
	late := time.AfterFunc(lead, func() { // kills the rest, if the lease has expired
		s.srv.mu.Lock()
		defer s.srv.mu.Unlock()
		if errors.Is(s.why, errLease) {
			s.killAll()
		}
	})
	s.running.Wait()
	late.Stop()
	defer blob.Clean(s.run, s.uid()) // the objects of workers that were killed
	if err := s.guard.Close(); err != nil {
		s.log.Warnf("agent: %v", err)
	}
	s.die()
	if s.door != nil {
		s.door.Close()
	}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	s.log.Infof("agent: the session is over: %v", s.why)
	delete(s.srv.sessions, s.run)
	s.srv.changed()
	close(s.ended)
	select {
	case s.srv.over <- s.why:
	default: // nobody receives
	}
}

// checkLease ends a session whose lease expires, and returns the pause until the next check, which
// is short enough that workers that start meanwhile have their grace period within the lease too.
func (s *session) checkLease() time.Duration {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	left := s.lease - s.lead() - time.Since(s.contact)
	if left > 0 {
		return min(left, s.lease/2)
	}
	if s.why == nil {
		s.log.Warnf("agent: the driver was silent for %v: ending its %d workers",
			time.Since(s.contact).Round(time.Millisecond), s.alive())
	}
	s.end(errLease)
	return s.lease
}

// lead returns how long before the end of the lease workers are asked to end, so that they have
// ended by then: the longest grace period, but at most half of the lease. The lock is held.
func (s *session) lead() (lead time.Duration) {
	for _, w := range s.workers {
		if !w.over {
			lead = max(lead, w.grace)
		}
	}
	return min(lead, s.lease/2)
}

// alive returns the number of workers that have not ended.
func (s *session) alive() (n int) {
	for _, w := range s.workers {
		if !w.over {
			n++
		}
	}
	return n
}

// end begins the end of the session, and drops the output that no event has yet; the lock is held.
func (s *session) end(why error) {
	if s.why != nil {
		return
	}
	s.why = why
	for _, w := range s.workers {
		w.cancel(why)
		w.spool.close()
		s.emitExit(w)
	}
	s.room.Broadcast()
	close(s.ending)
	if s.link != nil {
		s.link.wake.Set()
	}
}

// killAll kills the workers; the lock is held.
func (s *session) killAll() {
	for _, w := range s.workers {
		w.kill()
	}
}

// attach makes l the session's stream; the lock is held.
func (s *session) attach(l *link, heard uint64) {
	if s.link != nil {
		close(s.link.gone)
	}
	s.link = l
	s.contact = time.Now()
	s.acknowledge(heard)
	l.next = heard + 1
	l.wake.Set()
	for _, w := range s.workers {
		s.unspool(w)
	}
}

// detach records that the stream l is broken, unless another has replaced it: output of workers
// beyond the window is spooled from now on.
func (s *session) detach(l *link) {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if s.link == l {
		s.link, s.opened = nil, nil
		clear(s.latest)
		s.room.Broadcast()
	}
}

// acknowledged returns the number of the last event that the driver has handled; the lock is held.
func (o *outbox) acknowledged() uint64 { return o.last - uint64(len(o.events)) }

// acknowledge drops the events up to number heard; the lock is held.
func (s *session) acknowledge(heard uint64) {
	i := 0
	for ; i < len(s.events) && s.events[i].GetNumber() <= heard; i++ {
		if e := s.events[i].GetExited(); e != nil {
			delete(s.workers, e.GetIncarnation())
		} else if w := s.workers[s.events[i].GetLine().GetIncarnation()]; w != nil { // a line
			w.lines--
			s.room.Broadcast()
		}
		s.events[i] = nil
	}
	s.events = s.events[i:]
	if i > 0 && len(s.events) == 0 {
		s.srv.changed()
	}
}

// handOver returns what a driver must know to take the session over, and the number of the last
// event that the earlier driver acknowledged; the lock is held.
func (s *session) handOver() (heard uint64, a *agentpb.Attached) {
	heard = s.acknowledged()
	a = &agentpb.Attached{Session: []byte(s.id), First: heard + 1, Noted: s.noted}
	untold := make(map[string]int)
	for _, e := range s.events {
		untold[e.GetOutput().GetIncarnation()] += len(e.GetOutput().GetText())
	}
	for inc, w := range s.workers {
		a.Kept = append(a.Kept, &agentpb.Kept{Incarnation: inc, Bytes: w.produced - uint64(untold[inc])})
	}
	return heard, a
}

// emit appends an event; the lock is held.
func (s *session) emit(e *agentpb.FromAgent) {
	s.last++
	e.Number = s.last
	s.events = append(s.events, e)
	if s.link != nil {
		s.link.wake.Set()
	}
}

// pending returns what is to be sent on the link: beats to send back, and a batch of events that is
// small enough not to delay the driver's messages.
func (s *session) pending(l *link) (events []*agentpb.FromAgent, beats []*agentpb.Beat) {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if s.link != l {
		return nil, nil
	}
	beats, l.beats = l.beats, nil
	if len(s.events) == 0 {
		return s.unnumbered(), beats
	}
	from := int(l.next - s.events[0].GetNumber())
	to := from
	for size := 0; to < len(s.events) && to < from+64 && size < 2*chunk; to++ {
		size += len(s.events[to].GetOutput().GetText()) + len(s.events[to].GetLine().GetText())
	}
	events = append(events, s.events[from:to]...)
	l.next += uint64(len(events))
	s.sent = max(s.sent, l.next-1)
	if to < len(s.events) {
		l.wake.Set()
	}
	return append(events, s.unnumbered()...), beats
}

// handle executes a message of the driver, unless the session is over or the link was replaced. An
// error means that the driver violates the protocol.
func (s *session) handle(l *link, m *agentpb.ToAgent) error {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if s.link != l || s.why != nil {
		return nil
	}
	s.contact = time.Now()
	switch m := m.GetWhat().(type) {
	case *agentpb.ToAgent_Start:
		return s.start(m.Start)
	case *agentpb.ToAgent_Stop:
		s.stop(m.Stop)
	case *agentpb.ToAgent_Taken:
		if w := s.workers[m.Taken.GetIncarnation()]; w != nil {
			if m.Taken.GetBytes() > w.produced {
				return fmt.Errorf("%d bytes were taken of %d", m.Taken.GetBytes(), w.produced)
			}
			w.taken = max(w.taken, m.Taken.GetBytes())
			s.unspool(w)
			s.room.Broadcast()
		}
	case *agentpb.ToAgent_Look:
		if w := s.workers[m.Look.GetIncarnation()]; w != nil {
			w.look.Set()
		}
	case *agentpb.ToAgent_Tell:
		s.Tell(m.Tell.GetWorkers(), m.Tell.GetRanks(), m.Tell.GetLine(), m.Tell.GetTail())
	case *agentpb.ToAgent_Signal:
		s.pass(m.Signal)
	case *agentpb.ToAgent_Beat:
		heard := m.Beat.GetHeard()
		if heard >= l.next {
			return fmt.Errorf("event %d was heard, but only those before %d were sent", heard, l.next)
		}
		s.acknowledge(heard)
		s.noted = max(s.noted, m.Beat.GetNoted())
		if len(l.beats) < 4 { // more would only queue for a driver that does not read
			l.beats = append(l.beats, m.Beat)
		}
		l.wake.Set()
	case *agentpb.ToAgent_End:
		how := ""
		if m.End.GetNow() {
			how = "now"
		}
		s.record("end", nil, how, audit.Done)
		s.end(errEnd)
		if m.End.GetNow() {
			s.killAll()
		}
	default:
		return errors.New("the driver sent a message of an unknown kind")
	}
	return nil
}

// start starts a worker, or emits the reason why it cannot; the lock is held.
func (s *session) start(m *agentpb.Start) error {
	inc := m.GetIncarnation()
	if inc == "" || len(inc) > 255 {
		return fmt.Errorf("the worker's incarnation has %d bytes; 1 to 255 are allowed", len(inc))
	}
	if s.workers[inc] != nil {
		return nil // an earlier stream has brought the request
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	w := &worker{
		s: s, incarnation: inc, cancel: cancel, hurry: make(chan struct{}), more: wake.New(), look: wake.New(),
		grace:   time.Duration(m.GetGraceMs()) * time.Millisecond,
		id:      plan.SlotID{Host: s.srv.host, Index: int(min(m.GetSlot(), plan.MaxSlots))},
		program: programOf(m.GetCommand()), dir: string(m.GetDirectory()),
		printed: printed{spool: spool{most: s.srv.spoolSize}},
	}
	s.workers[inc] = w
	if err := s.srv.take(w); err != nil {
		s.log.Warnf("agent: refused a worker: %v", err)
		s.record("start", w, "", audit.Refused(err))
		cancel(nil)
		w.over = true
		refused := &agentpb.Exited{Incarnation: inc, StartError: err.Error(), Evicted: s.srv.drained != nil}
		if taken, is := errors.AsType[*takenError](err); is {
			refused.TakenBy = taken.run
		}
		s.emit(exited(refused))
		return nil
	}
	spec := &launch.Spec{
		Incarnation: inc, Slot: w.id, Dir: string(m.GetDirectory()),
		Grace: w.grace, CoreLimit: m.GetCoreLimit(), Hurry: w.hurry, More: w.more, Dying: w.dying, Look: w.look,
		Stdout: output{w, 1}, Stderr: output{w, 2}, Ended: w.dead, Left: w.left,
	}
	for _, word := range m.GetCommand() {
		spec.Command = append(spec.Command, string(word))
	}
	for _, entry := range m.GetEnvironment() {
		spec.Env = append(spec.Env, string(entry))
	}
	spec.Env = append(spec.Env, sessionVariable+"="+hex.EncodeToString([]byte(s.id)))
	if s.srv.program != "" {
		spec.Env = append(spec.Env, plan.EnvAgentProgram+"="+s.srv.program)
	}
	if s.srv.listen != "" {
		spec.Env = append(spec.Env, plan.EnvListen+"="+s.srv.listen)
	}
	spec.Env = append(spec.Env, s.launcherAddr())
	if s.as != nil {
		as := s.as.As
		spec.As, spec.Cgroup = &as, s.as.Cgroup
		spec.Env = append(spec.Env, "HOME="+as.Home, "USER="+as.Name, "LOGNAME="+as.Name)
	}
	spec.Prepare = func(env []string) []string {
		return python.Environ(env, w.program, spec.As != nil, spec.Stderr)
	}
	spec.Talk = s.Talk(spec.Env)
	s.running.Go(func() {
		defer cancel(nil)
		defer s.Forget(inc)
		w.ended(s.srv.launcher.Run(ctx, spec, w.started))
	})
	return nil
}

// stop asks a worker to end, kills it, or extends its grace period; the lock is held.
func (s *session) stop(m *agentpb.Stop) {
	w := s.workers[m.GetIncarnation()]
	if w == nil || w.over {
		return
	}
	w.cancel(errors.New("its driver stopped it"))
	switch {
	case m.GetNow():
		s.record("stop", w, "now", audit.Done)
		w.kill()
	case !m.GetMore():
		s.record("stop", w, fmt.Sprintf("within %v", w.grace), audit.Done)
	default: // the grace period starts again; this may come every second
		w.more.Set()
	}
}

// pass passes a signal on to a worker; the lock is held.
func (s *session) pass(m *agentpb.Signal) {
	w, sig := s.workers[m.GetIncarnation()], syscall.Signal(m.GetSignal())
	if w == nil || sig != syscall.SIGUSR1 && sig != syscall.SIGUSR2 {
		return
	}
	s.record("signal", w, unix.SignalName(sig), audit.Done)
	if w.over || w.pid == 0 {
		return
	}
	if proc.Pass(w.pid, sig) == 0 {
		s.log.Warnf("agent: slot %d: process %d does not handle %s, nor does a process that it has started: it is not passed on",
			w.id.Index, w.pid, unix.SignalName(sig))
	}
}

// kill kills the worker's process group once it exists; the launcher kills the worker's other
// processes.
func (w *worker) kill() {
	if !w.doomed {
		w.doomed = true
		close(w.hurry)
	}
	if !w.over && w.pid > 0 {
		_ = syscall.Kill(-w.pid, syscall.SIGKILL) // fails if it has just ended
	}
}

func (w *worker) started(pid int) {
	s := w.s
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	w.pid = pid
	if w.doomed {
		w.kill()
	}
	s.log.Infof("agent: slot %d: started process %d", w.id.Index, pid)
	s.record("start", w, "", audit.Done)
	s.emit(&agentpb.FromAgent{What: &agentpb.FromAgent_Started{
		Started: &agentpb.Started{Incarnation: w.incarnation, Pid: uint32(pid)},
	}})
}

// dead records that the process has ended and the rest of its output follows.
func (w *worker) dead(error) {
	s := w.s
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	w.ahead = afterEnd
	s.room.Broadcast()
}

// room returns how many more bytes of its output may become events; the lock is held.
func (w *worker) room() int { return window + w.ahead - int(w.produced-w.taken) }

// left logs the processes that a worker has left behind.
func (w *worker) left(processes []string) {
	w.s.log.Warnf("agent: slot %d: process %d %s", w.id.Index, w.pid, launch.LeftText(processes))
}

// dying emits an event about a worker that is bound to end. If this agent asked the worker to end,
// that is not a failure, and only its end is reported.
func (w *worker) dying(what string, by syscall.Signal) {
	s := w.s
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	tells := s.why == nil && (by == 0 || !w.evicted)
	say := s.log.Warnf
	if tells { // the driver logs it
		say = s.log.Infof
	}
	say("agent: slot %d: process %d %s", w.id.Index, w.pid, what)
	if tells {
		s.emit(&agentpb.FromAgent{What: &agentpb.FromAgent_Dying{
			Dying: &agentpb.Dying{Incarnation: w.incarnation, What: what, Signal: uint32(by)},
		}})
	}
}

func (w *worker) ended(err error) {
	s := w.s
	e := &agentpb.Exited{Incarnation: w.incarnation}
	var exit *launch.ExitError
	var start *launch.StartError
	var stuck *launch.UnkillableError
	if errors.As(err, &stuck) {
		e.StuckPid, e.StuckState, e.StuckMs = uint32(stuck.PID), stuck.State, uint32(stuck.After.Milliseconds())
	}
	if errors.As(err, &exit) {
		e.Said, e.Why = line.CleanError(exit.Said), exit.Why
	}
	switch {
	case errors.As(err, &exit) && exit.Signal != 0:
		e.Signal = uint32(exit.Signal)
	case errors.As(err, &exit):
		e.Code = uint32(exit.Code)
	case errors.As(err, &start):
		e.StartError = start.Err.Error()
	case err != nil:
		e.StartError = err.Error()
	}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	e.Evicted = w.evicted
	w.over, w.exit = true, e
	s.unspool(w)
	s.srv.free(w)
	if w.pid == 0 && e.StartError != "" {
		s.record("start", w, "", audit.Failed(errors.New(e.StartError)))
	}
	if err == nil {
		s.log.Infof("agent: slot %d: process %d exited with code 0", w.id.Index, w.pid)
	} else {
		s.log.Infof("agent: slot %d: process %d: %v", w.id.Index, w.pid, err)
	}
}

func exited(e *agentpb.Exited) *agentpb.FromAgent {
	return &agentpb.FromAgent{What: &agentpb.FromAgent_Exited{Exited: e}}
}

// output is stdout (1) or stderr (2) of a worker.
type output struct {
	w      *worker
	stream uint32
}

// Write turns the text into events. It blocks while too much output of the worker is
// unacknowledged; if no driver is attached, it spools the text instead.
func (o output) Write(text []byte) (int, error) {
	s := o.w.s
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	written := 0
	for written < len(text) {
		left := o.w.room()
		rest := text[written:min(len(text), written+chunk)]
		spooled := !o.w.spool.empty()
		switch {
		case s.why != nil:
			return written, s.why
		case (spooled || left <= 0) && s.link == nil:
			if err := o.w.spool.put(o.stream, rest); err != nil && !spooled {
				s.log.Warnf("agent: slot %d: %v", o.w.id.Index, err)
			}
		case spooled || left <= 0:
			s.room.Wait()
			continue
		default:
			rest = rest[:min(left, len(rest))]
			o.append(rest)
		}
		written += len(rest)
	}
	return written, nil
}

// unspool turns spooled output into events while there is room, and emits the worker's end once the
// spool is empty; the lock is held.
func (s *session) unspool(w *worker) {
	for !w.spool.empty() && w.room() > 0 {
		stream, text, missing, err := w.spool.take()
		if err != nil {
			s.log.Warnf("agent: slot %d: %v", w.id.Index, err)
		}
		if missing > 0 {
			stream, text = 2, fmt.Appendf(nil, "hvdrun: %d bytes of the output before this line are missing: there was no driver, and too much of it\n", missing)
			if w.torn {
				text = append([]byte{'\n'}, text...)
			}
		}
		if len(text) > 0 {
			output{w, stream}.append(text)
		}
	}
	s.emitExit(w)
}

// emitExit emits a worker's end, if known, once all its output has become events; the lock is held.
func (s *session) emitExit(w *worker) {
	if w.exit != nil && w.spool.empty() {
		s.emit(exited(w.exit))
		w.exit = nil
	}
}

// append adds the text to the last event if that is the same stream's and was not sent, so that a
// worker that prints letter by letter makes few events. The lock is held.
func (o output) append(text []byte) {
	s := o.w.s
	o.w.produced += uint64(len(text))
	o.w.torn = text[len(text)-1] != '\n'
	if len(s.events) > 0 {
		e := s.events[len(s.events)-1]
		last := e.GetOutput()
		if last != nil && e.GetNumber() > s.sent && last.GetIncarnation() == o.w.incarnation &&
			last.GetStream() == o.stream && len(last.GetText())+len(text) <= chunk {
			last.Text = append(last.Text, text...)
			return
		}
	}
	s.emit(&agentpb.FromAgent{What: &agentpb.FromAgent_Output{Output: &agentpb.Output{
		Incarnation: o.w.incarnation, Stream: o.stream, Text: append([]byte(nil), text...),
	}}})
}
