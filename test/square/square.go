// Package square has a task that several testbeds run or submit.
package square

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
)

// Task waits for a time, or computes for that time if it is negative, and returns the square of a
// number.
var Task = tasks.Register[int]("square/v1", func(ctx context.Context, n int, lasts time.Duration) (int, error) {
	switch {
	case lasts > 0:
		select {
		case <-time.After(lasts):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	case lasts < 0:
		for began := time.Now(); time.Since(began) < -lasts; {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
		}
	}
	return n * n, nil
})
