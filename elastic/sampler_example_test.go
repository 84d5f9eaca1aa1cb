package elastic_test

import (
	"fmt"

	"github.com/hvdrun/hvdrun/elastic"
)

// One worker iterates over an epoch of five examples, two at a time. The last batch is smaller.
func ExampleSampler() {
	sampler := elastic.NewSampler(5, elastic.SamplerOptions{Batch: 2})
	for epoch := range 2 {
		sampler.SetEpoch(epoch)
		fmt.Print("epoch ", epoch, ":")
		for batch, ok := sampler.Next(); ok; batch, ok = sampler.Next() {
			fmt.Print(" ", batch)
		}
		fmt.Println()
	}
	// Output:
	// epoch 0: [0 1] [2 3] [4]
	// epoch 1: [0 1] [2 3] [4]
}

// A base rate for two workers is halved for the one worker of this world.
func ExampleScaling() {
	scaling := elastic.NewScaling(elastic.ScalingOptions{Of: 2})
	fmt.Println(0.1 * scaling.Next())
	// Output: 0.05
}
