package scheduler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/report"
)

// The scheduler is in the process that keeps a training job going, so what it keeps for clients is
// bounded. Clients are told how many bytes their tasks may have that are not over: half of what
// others leave. So one client alone has half of all, two have a third each, and there is always
// room for another. Submit of package tasks waits beyond that. The tasks of a client that does not
// take its results wait.

const (
	// unreadShare is the share of the memory, one in so many, that results of a client may have
	// that it has not taken.
	unreadShare = 16
	// tellShare is the change of what is used, one in so many of the memory, after which clients
	// are told again.
	tellShare = 64
	// overdraft is by how much a client may exceed what it was told: it may be on its way.
	overdraft = 8 << 20
	// inlineShort is the size from which on results are stored while there is little memory.
	inlineShort = 1 << 10
	// putCost and groupCost are about how many bytes a stored value takes that a client has put,
	// and a group, besides its text.
	putCost   = 256
	groupCost = 1 << 10
	// mostClients bounds the connected clients.
	mostClients = 1000
	// mostClientsTold bounds the clients of a status.
	mostClientsTold = 20
)

// LeastMemory is the smallest sensible Config.Memory: it has room for a task of the largest size
// and others.
const LeastMemory = 128 << 20

// defaultMemory is an eighth of the machine's memory, within bounds.
func defaultMemory() int64 {
	const most = 2 << 30
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return LeastMemory
	}
	return min(most, max(LeastMemory, int64(info.Totalram)*int64(info.Unit)/8))
}

// costOf is how many bytes a task takes that is not over.
func costOf(t *taskspb.SubmitTask) int32 {
	return int32(min(queue.TaskCost+proto.Size(t), math.MaxInt32))
}

// costOfGroup is how many bytes a group takes, which stays.
func costOfGroup(g *taskspb.TaskGroup) int64 { return groupCost + 4*int64(proto.Size(g)) }

// usage is what is taken besides tasks, and what clients know of it.
type usage struct {
	besides int64 // bytes of what is not of tasks
	told    int64 // what was used when clients were told what their tasks may take
}

// used returns how many bytes are taken; the lock is held.
func (s *Scheduler) used() int64 {
	n := s.q.Bytes() + s.besides
	if s.recorder != nil {
		n += int64(s.recorder.waiting + s.recorder.writing)
	}
	return n
}

// windowOf returns how many bytes the tasks of a client may have that are not over; the lock is
// held.
func (s *Scheduler) windowOf(p *peer) int64 {
	return max(1, (s.cfg.Memory-s.used()+s.q.Usage(p.session).Open)/2)
}

// tellWindows tells clients what their tasks may have, where what is used has changed; the lock is
// held.
func (s *Scheduler) tellWindows() {
	used := s.used()
	if d := used - s.told; max(d, -d) < s.cfg.Memory/tellShare {
		return
	}
	s.told = used
	for _, p := range s.peers {
		if !p.worker {
			s.tellWindow(p)
		}
	}
}

// tellWindow tells a client what its tasks may have, where that has changed; the lock is held.
func (s *Scheduler) tellWindow(p *peer) {
	window := s.windowOf(p)
	if d := window - p.window; p.link == nil || max(d, -d) < s.cfg.Memory/tellShare/2 {
		return
	}
	p.window = window
	p.put(nil, func(m *taskspb.FromTasks) { m.WindowBytes = uint64(window) })
}

// greedyError ends a client that submits more than it was told.
type greedyError struct{ bytes int64 }

// Error returns a message with the sizes.
func (e greedyError) Error() string {
	return fmt.Sprintf("scheduler: the client's tasks have %d bytes, more than it may have; --tasks-memory is the limit", e.bytes)
}

// room returns an error where a client has no room for a task; the lock is held.
func (s *Scheduler) room(p *peer, cost int64) error {
	open := s.q.Usage(p.session).Open + cost
	if open > s.cfg.Memory/2+overdraft || open > overdraft && s.used() > s.cfg.Memory/4*5 {
		err := greedyError{open}
		s.cfg.Log.Warnf("tasks: client %s is ended: its tasks have %d bytes, more than it may have", p.name, open)
		p.left = true
		return err
	}
	return nil
}

// bounded is the result of a task, or that there is no room for it: the results that other tasks
// need fill the memory. The lock is held.
func (s *Scheduler) bounded(r queue.Result) queue.Result {
	if n := len(r.Value) + len(r.Text); n > inlineShort && s.used() > s.cfg.Memory/4*5 {
		return queue.Result{State: queue.Failed, Failure: queue.Full, Text: fmt.Sprintf(
			"its result of %d bytes finds no room: tasks and results have %d bytes, and may have %d", n, s.used(), s.cfg.Memory)}
	}
	return r
}

// memory reports what is taken, and by whom; the lock is held.
func (s *Scheduler) memory() *report.Memory {
	m := &report.Memory{Used: s.used(), Most: s.cfg.Memory}
	for _, p := range s.peers {
		if u := s.q.Usage(p.session); u.Tasks > 0 && !p.worker {
			m.Clients = append(m.Clients, report.ClientStatus{
				Name: p.name, Tasks: u.Tasks, Bytes: u.Open + u.Over, Unread: u.Unread, Paused: u.Paused, Gone: p.link == nil,
			})
		}
	}
	slices.SortFunc(m.Clients, func(a, b report.ClientStatus) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
	})
	m.Clients = m.Clients[:min(len(m.Clients), mostClientsTold)]
	return m
}

// Summary returns the state of the tasks in lines; none if there are no tasks. It is safe for
// concurrent use.
func (s *Scheduler) Summary() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.q.Status(time.Now())
	if now.Running+now.Ready+now.Waiting == 0 && s.q.Bytes() == 0 && len(now.Lasting()) == 0 {
		return nil
	}
	const mib = 1 << 20
	return append([]string{fmt.Sprintf("tasks: %d running, %d ready, %d waiting for others; %.1f of %d MiB of memory",
		now.Running, now.Ready, now.Waiting, float64(s.used())/mib, s.cfg.Memory/mib)}, now.Lasting()...)
}
