package elastictest_test

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/plan"
)

// train is the work of a training program's main function: it sums the contributions of all ranks
// in 50 steps.
func train(ctx context.Context) (sum int64, err error) {
	w, err := elastic.Init(ctx)
	if err != nil {
		return 0, err
	}
	defer w.Close()
	step := 0
	state := elastic.NewState(w, elastic.Value("step", &step), elastic.Value("sum", &sum))
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		for step < 50 {
			share := []int64{int64(step)}
			if err := collective.AllReduce(ctx, w.Group(), share, collective.Average); err != nil {
				return err
			}
			sum, step = sum+share[0], step+1
			if err := state.Commit(); err != nil {
				return err // unchanged: elastic.Run handles it
			}
		}
		return nil
	})
	return sum, err
}

// Example runs a job of two workers that loses one of them in its tenth commit, gets another host,
// and ends with the correct result.
func Example() {
	var mu sync.Mutex
	sums := make(map[int64]int)
	job := elastictest.Start(elastictest.Config{
		Worker: func(ctx context.Context) error {
			sum, err := train(ctx)
			if err == nil {
				mu.Lock()
				defer mu.Unlock()
				sums[sum]++
			}
			return err
		},
		Hosts:  []plan.Host{{Name: "a", Slots: 2}},
		Deaths: []elastictest.Moment{{Rank: 0, Phase: elastictest.Saving, Commit: 10}},
	})
	if err := job.Await(elastictest.Commit(10)); err != nil {
		fmt.Println(err)
	}
	job.AddHost("b", 1)
	if err := job.Wait(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	for sum := range sums {
		fmt.Println("sum", sum)
	}
	// Output: sum 1225
}
