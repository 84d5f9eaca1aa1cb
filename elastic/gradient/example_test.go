package gradient_test

import (
	"context"
	"fmt"
	"log"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/gradient"
)

// A model of two layers, whose gradients are averaged while the backward pass is running.
func Example() {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()

	grads := gradient.NewAverager[float32](w, gradient.Options{Passes: 2}, 3, 1) // lengths of the layers
	for range 4 {
		averaged, err := grads.Pass(ctx, func() error {
			for layer := 1; layer >= 0; layer-- {
				for i := range grads.Tensor(layer) {
					grads.Tensor(layer)[i] += float32(layer + 1)
				}
				grads.Ready(layer)
			}
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
		if averaged { // the optimizer's step
			fmt.Println(grads.Tensor(0), grads.Tensor(1))
		}
	}
	// Output:
	// [1 1 1] [2]
	// [1 1 1] [2]
}
