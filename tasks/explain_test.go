package tasks

import (
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// TestExplain: Explain says why a task waits, by the task's number and by its function.
func TestExplain(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{})
	if _, err := Map(t.Context(), pool, double, []int{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	f, err := double.With(CPU(1000)).Submit(t.Context(), pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pool.Explain(t.Context(), "4")
	if err != nil || len(all) != 1 || !strings.Contains(all[0].Why, "less than cpu=1000") || all[0].By == "" {
		t.Errorf("%+v, %v", all, err)
	}
	if all, err = pool.Explain(t.Context(), "double/v1"); err != nil || len(all) != 1 || all[0].N != 4 {
		t.Errorf("%+v, %v", all, err)
	}
	f.Cancel()
}
