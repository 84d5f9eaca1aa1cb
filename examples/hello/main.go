// Hello is the smallest job: every rank adds its number to a sum and says where it is.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
)

func main() {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	err = elastic.Run(ctx, elastic.NewState(w), func(ctx context.Context) error {
		sum := []int64{int64(w.Rank())}
		if err := collective.AllReduce(ctx, w.Group(), sum, collective.Sum); err != nil {
			return err
		}
		fmt.Printf("hello from rank %d of %d on host %s; our ranks add up to %d\n", w.Rank(), w.Size(), w.Host(), sum[0])
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
