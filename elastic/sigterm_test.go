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

	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// leave answers a worker's request to leave as a driver does: it informs the members and dismisses
// the worker.
func (d *testDriver) leave(incarnation string, generation uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server.Dismiss(incarnation, line.ErrRemoved)
	d.seq++
	d.pusher.Push([]string{incarnation}, notify.Update{Seq: d.seq, Change: plan.Removed, Generation: generation})
}

func (d *testDriver) heard(r report) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.reports, r)
}

// TestAskedToLeave: SIGTERM makes a worker in Run leave at a commit. Further SIGTERMs at the same
// time count as the same request. The program also receives its signals. Outside of Run, SIGTERMs
// are not reported to the driver.
func TestAskedToLeave(t *testing.T) {
	d := newTestDriver(t, "a")
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
		case <-sandbox.Expired():
			t.Fatal("the program does not get its signal")
		}
	}
	m, err := d.driven("a", 0)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorker(t.Context(), m).arrive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.driven = true
	asked := report{line.Draining, 1, 0}
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
	ask() // sent by the driver while the worker is leaving
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(slices.DeleteFunc(d.reports, func(r report) bool { return r.what != line.Draining })); n != 1 {
		t.Errorf("the driver was told %d times", n)
	}
}

// A worker can be dismissed long after it was asked to leave, when it no longer handles SIGTERM.
func TestDismissedLongAfterTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &Worker{}
		w.use.over.Store(true)
		h := newTermHandler(w)
		h.wg.Go(h.watch)
		h.caught <- syscall.SIGTERM
		<-time.After(2 * sameRequest)
		h.leave()
	})
}

// For a worker that stays after a request, the next SIGTERM is another request. For one that may
// still leave, a second SIGTERM has the effect that it had before Run.
func TestStaysAndIsAskedAgain(t *testing.T) {
	for name, commits := range map[string]time.Duration{"soon": sameRequest * 3 / 4, "later": 5 * sameRequest} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { askedAgain(t, commits) }) })
	}
}

func askedAgain(t *testing.T, after time.Duration) {
	l := new(fakeproc.Process)
	w := start(t, newScript())
	w.driven, w.fake = true, l
	h := w.handleTerm()
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
			t.Errorf("before a commit: SIGTERM is handled: %t", heeds)
		}
		h.committed()
		<-time.After(2 * sameRequest)
		if !h.stays() {
			t.Error("it does not count as one that stays")
		}
	}
}

// A worker without a driver does not handle SIGTERM, nor does one whose program ignores it.
func TestSigtermNotHandled(t *testing.T) {
	w := start(t, newScript())
	if w.handleTerm() != nil {
		t.Error("a worker without a driver takes SIGTERM")
	}
	w.driven = true
	signal.Ignore(syscall.SIGTERM)
	defer signal.Reset(syscall.SIGTERM)
	if w.handleTerm() != nil {
		t.Error("SIGTERM is not ignored any more")
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
