package elastic

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/life"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// leave answers a worker that says that it was asked to leave, as a driver does: it tells the
// members, and dismisses it.
func (d *door) leave(incarnation string, generation uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server.Dismiss(incarnation, rendezvous.ErrRemoved)
	d.seq++
	d.pusher.Push([]notify.Target{d.targets[incarnation]}, notify.Update{Seq: d.seq, Change: plan.Removed, Generation: generation})
}

func (d *door) heard(r report) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.reports, r)
}

// TestAskedToLeave: SIGTERM makes a worker in Run leave at a commit, and others at the same time
// are the same request. The program gets its signals all the same. Outside of Run nobody hears of
// them.
func TestAskedToLeave(t *testing.T) {
	d := openDoor(t, "a")
	own := make(chan os.Signal, 10) // also keeps this process alive
	signal.Notify(own, syscall.SIGTERM)
	defer signal.Stop(own)
	ask := func() {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case <-own:
		case <-time.After(2 * time.Minute):
			t.Fatal("the program does not get its signal")
		}
	}
	m, err := newDriven(d.env("a", 0))
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorker(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	w.driven = true
	asked := report{rendezvous.Draining, 1, 0}
	ask()
	steps := 0
	s := NewState(w, Value("steps", &steps))
	err = Run(t.Context(), s, func(context.Context) error {
		if d.heard(asked) {
			t.Error("the driver heard of a signal from before Run")
		}
		for ; ; steps++ {
			if steps == 3 {
				ask()
				ask()
			}
			if steps >= 3 && d.heard(asked) {
				d.leave("a", 1)
			}
			if err := s.Commit(); err != nil {
				steps++
				return err
			}
		}
	})
	if !errors.Is(err, ErrRemoved) || steps < 4 {
		t.Errorf("Run returned %v after %d steps", err, steps)
	}
	ask() // the driver's, on its way while the worker left
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(slices.DeleteFunc(d.reports, func(r report) bool { return r.what != rendezvous.Draining })); n != 1 {
		t.Errorf("the driver was told %d times", n)
	}
}

// A worker may be sent away long after it was asked to leave, when it listens no more.
func TestSentAwayLongAfterTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHeed(&Worker{over: true})
		h.wg.Go(h.watch)
		h.caught <- syscall.SIGTERM
		<-time.After(2 * sameRequest)
		h.leave()
	})
}

// A worker that goes on after a request takes the next SIGTERM for a request too, and not for one
// to end at once. One that may still leave does not.
func TestStaysAndIsAskedAgain(t *testing.T) {
	for name, commits := range map[string]time.Duration{"soon": sameRequest * 3 / 4, "later": 5 * sameRequest} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { askedAgain(t, commits) }) })
	}
}

func askedAgain(t *testing.T, after time.Duration) {
	l := new(life.Life)
	w := start(t, newScript())
	w.driven, w.life = true, l
	h := w.heed()
	defer func() {
		h.end()
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range 3 {
		if !l.Terminate() {
			t.Fatal("SIGTERM ended the worker at once")
		}
		<-time.After(after)
		if heeds := l.Terminate(); heeds != (after < sameRequest) {
			t.Errorf("before a commit: SIGTERM is heeded: %t", heeds)
		}
		h.committed()
		<-time.After(2 * sameRequest)
		if !h.stays() {
			t.Error("it does not count as one that stays")
		}
	}
}

// A worker that is alone leaves SIGTERM alone, and so does one whose program ignores it.
func TestNobodyToTell(t *testing.T) {
	w := start(t, newScript())
	if w.heed() != nil {
		t.Error("a worker without a driver takes SIGTERM")
	}
	w.driven = true
	signal.Ignore(syscall.SIGTERM)
	defer signal.Reset(syscall.SIGTERM)
	if w.heed() != nil {
		t.Error("SIGTERM is not ignored any more")
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
