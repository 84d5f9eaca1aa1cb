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

var _ = square.Task // registers the task

// serveTasks runs tasks while the worker is not in a world. The caller must call wait, which
// returns when no task runs any more.
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
