package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/internal/testbed/square"
	"github.com/hvdrun/hvdrun/tasks"
)

var _ = square.Task // which registers it

// serveTasks runs tasks while the worker is a spare. The function that it returns waits until it
// does so no more.
func serveTasks(ctx context.Context, w *elastic.Worker) (wait func()) {
	spare, cancel := w.WhileSpare(ctx)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := tasks.Serve(spare, tasks.ServeConfig{Grace: time.Millisecond}); err != nil {
			fmt.Fprintln(os.Stderr, "trainer: tasks:", err)
		}
	})
	return func() {
		cancel()
		serving.Wait()
	}
}
