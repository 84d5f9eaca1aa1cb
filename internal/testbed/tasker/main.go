// Command tasker runs tasks, or submits them, for tests:
//
//	hvdrun -np 4 tasker
//	hvdrun tasks run tasker -submit 10000 -lasts 1ms
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
)

var square = tasks.Register[int]("square/v1", func(ctx context.Context, n int, lasts time.Duration) (int, error) {
	if lasts > 0 {
		select {
		case <-time.After(lasts):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return n * n, nil
})

var kills = tasks.Register[tasks.None]("kills/v1", func(context.Context) error {
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
})

func main() {
	n := flag.Int("submit", 0, "submit so many tasks, and wait for their results")
	lasts := flag.Duration("lasts", 0, "how long each of them takes")
	calls := flag.Int("calls", 0, "submit so many more, each after the result of the one before")
	poison := flag.Bool("poison", false, "submit a task that kills its worker")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *n, *calls, *lasts, *poison); err != nil {
		fmt.Fprintln(os.Stderr, "tasker:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, n, calls int, lasts time.Duration, poison bool) error {
	if n == 0 && calls == 0 && !poison {
		return tasks.Serve(ctx, tasks.ServeConfig{})
	}
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	if poison {
		_, err := kills.Call(ctx, pool)
		fmt.Println("poison:", err)
	}
	began := time.Now()
	if err := submit(ctx, pool, n, lasts); err != nil {
		return err
	}
	if took := time.Since(began); n > 0 {
		fmt.Printf("%d right, %.0f tasks/s\n", n, float64(n)/took.Seconds())
	}
	began = time.Now()
	for i := range calls {
		if got, err := square.Call(ctx, pool, i, lasts); err != nil || got != i*i {
			return fmt.Errorf("call %d: %d, %w", i, got, err)
		}
	}
	if took := time.Since(began); calls > 0 {
		fmt.Printf("%d calls, %v each\n", calls, took/time.Duration(calls))
	}
	return nil
}

// submit submits tasks, and checks that each result comes, once, and is right.
func submit(ctx context.Context, pool *tasks.Pool, n int, lasts time.Duration) error {
	futures := make([]*tasks.Future[int], n)
	index := make(map[*tasks.Future[int]]int, n)
	for i := range futures {
		f, err := square.Submit(ctx, pool, i, lasts)
		if err != nil {
			return err
		}
		futures[i], index[f] = f, i
	}
	left := n
	for f, err := range tasks.AsCompleted(ctx, futures) {
		if err != nil {
			return err
		}
		i, wanted := index[f]
		if got, err := f.Get(ctx); err != nil || got != i*i || !wanted {
			return fmt.Errorf("task %d: %d, %w", i, got, err)
		}
		delete(index, f)
		if left--; left%1000 == 0 {
			fmt.Printf("%d left\n", left)
		}
	}
	if left != 0 {
		return fmt.Errorf("%d tasks without a result", left)
	}
	return nil
}
