package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/test/square"
)

var _ = square.Task // which registers it

// serveTasks runs tasks while the worker has no place in a world. The function that it returns
// waits until it does so no more.
func serveTasks(ctx context.Context) (wait func()) {
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := tasks.Serve(ctx, tasks.ServeConfig{Grace: time.Millisecond}); err != nil {
			fmt.Fprintln(os.Stderr, "trainer: tasks:", err)
		}
	})
	return func() {
		cancel()
		serving.Wait()
	}
}
