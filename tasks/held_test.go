package tasks

import (
	"context"
	"net"
	"testing"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

// TestHeld: of finished tasks, a worker keeps what the next scheduler must know, for the newest
// ones only, and without their arguments.
func TestHeld(t *testing.T) {
	w, err := newWorker(ServeConfig{Log: quiet(), Dial: func(context.Context) (net.Conn, error) { return nil, net.ErrClosed }})
	if err != nil {
		t.Fatal(err)
	}
	const more, each = 10, 70
	push := func(n uint64) *taskspb.PushTask {
		return &taskspb.PushTask{Of: &taskspb.Attempt{N: n}, Args: []byte{1}, Results: []*taskspb.TaskTold{{N: 1}}}
	}
	for n := uint64(1); n <= mostUnheard+more; {
		var m taskspb.FromTasks
		for range each {
			m.Pushes = append(m.Pushes, push(n))
			n++
		}
		w.hear(&m)
		w.running.Wait()
	}
	if n := len(w.held); n > mostUnheard || n < mostUnheard/2 || n != len(w.unheard) || w.heard != uint64(mostUnheard+more-n) {
		t.Errorf("of %d tasks that are over it has %d, and the ends of %d; it says no more of %d", mostUnheard+more, n, len(w.unheard), w.heard)
	}
	for _, a := range w.held {
		if len(a.push.GetArgs())+len(a.push.GetResults()) > 0 || a.push.GetOf().GetN() == 0 {
			t.Fatalf("it keeps %v", a.push)
		}
	}
	// A worker sends again what it has kept from a broken connection; the scheduler says how much
	// of that it has already heard.
	w.hear(&taskspb.FromTasks{Results: []*taskspb.ResultFor{{Of: &taskspb.Attempt{N: 1}}}})
	near, far := net.Pipe()
	defer far.Close()
	l := link.New(near, func() *taskspb.ToTasks { return &taskspb.ToTasks{} })
	defer l.Close()
	before := len(w.unheard)
	w.welcomed(l, &taskspb.FromTasks{Welcome: &taskspb.TasksWelcome{Known: true}, Heard: 1})
	if len(w.results) > 0 || w.heard != 1 || len(w.unheard) != before {
		t.Errorf("it has %d results for tasks that have not come, and %d ends from the number %d on", len(w.results), len(w.unheard), w.heard)
	}
	if w.acknowledge(3); len(w.unheard) != before-2 || len(w.held) != before-2 {
		t.Errorf("it has %d tasks and %d ends, of %d", len(w.held), len(w.unheard), before)
	}
}
