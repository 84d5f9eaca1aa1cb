package elastic

import (
	"context"
	"testing"
)

// TestWhileSpare: the context ends when the worker enters a world, and is over after that.
func TestWhileSpare(t *testing.T) {
	w, err := Init(t.Context(), Late)
	if err != nil {
		t.Fatal(err)
	}
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
