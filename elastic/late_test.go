package elastic

import (
	"context"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// A late worker without a driver is in no world before Run, and in a world of one there.
func TestLateAlone(t *testing.T) {
	t.Setenv(plan.EnvDriverAddr, "")
	w, err := Init(t.Context(), Late)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if w.Rank() != -1 || w.Size() != 0 || w.Group() != nil || w.Generation() != 0 {
		t.Errorf("before Run: rank %d of %d in generation %d", w.Rank(), w.Size(), w.Generation())
	}
	sampler, scaling := NewSampler(10, SamplerOptions{}), NewScaling(ScalingOptions{})
	s := NewState(w, sampler, scaling, Tensor("large", make([]float64, maxCarried)))
	if n, f := sampler.Len(), scaling.Next(); n != 10 || f != 1 {
		t.Errorf("before Run: %d indices, factor %v", n, f)
	}
	resets := 0
	s.OnReset(func() error { resets++; return nil })
	steps := 0
	if err := Run(t.Context(), s, func(ctx context.Context) error {
		if w.Rank() != 0 || w.Size() != 1 || w.Group().Size() != 1 {
			t.Errorf("in Run: rank %d of %d", w.Rank(), w.Size())
		}
		for _, ok := sampler.Next(); ok; _, ok = sampler.Next() {
			steps++
			if err := s.Commit(); err != nil {
				return err
			}
		}
		return nil
	}); err != nil || steps != 10 || resets != 0 {
		t.Errorf("%d steps, %d resets: %v", steps, resets, err)
	}
}

// A late worker that ends before Run reports nothing.
func TestLateNeverRuns(t *testing.T) {
	t.Setenv(plan.EnvDriverAddr, "")
	w, err := Init(t.Context(), Late)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
