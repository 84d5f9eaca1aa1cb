package tasks

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/report"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/follow"
)

var (
	goOn  atomic.Pointer[chan struct{}]
	begun atomic.Int32 // number of calls of deaf
)

// deaf ignores its context.
var deaf = Register[None]("deaf/v1", func(context.Context) error {
	begun.Add(1)
	<-*goOn.Load()
	return nil
})

// TestDeafFunction: a function that continues after its task's time is up occupies its worker, as
// the status says, and does not hold up other tasks.
func TestDeafFunction(t *testing.T) {
	until := make(chan struct{})
	goOn.Store(&until)
	stuck := make(chan job.TaskEvent, 100)
	p := newPlace(t, scheduler.Config{Grace: time.Millisecond, Event: func(e job.TaskEvent) {
		if e.Name == job.TaskWorkerStuck {
			stuck <- e
		}
	}})
	for range 2 {
		p.serve(ServeConfig{Offers: map[string]float64{"cpu": 1}})
	}
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	before := begun.Load()
	for limit := 100 * time.Millisecond; begun.Load() == before; limit *= 2 { // its time can be up before it has begun
		if _, err := deaf.With(TimeLimit(limit)).Call(ctx, pool); !errors.Is(err, ErrTimeLimit) {
			t.Fatal(err)
		}
		if !follow.Await(t, func() bool { // no attempt is on its way
			s, err := pool.Status(ctx)
			return begun.Load() > before || err == nil && !slices.ContainsFunc(s.Workers, func(w report.WorkerStatus) bool {
				return w.Running > 0 || len(w.Stopped) > 0
			})
		}) {
			t.Fatal("an attempt whose time was up neither begins nor ends")
		}
	}
	if _, err := Map(ctx, pool, double, make([]int, 100)); err != nil {
		t.Error(err)
	}
	s, err := pool.Status(ctx)
	stopped := 0
	for _, w := range s.Workers {
		stopped += len(w.Stopped)
	}
	if err != nil || stopped != 1 {
		t.Errorf("%d attempts go on, as the status says: %+v, %v", stopped, s.Workers, err)
	}
	if e := <-stuck; e.Function != deaf.Name() || !strings.HasPrefix(e.Text, "whose time is up, has not ended for ") {
		t.Errorf("the end of its worker is asked for because of %+v", e)
	}
	if all, err := pool.Explain(ctx, deaf.Name()); err != nil || len(all) != 1 || !strings.Contains(all[0].Why, "runs an attempt that, whose time is up, has not ended for") {
		t.Errorf("it is explained as %+v, %v", all, err)
	}
	close(until)
	if _, err := RunAll(ctx, pool, double, 1); err != nil { // this includes the worker that was occupied
		t.Error(err)
	}
}

// TestDeafWorkerLeaves: a worker that leaves does not wait for a function that ignores its context,
// but does for others; the unfinished attempt does not count.
func TestDeafWorkerLeaves(t *testing.T) {
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		until := make(chan struct{})
		goOn.Store(&until)
		p := newSlowPlace()
		defer p.close()
		pool, err := Connect(t.Context(), ConnectConfig{Dial: p.dialer(), Log: quiet()})
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		ctx, leave := context.WithCancel(t.Context())
		serving := make(chan error, 1)
		go func() {
			serving <- Serve(ctx, ServeConfig{Dial: p.dialer(), Host: "a", Log: quiet(), root: root, run: "run", Offers: map[string]float64{"cpu": 2}})
		}()
		wild, err := deaf.Submit(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wild.Cancel()
		gates[0] = make(chan struct{})
		slow, err := opens.Submit(t.Context(), pool, 0)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		began := time.Now()
		leave()
		synctest.Wait()
		close(gates[0])
		if err := slow.Err(t.Context()); err != nil {
			t.Errorf("a task that ended within the grace: %v", err)
		}
		if err := <-serving; err != nil || time.Since(began) > deafTime+2*time.Second {
			t.Errorf("Serve has returned %v after %v", err, time.Since(began))
		}
		close(until)
	})
}
