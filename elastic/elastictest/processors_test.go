package elastictest

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/plan"
)

// TestProcessors: while jobs run, GOMAXPROCS is at least the number of their workers plus one.
// Afterwards it has its previous value.
func TestProcessors(t *testing.T) {
	before := runtime.GOMAXPROCS(2)
	defer runtime.GOMAXPROCS(before)
	var jobs sync.WaitGroup
	for range 2 {
		jobs.Go(func() {
			job := Start(Config{
				Hosts: []plan.Host{{Name: "a", Slots: 3}},
				Worker: func(ctx context.Context) error {
					w, err := elastic.Init(ctx)
					if err != nil {
						return err
					}
					defer w.Close()
					if n := runtime.GOMAXPROCS(0); n < 4 {
						t.Errorf("%d processors for 3 workers", n)
					}
					return elastic.Run(ctx, elastic.NewState(w, elastic.Value("n", new(0))), func(context.Context) error { return nil })
				},
			})
			if err := job.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
	jobs.Wait()
	if n := runtime.GOMAXPROCS(0); n != 2 {
		t.Errorf("%d processors after the jobs, want 2", n)
	}
}
