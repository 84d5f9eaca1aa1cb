package queue

import (
	"testing"
	"time"
)

// lose sends a task to n workers in turn, each of which is lost, and returns the task's result at
// the end. It calls confirm for each.
func (s *shop) lose(id ID, n int, confirm func(a Action)) (r Result, over bool) {
	s.t.Helper()
	for range n {
		for _, w := range s.q.list {
			s.q.Granted(s.now, w.ID, s.g)
		}
		pushed := s.out(Push)
		if len(pushed) != 1 || pushed[0].Task != id {
			s.t.Fatalf("%v is sent", pushed)
		}
		confirm(pushed[0])
		s.q.Lose(s.now, pushed[0].Worker)
	}
	return s.q.Result(id)
}

// TestHostLost: the workers of a dying host are lost one after another. A task that is sent to each
// of them counts one loss and runs again; a task without retries does not.
func TestHostLost(t *testing.T) {
	s := newShop(t, 6)
	id := ID{1, 1}
	s.submit(1)
	if r, over := s.lose(id, 5, func(Action) {}); over {
		t.Fatalf("it is over: %+v", r)
	}
	if task := s.q.tasks[id]; task.deaths != 1 || task.tries != 1 {
		t.Errorf("%d losses and %d tries", task.deaths, task.tries)
	}
	s.q.Granted(s.now, 6, s.g)
	s.q.Granted(s.now, 1, s.g)
	for _, a := range s.out(Push) {
		s.q.Begun(a.Worker, Held{a.Task, a.Attempt})
		s.q.Done(s.now, a.Worker, Held{a.Task, a.Attempt}, Result{State: Succeeded}, time.Millisecond)
	}
	if r, _ := s.q.Result(id); r.State != Succeeded {
		t.Errorf("then it is %+v", r)
	}
	s = newShop(t, 2)
	s.q.Submit(s.now, Task{ID: id, Group: s.g, Options: &Options{}})
	if r, over := s.lose(id, 1, func(Action) {}); !over || r.Failure != Lost {
		t.Errorf("one that may run once alone is %+v", r)
	}
}

// TestPoison: a task that ends its worker three times has failed. Its workers confirm the start of
// the task, except the first, which is not asked to.
func TestPoison(t *testing.T) {
	s := newShop(t, 5)
	id := ID{1, 1}
	s.submit(1)
	n := 0
	r, over := s.lose(id, 3, func(a Action) {
		if a.Confirm != (n > 0) {
			t.Errorf("the worker %d is asked to confirm: %v", n, a.Confirm)
		}
		if n++; a.Confirm {
			s.q.Begun(99, Held{a.Task, a.Attempt}) // a worker without the task: it has no effect
			s.q.Begun(a.Worker, Held{a.Task, a.Attempt})
		}
	})
	if !over || r.Failure != Poison || len(s.q.tasks[id].killers) != 3 {
		t.Errorf("%+v", r)
	}
}

// TestHeldIsBegun: tasks that a worker reports when it reconnects count as confirmed.
func TestHeldIsBegun(t *testing.T) {
	s := newShop(t, 3)
	id := ID{1, 1}
	s.submit(1)
	r, over := s.lose(id, 3, func(a Action) {
		w := s.q.workers[a.Worker]
		s.q.Join(s.now, w.Worker, []Held{{a.Task, a.Attempt}})
	})
	if !over || r.Failure != Poison {
		t.Errorf("over %v: %+v", over, r)
	}
}
