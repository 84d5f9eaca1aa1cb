package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/elastic"
)

// Gradients in a GPU's memory are averaged by all ranks, and the weights are a part of the state.
func Example() {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	device, err := cuda.Open(cuda.Config{Device: w.Slot()})
	if errors.Is(err, cuda.ErrUnavailable) {
		fmt.Println("no GPU here:", err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer device.Close()

	weights, err := cuda.Alloc[float32](device, 1<<20)
	if err != nil {
		log.Fatal(err)
	}
	defer weights.Free()
	grad, err := cuda.Alloc[float32](device, 1<<20)
	if err != nil {
		log.Fatal(err)
	}
	defer grad.Free()
	state := elastic.NewState(w, cuda.Tensor("weights", weights))
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		// … a backward pass writes to grad …
		if err := cuda.AllReduce(ctx, w.Group(), grad, collective.Average); err != nil {
			return err
		}
		// … an optimizer writes to weights …
		return state.Commit()
	})
	if err != nil {
		log.Fatal(err)
	}
}
