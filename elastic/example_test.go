package elastic_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
)

// Linear regression of y = 3x over eight points, in a world of any size.
func Example() {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()

	weights, epoch, rate := []float64{0}, 0, 0.01
	sampler := elastic.NewSampler(8, elastic.SamplerOptions{Shuffle: true, Seed: 1, Batch: 2})
	state := elastic.NewState(w,
		elastic.Tensor("weights", weights),
		elastic.Value("epoch", &epoch),
		sampler)
	state.OnReset(func() error { rate = 0.01 * float64(w.Size()); return nil })

	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		for ; epoch < 20; epoch++ {
			sampler.SetEpoch(epoch)
			for batch, ok := sampler.Next(); ok; batch, ok = sampler.Next() {
				grad := []float64{0}
				for _, i := range batch {
					x := float64(i)
					grad[0] += (weights[0]*x - 3*x) * x / float64(len(batch))
				}
				if err := collective.AllReduce(ctx, w.Group(), grad, collective.Average); err != nil {
					return err
				}
				weights[0] -= rate * grad[0]
				if err := state.Commit(); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if errors.Is(err, elastic.ErrRemoved) || errors.Is(err, elastic.ErrFinished) {
		return // the job continues, or is done, without this worker
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("rank %d of %d: y = %.2f x after %d commits\n", w.Rank(), w.Size(), weights[0], state.Commits())
	// Output: rank 0 of 1: y = 3.00 x after 80 commits
}
