package scheduler

import (
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

const (
	// eventBurst is how many events may be reported at once, and eventRate how many per second on
	// average.
	eventBurst = 100
	eventRate  = 10
	// maxEventText is the largest length of an event's text in bytes.
	maxEventText = 500
)

// teller reports events, up to a limited rate.
type teller struct {
	tell    func(job.TaskEvent)
	room    float64
	last    time.Time
	dropped int
}

func newTeller(tell func(job.TaskEvent)) *teller { return &teller{tell: tell, room: eventBurst} }

// event reports an event, or counts it as dropped.
func (t *teller) event(now time.Time, e job.TaskEvent) {
	if t.tell == nil {
		return
	}
	if !t.last.IsZero() {
		t.room = min(eventBurst, t.room+eventRate*max(0, now.Sub(t.last).Seconds()))
	}
	if t.last = now; t.room < 1 {
		t.dropped++
		return
	}
	t.room--
	e.Dropped, t.dropped = t.dropped, 0
	e.Text = queue.Cut(e.Text, maxEventText)
	t.tell(e)
}

// failures are the names of reasons why tasks fail.
var failures = map[queue.Failure]string{
	queue.ByUser: "function", queue.Lost: "worker lost", queue.Poison: "poison", queue.Dependency: "dependency",
	queue.TimedOut: "time limit", queue.Gone: "value lost", queue.NoMember: "worker gone",
	queue.Full: "memory",
}

// failed reports that a task has failed. The caller holds the lock.
func (s *Scheduler) failed(p *peer, id queue.ID, r queue.Result) {
	s.events.event(time.Now(), job.TaskEvent{
		Name: job.TaskFailed, Function: s.q.Task(id).Group.Name(), Client: p.name, N: id.N, Reason: failures[r.Failure], Text: r.Text,
	})
}

// stuck requests the end of a worker that runs a task that does not end, unless the worker trains.
// The caller holds the lock.
func (s *Scheduler) stuck(a queue.Action) {
	p, now := s.peers[a.Worker], time.Now()
	if p == nil || p.from.Role != identity.Worker || s.training[p.from.Incarnation] {
		return
	}
	if t, ok := s.q.Stopped(now, a.Worker, a.Task); ok {
		s.events.event(now, job.TaskEvent{
			Name: job.TaskWorkerStuck, Worker: p.name, Host: p.host, Incarnation: p.from.Incarnation, Function: t.Function, N: t.N, Text: t.String(),
		})
	}
}
