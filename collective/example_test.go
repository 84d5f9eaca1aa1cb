package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
)

// ranks calls f on each of n ranks of one process, with the groups of Local, which are for tests.
// In a job, elastic.Worker has the group.
func ranks(n int, f func(g *collective.Group)) {
	var running sync.WaitGroup
	for _, g := range collective.Local(n) {
		running.Go(func() {
			defer g.Close()
			f(g)
		})
	}
	running.Wait()
}

func ExampleAllReduce() {
	ranks(3, func(g *collective.Group) {
		data := []float32{float32(g.Rank()), 1}
		if err := collective.AllReduce(context.Background(), g, data, collective.Sum); err != nil {
			fmt.Println(err)
		}
		if g.Rank() == 0 {
			fmt.Println(data)
		}
	})
	// Output: [3 3]
}

// Operations in the background can be submitted in a different order on every rank.
func ExampleAllReduceAsync() {
	ctx := context.Background()
	ranks(2, func(g *collective.Group) {
		names := []string{"bias", "weights"}
		if g.Rank() == 1 {
			names = []string{"weights", "bias"}
		}
		data, handles := make(map[string][]float64), make(map[string]*collective.Handle)
		for _, name := range names {
			data[name] = []float64{float64(len(name))}
			handles[name] = collective.AllReduceAsync(ctx, g, name, data[name], collective.Average)
		}
		for _, name := range names {
			if err := handles[name].Wait(); err != nil {
				fmt.Println(err)
			}
		}
		if g.Rank() == 0 {
			fmt.Println(data["bias"], data["weights"])
		}
	})
	// Output: [4] [7]
}

// Ranks can gather slices of different lengths.
func ExampleAllGather() {
	ranks(2, func(g *collective.Group) {
		all, err := collective.AllGather(context.Background(), g, make([]int8, 1+g.Rank()))
		if g.Rank() == 0 {
			fmt.Println(all, err)
		}
	})
	// Output: [[0] [0 0]] <nil>
}

// The loss of a rank ends the operations of all others.
func ExampleErrAborted() {
	ranks(2, func(g *collective.Group) {
		if g.Rank() == 1 {
			return // and leaves
		}
		err := collective.Barrier(context.Background(), g)
		fmt.Println(errors.Is(err, collective.ErrAborted))
	})
	// Output: true
}
