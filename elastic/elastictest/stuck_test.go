package elastictest_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// TestAllWaitForEachOther: two ranks use two groups in different orders, so each waits for the
// other in a different group. The driver reports the deadlock and makes both restore their last
// commit. The second time they use the same order, and no worker is lost.
func TestAllWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const steps, wrong = 6, 3
		log, lines := logtest.NewNullLogger()
		var tries, resets, starts atomic.Int32
		train := func(ctx context.Context) error {
			w, err := elastic.Init(ctx)
			if err != nil {
				return err
			}
			defer w.Close()
			step := 0
			state := elastic.NewState(w, elastic.Value("step", &step))
			return elastic.Run(ctx, state, func(ctx context.Context) error {
				groups := make([]*collective.Group, 2)
				for i := range groups {
					if groups[i], err = w.Group().Subset(ctx, []int{0, 1}); err != nil {
						return err
					}
				}
				for step < steps {
					order := []int{0, 1}
					if step == wrong && w.Rank() == 1 && tries.Add(1) == 1 {
						order = []int{1, 0}
					}
					for _, i := range order {
						if err := collective.Barrier(ctx, groups[i]); err != nil {
							return err
						}
					}
					step++
					if err := state.Commit(); err != nil {
						return err
					}
				}
				return nil
			})
		}
		job := elastictest.Start(elastictest.Config{
			Worker: train, Hosts: []plan.Host{{Name: "a", Slots: 2}},
			Driver: driver.Config{
				Log: log, Size: job.Size{Min: 2, Elastic: true},
				Timeouts: job.Timeouts{StallWarning: time.Second, Stall: 6 * time.Second},
				Events: func(e job.Event) {
					switch e.Name {
					case job.Reset:
						resets.Add(1)
					case job.WorkerStarted:
						starts.Add(1)
					}
				},
			},
		}.InMemory(*firstSeed))
		if err := job.Wait(); err != nil {
			t.Fatal(err)
		}
		if n, started := resets.Load(), starts.Load(); n != 1 || started != 2 {
			t.Errorf("%d resets and %d workers; want 1 and 2", n, started)
		}
		said := ""
		for _, e := range lines.AllEntries() {
			said += e.Message + "\n"
		}
		for _, want := range []string{"all 2 ranks wait, and none is missing: rank 0 in Barrier (operation ", " of group 1 of 2) for ",
			"; rank 1 in Barrier (operation ", " of group 2 of 2) for ", "generation 1 is given up"} {
			if !strings.Contains(said, want) {
				t.Errorf("%q is not said:\n%s", want, said)
			}
		}
	})
}
