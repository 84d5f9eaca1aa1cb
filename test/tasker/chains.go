package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
)

// failsLate fails after a time, with an error of at least this number of bytes.
var failsLate = tasks.Register[int]("failslate/v1", func(ctx context.Context, after time.Duration, bytes int) (int, error) {
	select {
	case <-time.After(after):
	case <-ctx.Done():
	}
	return 0, errors.New("it fails: " + strings.Repeat("x", bytes))
})

var increments = tasks.Register[int]("increments/v1", func(_ context.Context, n int) (int, error) { return n + 1, nil })

// nests submits itself with a depth that is one less, and waits for the result.
var nests *tasks.Func[int]

func init() {
	nests = tasks.Register[int]("nests/v1", func(ctx context.Context, deep int) (int, error) {
		if deep == 0 {
			return 1, nil
		}
		pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
		if err != nil {
			return 0, err
		}
		defer pool.Close()
		n, err := nests.Call(ctx, pool, deep-1)
		return n + 1, err
	})
}

// nest submits a task that waits for a task, and so on, to this depth.
func nest(ctx context.Context, deep int) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	n, err := nests.Call(ctx, pool, deep)
	if err != nil || n != deep+1 {
		return fmt.Errorf("nested calls: %d, %w", n, err)
	}
	fmt.Printf("%d nested calls\n", n)
	return nil
}

// chain submits a task that fails after a time, followed by n tasks, each of which takes the result
// of the one before. It prints how long their errors take to arrive after the failure.
func chain(ctx context.Context, n, bytes int, after time.Duration) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	began := time.Now()
	root, err := failsLate.Submit(ctx, pool, after, bytes)
	if err != nil {
		return err
	}
	all := []*tasks.Future[int]{root}
	for range n {
		f, err := increments.Submit(ctx, pool, all[len(all)-1])
		if err != nil {
			return err
		}
		all = append(all, f)
	}
	fmt.Printf("%d submitted after %v\n", n, time.Since(began).Round(time.Millisecond))
	var failed *tasks.FunctionError
	if err := root.Err(ctx); !errors.As(err, &failed) {
		return fmt.Errorf("the first task has become %w", err)
	}
	fmt.Printf("the first one failed after %v, with %d bytes of text: …%s\n", time.Since(began).Round(time.Millisecond), len(failed.Text), failed.Text[len(failed.Text)-20:])
	began = time.Now()
	text := ""
	for i, f := range all[1:] {
		var depends *tasks.DependencyError
		if err := f.Err(ctx); !errors.As(err, &depends) || text != "" && depends.Text != text {
			return fmt.Errorf("task %d behind it has become %w", i, err)
		}
		text = depends.Text
	}
	fmt.Printf("%d errors after %v: %.80s\n", n, time.Since(began).Round(time.Millisecond), text)
	return nil
}
