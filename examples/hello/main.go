// Hello is a minimal job: every rank adds its rank to a sum and prints it.
package main

import (
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
)

func main() {
	elastic.Main(hello)
}

func hello(ctx context.Context) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	return elastic.Run(ctx, elastic.NewState(w), func(ctx context.Context) error {
		sum := []int64{int64(w.Rank())}
		if err := collective.AllReduce(ctx, w.Group(), sum, collective.Sum); err != nil {
			return err
		}
		fmt.Printf("hello from rank %d of %d on host %s; the sum of the ranks is %d\n", w.Rank(), w.Size(), w.Host(), sum[0])
		return nil
	})
}
