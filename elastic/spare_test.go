package elastic

import (
	"context"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// TestWhileSpare: the context ends when the worker enters a world. A later call returns a context
// that has ended.
func TestWhileSpare(t *testing.T) {
	w := newWorker(t.Context(), solo{})
	w.stayOut(plan.Worker{Slot: plan.Slot{LocalSize: 1, CrossSize: 1}, Size: 1})
	defer w.Close()
	spare, cancel := w.WhileSpare(t.Context())
	defer cancel()
	other, cancelOther := w.WhileSpare(t.Context())
	cancelOther()
	if spare.Err() != nil || other.Err() == nil {
		t.Errorf("before it has a place: %v, and %v", spare.Err(), other.Err())
	}
	n := 1
	if err := Run(t.Context(), NewState(w, Value("n", &n)), func(context.Context) error { return nil }); err != nil {
		t.Fatal(err)
	}
	<-spare.Done()
	late, cancelLate := w.WhileSpare(t.Context())
	defer cancelLate()
	<-late.Done()
}
