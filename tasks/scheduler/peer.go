package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// roster holds the peers.
type roster struct {
	peers    map[uint64]*peer    // by session
	hosts    map[string][]*peer  // workers by host
	training map[string]bool     // incarnations of workers that are members of a world
	ran      map[string][]string // by incarnation of a lost worker: functions that it was running, until Ended
}

func newRoster() roster {
	return roster{peers: map[uint64]*peer{}, hosts: map[string][]*peer{}, ran: map[string][]string{}}
}

// clients returns the number of connected clients.
func (r *roster) clients() (n int) {
	for _, p := range r.peers {
		if !p.worker && p.link != nil {
			n++
		}
	}
	return n
}

// leaveHost removes a worker from its host.
func (r *roster) leaveHost(p *peer) {
	all := slices.DeleteFunc(r.hosts[p.host], func(o *peer) bool { return o == p })
	if r.hosts[p.host] = all; len(all) == 0 {
		delete(r.hosts, p.host)
	}
}

// trains reports whether a worker runs no tasks because it is a member of a world.
func (r *roster) trains(p *peer) bool { return !p.beside && r.training[p.from.Incarnation] }

// peer is a client or a worker. It outlives its connections.
type peer struct {
	s       *Scheduler
	session uint64
	from    identity.Subject
	worker  bool
	touched bool   // it is in s.touched
	durable ack    // what the peer need not repeat
	heard   uint64 // number of results received from a worker
	leaving bool
	profile
	connection
	parting
	submitter
}

// profile is what a peer has reported about itself in its last hello.
type profile struct {
	name   string
	host   string
	pid    uint32
	values string // address at which it provides stored values
	rank   uint32
	beside bool // it runs tasks even while it trains
}

// profileOf returns the profile in a hello.
func profileOf(h *taskspb.TasksHello) profile {
	p := profile{name: h.GetName(), host: h.GetHost(), pid: h.GetPid(), values: h.GetValues(), rank: h.GetRank(), beside: h.GetBeside()}
	if p.name == "" {
		p.name = fmt.Sprintf("%s:%d", p.host, p.pid)
	}
	return p
}

// connection is the last connection of a peer.
type connection struct {
	link    *link.Link[*taskspb.FromTasks] // nil: the connection has ended
	heardAt time.Time                      // when the peer's last message arrived
	groups  []*queue.Group                 // groups that a client has declared
	// unreached means that the peer's values were unreachable, which has been logged.
	unreached bool
	untold    int // approximate size of the worker's results that are not acknowledged
}

// parting is the departure of a peer.
type parting struct {
	left    bool          // it has reported that it leaves
	ended   bool          // its process has ended
	stopped bool          // its process was asked to end
	gone    *time.Timer   // gives the peer up when it fires; nil: the peer is connected
	over    chan struct{} // closed when a worker is given up
}

// returned records that the peer is connected again.
func (d *parting) returned() {
	if d.gone != nil {
		d.gone.Stop()
		d.gone = nil
	}
}

// inOrder reports whether the attempts of a worker do not count as lost when it is given up.
func (d *parting) inOrder() bool { return d.left || d.stopped }

// final reports whether the peer will not come back.
func (d *parting) final() bool { return d.left || d.ended }

// submitter is the state of a client.
type submitter struct {
	puts     map[queue.Object]bool // stored values that it needs
	accepted uint64                // number of its last task
	window   int64                 // bytes that its unfinished tasks may take, as last sent
	told     uint64                // last acknowledgement that was sent to it
	owed     bool                  // it is in Scheduler.owing
}

