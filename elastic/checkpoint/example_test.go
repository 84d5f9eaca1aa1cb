package checkpoint_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
)

// Another program reads what a training program has written.
func ExampleOpen() {
	dir, err := os.MkdirTemp("", "checkpoints-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := train(dir); err != nil {
		log.Fatal(err)
	}

	commits, err := checkpoint.List(dir)
	if err != nil {
		log.Fatal(err)
	}
	file, err := checkpoint.Open(checkpoint.Path(dir, commits[0]))
	if err != nil {
		log.Fatal(err)
	}
	for _, part := range file.About.Parts {
		fmt.Println(part.Name)
	}
	fmt.Println("commit", file.About.Commits, "of", file.About.Size, "workers")
	// Output:
	// step
	// weights
	// commit 3 of 1 workers
}

// train makes three commits.
func train(dir string) error {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	weights, step := make([]float32, 2), 0
	state := elastic.NewState(w, elastic.Checkpoint(dir), elastic.Value("step", &step), elastic.Tensor("weights", weights))
	return elastic.Run(ctx, state, func(context.Context) error {
		for step < 3 {
			step++
			weights[0] += 0.5
			if err := state.Commit(); err != nil {
				return err
			}
		}
		return nil
	})
}
