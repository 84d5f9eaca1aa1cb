package scheduler

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

// TestUnserved: a client learns once, after 5 s, that no worker has the function of its tasks.
func TestUnserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Run: "r", Log: silent()})
		connect := func(h *taskspb.TasksHello) (*link.Link[*taskspb.ToTasks], chan *taskspb.FromTasks) {
			near, far := net.Pipe()
			go func() { _ = s.Handle(t.Context(), far, identity.Subject{Role: identity.Worker}) }()
			l := link.New(near, func() *taskspb.ToTasks { return &taskspb.ToTasks{} })
			news := make(chan *taskspb.FromTasks, 100)
			go func() {
				for r := link.NewReader(near); ; {
					m := &taskspb.FromTasks{}
					if r.Read(m) != nil {
						return
					}
					news <- m
				}
			}()
			l.Say(func(m *taskspb.ToTasks) { m.Hello = h })
			return l, news
		}
		other := &taskspb.TasksHello{Session: 9, Worker: true, Host: "worker", Functions: []*taskspb.TaskFunction{{Name: "g", Hash: []byte("12345678")}},
			Offers: oneGroup.GetDemand()}
		w, _ := connect(other)
		c, news := connect(aClient)
		began := time.Now()
		c.Say(func(m *taskspb.ToTasks) {
			m.Groups = append(m.Groups, oneGroup)
			m.Submits = append(m.Submits, &taskspb.SubmitTask{N: 1})
		})
		for m := range news {
			if len(m.GetWarnings()) > 0 {
				if text := m.GetWarnings()[0]; text != "1 tasks of f (cpu=1) do not run: 1 worker has no such function" || time.Since(began) != unservedAfter {
					t.Errorf("after %v: %s", time.Since(began), text)
				}
				break
			}
		}
		quiet := time.NewTimer(time.Minute)
		for over := false; !over; {
			select {
			case m := <-news:
				if len(m.GetWarnings()) > 0 {
					t.Errorf("it is told again: %v", m.GetWarnings())
				}
			case <-quiet.C:
				over = true
			}
		}
		w.Close()
		c.Close()
		s.Close()
	})
}