// attach makes l the connection of the session, and returns the session's peer.
func (s *Scheduler) attach(from identity.Subject, h *taskspb.TasksHello, l *link.Link[*taskspb.FromTasks]) (*peer, error) {
	if err := checkHello(h); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.unlock()
	p := s.peers[h.GetSession()]
	known := p != nil
	switch {
	case s.closed:
		return nil, errClosed
	case known && (p.from != from || p.worker != h.GetWorker()):
		return nil, errors.New("scheduler: the session is of another process")
	case !known && !h.GetWorker() && s.clients() >= mostClients:
		return nil, fmt.Errorf("scheduler: %d clients are connected; that is the maximum", mostClients)
	case !known:
		p = &peer{s: s, session: h.GetSession(), from: from, worker: h.GetWorker(), profile: profileOf(h), parting: parting{over: make(chan struct{})}}
		s.peers[p.session] = p
		if !p.worker {
			client := clientOf(p)
			s.note(client, func(m *taskspb.TasksRecord) { m.Clients = append(m.Clients, client) })
		}
	}
	if old := p.link; old != nil {
		s.wg.Go(old.Close)
	}
	p.returned()
	moves := p.worker && (!known || p.host != h.GetHost())
	if moves {
		s.leaveHost(p)
	}
	p.profile, p.connection = profileOf(h), connection{link: l, heardAt: time.Now()}
	if moves {
		s.hosts[p.host] = append(s.hosts[p.host], p)
	}
	p.window = s.windowOf(p)
	l.Say(func(m *taskspb.FromTasks) {
		m.Welcome = &taskspb.TasksWelcome{Run: s.cfg.Run, Known: known, Window: mostUnfinished}
		m.Heard, m.Accepted, m.WindowBytes = p.durable.heard, p.durable.accepted, uint64(p.window)
	})
	if p.worker {
		p.heard = p.durable.heard // the worker sends the later ones again
		s.join(p, h, known)
	} else if known {
		s.q.TellAgain(p.session)
	}
	s.act()
	return p, nil
}

func checkHello(h *taskspb.TasksHello) error {
	switch {
	case len(h.GetFunctions()) > link.MaxFunctions || len(h.GetHeld()) > link.MaxHeld || len(h.GetOffers()) > link.MaxAmounts ||
		len(h.GetStored()) > link.MaxHeld:
		return errors.New("scheduler: the hello has too many functions, values or resources")
	case len(h.GetHost()) > link.MaxName || len(h.GetName()) > link.MaxName || len(h.GetValues()) > link.MaxName || longName(h.GetOffers()):
		return errors.New("scheduler: the hello has a name that is too long")
	}
	for _, f := range h.GetFunctions() {
		if len(f.GetName()) > link.MaxName {
			return errors.New("scheduler: the hello has a function whose name is too long")
		}
	}
	return nil
}

// longName reports whether the name of a resource is too long.
func longName(of []*taskspb.Amount) bool {
	return slices.ContainsFunc(of, func(a *taskspb.Amount) bool { return len(a.GetName()) > link.MaxName })
}

func (s *Scheduler) join(p *peer, h *taskspb.TasksHello, known bool) {
	w := queue.Worker{ID: p.session, Name: p.name, Rank: int(p.rank), Host: p.host, Functions: map[string]bool{}, Offers: map[string]int64{}}
	for _, f := range h.GetFunctions() {
		w.Functions[functionKey(f)] = true
	}
	for _, a := range h.GetOffers() {
		if a.GetMilli() > 0 {
			w.Offers[a.GetName()] = a.GetMilli()
		}
	}
	held := make([]queue.Held, 0, len(h.GetHeld()))
	for _, a := range h.GetHeld() {
		held = append(held, heldOf(a))
	}
	s.cfg.Log.Debugf("tasks: worker %s joins with %d functions", p.name, len(w.Functions))
	if !known {
		s.events.event(time.Now(), job.TaskEvent{Name: job.TaskWorkerJoined, Worker: p.name, Host: p.host, Offers: queue.MakeDemand(w.Offers).String()})
	}
	if s.held && len(s.hosts) == 1 && len(s.hosts[p.host]) == 1 {
		time.AfterFunc(returning, s.resumeTasks)
	}
	s.q.Join(time.Now(), w, held)
	s.q.Train(time.Now(), p.session, s.trains(p))
	s.hasStored(p, h.GetStored(), true)
}

// detach records that a connection has ended. The peer may come back within its grace.
func (s *Scheduler) detach(p *peer, l *link.Link[*taskspb.FromTasks], why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.link != l || s.closed {
		return
	}
	p.link = nil
	grace := s.cfg.ClientGrace
	if p.worker {
		grace = s.cfg.WorkerGrace
	}
	if p.final() {
		grace = 0
	} else {
		s.cfg.Log.Debugf("tasks: the connection of %s has ended: %v", p.name, why)
	}
	p.gone = time.AfterFunc(grace, func() { s.giveUp(p) })
}

