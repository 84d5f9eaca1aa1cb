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

// The scheduler runs in the process that keeps a training job running, so the memory that it uses
// for clients is bounded. The scheduler tells each client how many bytes its unfinished tasks may
// take: half of what the others leave. A single client can therefore use half of the memory, two
// can use a third each, and there is always room for another one. Beyond that, Submit of package
// tasks waits. If a client does not take its results, its tasks wait.

const (
	// unreadShare: unread results of a client may take 1/unreadShare of the memory.
	unreadShare = 16
	// tellShare: the scheduler sends clients their windows again when the used memory has changed
	// by 1/tellShare of the total.
	tellShare = 64
	// overdraft is the number of bytes by which a client may exceed its window, because a smaller
	// window may still be in flight to it.
	overdraft = 8 << 20
	// inlineShort is the size in bytes from which results are stored when memory is short.
	inlineShort = 1 << 10
	// putCost and groupCost are approximately how many bytes the scheduler needs for a stored value
	// that a client has put, and for a group, in addition to its text.
	putCost   = 256
	groupCost = 1 << 10
	// mostClients is the largest number of connected clients.
	mostClients = 1000
	// mostClientsTold is the largest number of clients in a status.
	mostClientsTold = 20
)

// LeastMemory is the smallest sensible Config.Memory: it suffices for a task of the largest size
// and some others.
const LeastMemory = 128 << 20

// defaultMemory returns an eighth of the machine's memory, within bounds.
func defaultMemory() int64 {
	const most = 2 << 30
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return LeastMemory
	}
	return min(most, max(LeastMemory, int64(info.Totalram)*int64(info.Unit)/8))
}

// costOf returns how many bytes an unfinished task takes.
func costOf(t *taskspb.SubmitTask) int32 {
	return int32(min(queue.TaskCost+proto.Size(t), math.MaxInt32))
}

// costOfGroup returns how many bytes a group takes. Groups are never deleted.
func costOfGroup(g *taskspb.TaskGroup) int64 { return groupCost + 4*int64(proto.Size(g)) }

// usage is the memory used for things other than tasks, and the used memory on which the clients'
// windows are based.
type usage struct {
	besides int64 // bytes used for things other than tasks
	told    int64 // used memory when windows were last sent to all clients
}

// used returns the number of bytes used. The caller holds the lock.
func (s *Scheduler) used() int64 {
	n := s.q.Bytes() + s.besides
	if s.recorder != nil {
		n += int64(s.recorder.waiting + s.recorder.writing)
	}
	return n
}

// windowOf returns how many bytes the unfinished tasks of a client may take. The caller holds the
// lock.
func (s *Scheduler) windowOf(p *peer) int64 {
	return max(1, (s.cfg.Memory-s.used()+s.q.Usage(p.session).Open)/2)
}

// tellWindows sends clients their windows if the used memory has changed enough. The caller holds
// the lock.
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

// tellWindow sends a client its window if the window has changed enough. The caller holds the lock.
func (s *Scheduler) tellWindow(p *peer) {
	window := s.windowOf(p)
	if d := window - p.window; p.link == nil || max(d, -d) < s.cfg.Memory/tellShare/2 {
		return
	}
	p.window = window
	p.put(nil, func(m *taskspb.FromTasks) { m.WindowBytes = uint64(window) })
}

// greedyError ends the session of a client that exceeds its window.
type greedyError struct{ bytes int64 }

// Error includes the size.
func (e greedyError) Error() string {
	return fmt.Sprintf("scheduler: the client's tasks have %d bytes, more than it may have; --tasks-memory is the limit", e.bytes)
}

// room returns an error if a client has no room for a task, and ends the client's session. The
// caller holds the lock.
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

// bounded returns r or, if results that other tasks need fill the memory, a failure that says that
// there is no room for r. The caller holds the lock.
func (s *Scheduler) bounded(r queue.Result) queue.Result {
	if n := len(r.Value) + len(r.Text); n > inlineShort && s.used() > s.cfg.Memory/4*5 {
		return queue.Result{State: queue.Failed, Failure: queue.Full, Text: fmt.Sprintf(
			"its result of %d bytes finds no room: tasks and results have %d bytes, and may have %d", n, s.used(), s.cfg.Memory)}
	}
	return r
}

// memory reports the used memory, by client. The caller holds the lock.
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

// Summary returns the state of the tasks as lines of text; nil if there are no tasks. It is safe
// for concurrent use.
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
