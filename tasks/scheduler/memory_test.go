package scheduler

import (
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/test/follow"
)

// emptied waits until no task takes memory.
func (s *Scheduler) emptied() bool {
	return follow.Poll(func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.q.Bytes() == 0 && s.besides <= costOfGroup(oneGroup)
	})
}

// TestGreedyClient: the scheduler disconnects a client that submits endlessly and ignores its
// window. The client's memory is given back, and other clients continue.
func TestGreedyClient(t *testing.T) {
	const memory = 1 << 20
	s := New(Config{Run: "r", Memory: memory, Log: silent()})
	defer s.Close()
	greedy, other := connectTo(t, s, aClient), connectTo(t, s, &taskspb.TasksHello{Session: 8, Host: "other"})
	greedy.say(func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, oneGroup) })
	args := make([]byte, 1<<20)
	n := uint64(0)
	for more := true; more; {
		n++
		sub := &taskspb.SubmitTask{N: n, Args: args}
		_ = greedy.l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) })
		_ = greedy.l.Wait(t.Context())
		select {
		case m, ok := <-greedy.news:
			more = ok && m.GetRefused() == ""
			if ok && !more && !strings.Contains(m.GetRefused(), "more than it may have") {
				t.Errorf("the client was refused: %q", m.GetRefused())
			}
		default:
		}
	}
	if most := uint64(overdraft+memory)/uint64(len(args)) + 20; n > most { // those in flight
		t.Errorf("it could submit %d tasks of 1 MiB", n)
	}
	if !s.emptied() {
		t.Error("what it had is not given back")
	}
	other.say(func(m *taskspb.ToTasks) {
		m.Groups = append(m.Groups, oneGroup)
		m.Submits = append(m.Submits, &taskspb.SubmitTask{N: 1})
	})
	connectTo(t, s, aWorker).answer(&taskspb.TaskResult{State: 3})
	other.until(func(m *taskspb.FromTasks) bool { return len(m.GetTold()) == 1 })
}

// TestDyingClient: the memory of a client that dies is given back.
func TestDyingClient(t *testing.T) {
	s := New(Config{Run: "r", ClientGrace: time.Millisecond, Log: silent()})
	defer s.Close()
	for session := range uint64(3) {
		c := connectTo(t, s, &taskspb.TasksHello{Session: session + 1, Host: "client"})
		value := make([]byte, 32)
		c.say(func(m *taskspb.ToTasks) {
			m.Groups = append(m.Groups, oneGroup)
			m.Puts = append(m.Puts, &taskspb.PutValue{Value: value, Size: 1})
		})
		for n := range uint64(10) {
			sub := &taskspb.SubmitTask{N: n + 1, Args: make([]byte, 100_000)}
			_ = c.l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) })
		}
		c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == 10 })
		s.mu.Lock()
		if used := s.used(); used < 1_000_000 {
			t.Errorf("%d bytes are used", used)
		}
		s.mu.Unlock()
		c.end()
	}
	if !s.emptied() {
		t.Error("what they had is not given back")
	}
}

// TestWindows: the window of each client is half of what the others leave.
func TestWindows(t *testing.T) {
	const memory = 64 << 20
	s := New(Config{Run: "r", Memory: memory, Log: silent()})
	defer s.Close()
	submit := func(c *wired, n uint64, bytes int) {
		sub := &taskspb.SubmitTask{N: n, Args: make([]byte, bytes)}
		c.say(func(m *taskspb.ToTasks) { m.Groups = []*taskspb.TaskGroup{oneGroup} })
		if err := c.l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) }); err != nil {
			t.Error(err)
		}
	}
	near := func(got uint64, want int) bool { return max(int(got)-want, want-int(got)) <= memory/tellShare+100_000 }
	told := func(c *wired, want int) {
		c.until(func(m *taskspb.FromTasks) bool { return near(m.GetWindowBytes(), want) })
	}
	one := connectTo(t, s, aClient)
	told(one, memory/2)
	submit(one, 1, 8<<20)
	submit(one, 2, 8<<20) // its own tasks do not change its own window
	two := connectTo(t, s, &taskspb.TasksHello{Session: 8, Host: "other"})
	one.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == 2 })
	three := connectTo(t, s, &taskspb.TasksHello{Session: 10, Host: "third"})
	told(three, (memory-16<<20)/2)
	submit(two, 1, 10<<20)
	told(one, (memory-10<<20)/2)
	one.say(func(m *taskspb.ToTasks) {
		m.Cancels = append(m.Cancels, &taskspb.CancelTask{N: 1}, &taskspb.CancelTask{N: 2})
	})
	told(three, (memory-10<<20)/2)
	if link.MaxSubmit > LeastMemory/8 {
		t.Error("the largest task does not fit beside others")
	}
}