// giveUp ends the session of a peer that has not come back.
func (s *Scheduler) giveUp(p *peer) {
	s.mu.Lock()
	defer s.unlock()
	if p.link != nil || s.closed || s.peers[p.session] != p {
		return
	}
	delete(s.peers, p.session)
	if p.worker {
		defer close(p.over)
	}
	s.leaveHost(p)
	now := time.Now()
	if p.worker {
		s.events.event(now, job.TaskEvent{Name: job.TaskWorkerLeft, Worker: p.name, Host: p.host, Lost: !p.inOrder()})
	}
	switch {
	case p.worker && p.inOrder():
		s.q.Left(now, p.session)
	case p.worker:
		s.cfg.Log.Warnf("tasks: worker %s is lost", p.name)
		if ran := s.q.Runs(p.session, mostRan-len(s.ran[p.from.Incarnation])); len(ran) > 0 && p.from.Role == identity.Worker {
			s.ran[p.from.Incarnation] = append(s.ran[p.from.Incarnation], ran...)
		}
		s.q.Lose(now, p.session)
	default:
		ids := s.q.Tasks(p.session)
		if len(ids) > 0 {
			s.cfg.Log.Warnf("tasks: client %s is gone: its %d tasks are cancelled", p.name, len(ids))
		}
		s.endClient(now, p)
		s.note(nil, func(m *taskspb.TasksRecord) { m.Gone = append(m.Gone, p.session) })
	}
	s.act()
}

// endClient ends the tasks of a client that is gone, and releases its stored values. The caller
// holds the lock.
func (s *Scheduler) endClient(now time.Time, p *peer) {
	for _, id := range s.q.Tasks(p.session) {
		s.q.Cancel(now, id)
		s.q.Release(now, id)
	}
	for id := range p.puts {
		s.q.Unput(id)
	}
	s.besides -= putCost * int64(len(p.puts))
	p.puts = nil
}

// Expel records that the process of a worker has ended, which its connection would show only later.
// Messages that it has sent before are read first. Expel does not block.
func (s *Scheduler) Expel(incarnation string) { s.expel(incarnation, false) }

// expel is like Expel. stopped means that the process was asked to end.
func (s *Scheduler) expel(incarnation string, stopped bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.peers {
		if p.from.Incarnation != incarnation || s.closed {
			continue
		}
		p.ended, p.stopped = true, p.stopped || stopped
		if l := p.link; l != nil {
			time.AfterFunc(link.LastWords, l.Close)
		} else {
			p.gone.Reset(0)
		}
	}
}

// Ended is like Expel, and returns the functions whose tasks the process was running when it ended,
// at most 8. It returns none if the worker trained or if the process was asked to end; then its
// tasks do not count as lost. It blocks until the messages of the process are read: about 1 s if
// its connection does not end, and at most 2 s.
func (s *Scheduler) Ended(incarnation string, stopped bool) []string {
	s.expel(incarnation, stopped)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.training[incarnation] {
		return nil // without a wait, which would delay the other members too
	}
	var of []*peer
	for _, p := range s.peers {
		if p.worker && p.from.Incarnation == incarnation && s.q.Busy(p.session) {
			of = append(of, p)
		}
	}
	s.mu.Unlock()
	late, cancel := context.WithTimeout(context.Background(), endedTime)
	defer cancel()
	for _, p := range of {
		select {
		case <-p.over:
		case <-late.Done():
		}
	}
	s.mu.Lock()
	ran := s.ran[incarnation]
	delete(s.ran, incarnation)
	return ran
}

// Train sets the workers that are members of a world. They run no tasks, unless they have set
// Beside. It does not block.
func (s *Scheduler) Train(incarnations []string) {
	s.mu.Lock()
	defer s.unlock()
	s.training = make(map[string]bool, len(incarnations))
	for _, i := range incarnations {
		s.training[i] = true
	}
	for _, p := range s.peers {
		if p.worker {
			s.q.Train(time.Now(), p.session, s.trains(p))
		}
	}
	s.act()
}

// watchWorkers ends the connections of workers that have been silent for too long: their processes
// are stopped or their machines are gone.
func (s *Scheduler) watchWorkers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for _, p := range s.peers {
		if p.worker && p.link != nil && time.Since(p.heardAt) > silence {
			s.cfg.Log.Warnf("tasks: worker %s has said nothing for %v", p.name, silence)
			s.wg.Go(p.link.Close)
		}
	}
	s.watch.Reset(silence / 4)
}
