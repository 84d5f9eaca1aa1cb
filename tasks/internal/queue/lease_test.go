package queue

import (
	"fmt"
	"testing"
	"time"
)

// shop is a queue with workers; the test performs its actions.
type shop struct {
	t   *testing.T
	q   *Queue
	g   *Group
	now time.Time
}

func newShop(t *testing.T, workers int) *shop {
	s := &shop{t: t, q: New(Config{}), now: time.Unix(1000, 0)}
	for i := range workers {
		s.q.Join(s.now, Worker{
			ID: uint64(i + 1), Name: fmt.Sprint("w", i+1), Host: fmt.Sprint("h", i+1), Functions: map[string]bool{"f": true},
			Offers: map[string]int64{"cpu": Unit},
		}, nil)
	}
	s.g = s.q.Group("f", MakeDemand(map[string]int64{"cpu": Unit}))
	return s
}

// out returns the queue's actions of one kind and discards the others.
func (s *shop) out(what What) (all []Action) {
	for _, a := range s.q.Out {
		if a.What == what {
			all = append(all, a)
		}
	}
	s.q.Out = nil
	return all
}

// later lets time pass without any message.
func (s *shop) later(d time.Duration) {
	for end := s.now.Add(d); !s.q.Next.IsZero() && !s.q.Next.After(end); {
		s.now = s.q.Next
		s.q.Tick(s.now)
	}
	s.now = s.now.Add(d)
}

func (s *shop) submit(n uint64) { s.q.Submit(s.now, Task{ID: ID{1, n}, Group: s.g}) }

// TestLeaseToTheDead: if the worker that was asked for a lease is gone or never answers, the queue
// asks another one in time; the task is not held up.
func TestLeaseToTheDead(t *testing.T) {
	for _, name := range []string{"gone", "silent"} {
		s := newShop(t, 2)
		s.submit(1)
		asked := s.out(Ask)
		if len(asked) == 0 {
			t.Fatal("nobody is asked")
		}
		for _, a := range asked {
			if name == "gone" {
				s.q.Lose(s.now, a.Worker)
			}
		}
		began := s.now
		// The new worker is asked at once, or after leaseReply.
		s.q.Join(s.now, Worker{ID: 4, Name: "w4", Functions: map[string]bool{"f": true}, Offers: map[string]int64{"cpu": Unit}}, nil)
		for pushed := false; !pushed; {
			for i := 0; i < len(s.q.Out); i++ {
				a := s.q.Out[i]
				if a.What == Ask && a.Worker == 4 {
					s.q.Granted(s.now, 4, s.g)
				}
				pushed = pushed || a.What == Push && a.Worker == 4
			}
			if s.out(Push); pushed {
				break
			}
			if s.now.Sub(began) > leaseReply+leaseAgain {
				t.Fatalf("%s: the task is held for %v", name, s.now.Sub(began))
			}
			s.later(100 * time.Millisecond)
		}
	}
}

// TestSilentWorker: if a worker does not answer when tasks are taken back from it, it loses all of
// them, and gets no others for a while.
func TestSilentWorker(t *testing.T) {
	s := newShop(t, 1)
	s.submit(1)
	s.q.Granted(s.now, 1, s.g)
	for n := range uint64(3) {
		s.submit(n + 2)
	}
	sent := len(s.out(Push))
	if sent < 2 {
		t.Fatalf("%d tasks are sent", sent)
	}
	s.q.Join(s.now, Worker{ID: 2, Name: "w2", Functions: map[string]bool{"f": true}, Offers: map[string]int64{"cpu": Unit}}, nil)
	s.out(Ask)
	s.q.Granted(s.now, 2, s.g)
	got := 0
	for range 100 {
		for i := 0; i < len(s.q.Out); i++ {
			switch a := s.q.Out[i]; {
			case a.What == Ask && a.Worker == 2:
				s.q.Granted(s.now, 2, s.g)
			case a.What == Push && a.Worker != 2:
				t.Fatal("the silent worker gets more")
			case a.What == Push:
				got++
				s.q.Done(s.now, 2, Held{a.Task, a.Attempt}, Result{State: Succeeded}, time.Millisecond)
			}
		}
		s.q.Out = nil
		if got == 3 {
			break
		}
		s.later(50 * time.Millisecond)
	}
	if took := s.now.Sub(time.Unix(1000, 0)); got != 3 || took > leaseReply+time.Second {
		t.Errorf("another worker gets %d of 3 tasks in %v", got, took)
	}
}

// TestTraining: a worker that trains gets no tasks; those that it had run elsewhere, without
// counting as attempts. It gets tasks again when it no longer trains.
func TestTraining(t *testing.T) {
	s := newShop(t, 1)
	s.submit(1)
	s.submit(2)
	s.q.Granted(s.now, 1, s.g)
	s.out(Push)
	s.q.Train(s.now, 1, true)
	stopped := s.out(Stop)
	if len(stopped) != 2 {
		t.Errorf("it is told to stop %v", stopped)
	}
	s.submit(3)
	if out := append(s.out(Ask), s.out(Push)...); len(out) > 0 {
		t.Errorf("it is given %v", out)
	}
	if why := s.q.Status(s.now).Functions[0].Why; why != "1 worker trains" {
		t.Errorf("why: %q", why)
	}
	s.q.Submit(s.now, Task{ID: ID{1, 4}, Group: s.g, Options: &Options{Pin: 1}})
	if r, ok := s.q.Result(ID{1, 4}); !ok || r.Failure != NoMember {
		t.Errorf("a task for it alone: %+v", r)
	}
	for _, a := range stopped {
		s.q.Returned(s.now, 1, []Held{{a.Task, a.Attempt}})
	}
	s.q.Train(s.now, 1, false)
	s.q.Granted(s.now, 1, s.g)
	if pushed := s.out(Push); len(pushed) == 0 || s.q.tasks[pushed[0].Task].tries != 0 {
		t.Errorf("then it is given %v", pushed)
	}
}
