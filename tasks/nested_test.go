package tasks

import (
	"context"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// nest calls itself to the given depth, with the given number of calls at each level, and returns
// the number of calls.
var (
	nest   *Func[int]
	nested *Pool
)

func init() {
	nest = Register[int]("nest/v1", func(ctx context.Context, depth, width int) (int, error) {
		if depth == 0 {
			return 1, nil
		}
		if width == 1 {
			n, err := nest.Call(ctx, nested, depth-1, 1)
			return n + 1, err
		}
		calls := 1
		var below []*Future[int]
		for range width {
			f, err := nest.Submit(ctx, nested, depth-1, width)
			if err != nil {
				return 0, err
			}
			below = append(below, f)
		}
		for f, err := range AsCompleted(ctx, below) {
			if err != nil {
				return 0, err
			}
			n, err := f.Get(ctx)
			if calls += n; err != nil {
				return 0, err
			}
		}
		return calls, nil
	})
}

// TestNested: tasks that wait for other tasks end, however many tasks and however few workers there
// are, even if connections break.
func TestNested(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{Offers: map[string]float64{"cpu": 1}})
	nested = p.connect(ConnectConfig{})
	for _, c := range []struct{ depth, width, want int }{{6, 1, 7}, {30, 1, 31}, {5, 2, 63}} {
		f, err := nest.Submit(t.Context(), nested, c.depth, c.width)
		p.cut()
		if got := get(t, f, err); got != c.want {
			t.Errorf("%d deep and %d wide: %d calls, want %d", c.depth, c.width, got, c.want)
		}
	}
	for range 3 {
		p.serve(ServeConfig{Offers: map[string]float64{"cpu": 1}})
	}
	f, err := nest.Submit(t.Context(), nested, 6, 1)
	if got := get(t, f, err); got != 7 {
		t.Errorf("%d calls on 4 workers", got)
	}
}
