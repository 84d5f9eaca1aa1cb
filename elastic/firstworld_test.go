package elastic

import (
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// TestLate: the option has no effect on a worker without a driver: it is in its world before Run.
func TestLate(t *testing.T) {
	t.Setenv(plan.EnvLauncherAddr, "")
	w, err := Init(t.Context(), Late)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if w.Rank() != 0 || w.Size() != 1 || w.Group().Size() != 1 {
		t.Errorf("rank %d of %d", w.Rank(), w.Size())
	}
}
