package tasks

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

var goOn atomic.Pointer[chan struct{}]

// deaf does not heed its context.
var deaf = Register[None]("deaf/v1", func(context.Context) error {
	<-*goOn.Load()
	return nil
})

// TestDeafFunction: a function that goes on after the time of its task is up occupies its worker,
// which the status says, and holds up no other task.
func TestDeafFunction(t *testing.T) {
	until := make(chan struct{})
	goOn.Store(&until)
	p := newPlace(t, scheduler.Config{})
	for range 2 {
		p.serve(ServeConfig{Offers: map[string]float64{"cpu": 1}})
	}
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	if _, err := deaf.With(TimeLimit(time.Millisecond)).Call(ctx, pool); !errors.Is(err, ErrTimeLimit) {
		t.Fatal(err)
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
	close(until)
	if _, err := RunAll(ctx, pool, double, 1); err != nil { // on the worker too that was occupied
		t.Error(err)
	}
}
