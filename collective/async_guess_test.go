package collective

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// TestHesitates: a rank that is called to a cycle waits a limited time for the tensors that it is
// expected to submit. It does not wait if nothing is expected or if it has something to announce.
func TestHesitates(t *testing.T) {
	called := func(expects bool) *engine {
		f := newFamily(&sockets.Generation{})
		e := newEngine(newGroup(f, lane{Lane: sockets.Lane{Size: 2}}))
		e.lane = newGroup(f, lane{Lane: sockets.Lane{ID: 1, Size: 2}})
		if expects {
			e.agreed.Guess.Times = agreement.Surely
		}
		e.lane.nudged(1)
		return e
	}
	synctest.Test(t, func(t *testing.T) {
		if e := called(false); !e.look() {
			t.Error("nothing is expected, and it waits")
		}
		e := called(true)
		if e.look() {
			t.Error("it does not wait")
		}
		<-time.After(e.patience() - 1)
		if e.look() {
			t.Error("it does not wait long enough")
		}
		select {
		case <-e.timer.C:
			t.Error("it is woken too early")
		default:
		}
		<-time.After(1)
		<-e.timer.C // the engine's own goroutine looks again
		if !e.look() {
			t.Error("it waits for too long")
		}
		e = called(true)
		if e.fresh = []*Handle{{since: time.Now()}}; !e.look() {
			t.Error("it has submitted something, and waits")
		}
		e = called(true)
		if e.lane.departed(); !e.look() {
			t.Error("a rank has left, and it waits")
		}
	})
}
