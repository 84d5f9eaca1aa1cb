// Command tasker runs tasks, or submits them, for tests:
//
//	hvdrun -np 4 tasker
//	hvdrun tasks run tasker -submit 10000 -lasts 1ms
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/test/square"
)

var makes = tasks.Register[[]byte]("makes/v1", func(_ context.Context, n int, with byte) ([]byte, error) {
	return bytes.Repeat([]byte{with}, n), nil
})

// sums returns the number and the sum of the bytes that it gets.
var sums = tasks.Register[[2]int]("sums/v1", func(_ context.Context, all ...[]byte) (r [2]int, _ error) {
	for _, b := range all {
		r[0] += len(b)
		for _, c := range b {
			r[1] += int(c)
		}
	}
	return r, nil
})

var kills = tasks.Register[tasks.None]("kills/v1", func(_ context.Context, exits bool) error {
	if exits {
		os.Exit(0)
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
})

// deaf ignores its context.
var deaf = tasks.Register[tasks.None]("deaf/v1", func(context.Context) error {
	time.Sleep(10 * time.Minute)
	return nil
})

func main() {
	n := flag.Int("submit", 0, "submit so many tasks, and wait for their results")
	lasts := flag.Duration("lasts", 0, "how long each of them takes")
	calls := flag.Int("calls", 0, "submit so many more, each after the result of the one before")
	endless := flag.Bool("endless", false, "submit them again and again until SIGTERM, and print how many there were")
	size := flag.Int("size", -1, "make results of so many bytes, which are arguments of others, and put such a value")
	rounds := flag.Int("rounds", 1, "of those")
	poison := flag.Int("poison", 0, "submit so many tasks, one after another, that kill their workers or have them exit with status 0")
	blackHoles := flag.Int("deaf", 0, "submit so many tasks whose time is up after 300 ms, and whose functions do not end")
	modelled := flag.Int("model", 0, "submit so many tasks that depend on each other, fail and are cancelled, and compare what becomes of them with a model")
	seed := flag.Uint64("seed", 1, "of the dice of -model")
	put := flag.Int("put", 0, "put a value of so many bytes, read it in a task, and print how long both took")
	across := flag.String("across", "", "have results of -size bytes stored on each of these `HOSTS` (a,b), and read them once standard input has ended")
	byGRPC := flag.Int("grpc", 0, "call so often by gRPC, through another process, and print how long it took; no job takes part")
	server := flag.String("grpc-server", "", "be a server of those calls, which asks the one at an `ADDRESS`, or is the last")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := error(nil)
	switch {
	case *server != "":
		err = serveGRPC(ctx, *server)
	case *byGRPC > 0:
		err = callByGRPC(ctx, *byGRPC)
	case *endless:
		err = forever(ctx, *n, *lasts)
	case *put > 0:
		err = putOne(ctx, *put)
	case *across != "":
		err, *rounds = rebuild(ctx, *across, *size), 0
	case *modelled > 0:
		err = model(ctx, *modelled, *seed, *lasts)
	default:
		err = run(ctx, *n, *calls, *lasts, *size, *poison, *blackHoles)
	}
	for i := 0; err == nil && *size >= 0 && i < *rounds; i++ {
		err = values(ctx, *size, byte(i+1))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tasker:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, n, calls int, lasts time.Duration, size, poison, blackHoles int) error {
	if n == 0 && calls == 0 && size < 0 && poison == 0 && blackHoles == 0 {
		return tasks.Serve(ctx, tasks.ServeConfig{})
	}
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	var late []*tasks.Future[tasks.None]
	for range blackHoles {
		f, err := deaf.With(tasks.TimeLimit(300*time.Millisecond)).Submit(ctx, pool)
		if err != nil {
			return err
		}
		late = append(late, f)
	}
	for _, f := range late {
		if err := f.Err(ctx); !errors.Is(err, tasks.ErrTimeLimit) {
			return fmt.Errorf("a task that does not end has become %w", err)
		}
	}
	for i := range poison {
		if _, err := kills.Call(ctx, pool, i%2 == 0); !errors.Is(err, tasks.ErrPoison) {
			return fmt.Errorf("a task that ends its workers has become %w", err)
		}
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
		if got, err := square.Task.Call(ctx, pool, i, lasts); err != nil || got != i*i {
			return fmt.Errorf("call %d: %d, %w", i, got, err)
		}
	}
	if took := time.Since(began); calls > 0 {
		fmt.Printf("%d calls, %v each\n", calls, took/time.Duration(calls))
	}
	return nil
}

// forever submits tasks until ctx ends.
func forever(ctx context.Context, n int, lasts time.Duration) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	done := 0
	for ctx.Err() == nil {
		if err := submit(ctx, pool, n, lasts); err != nil && ctx.Err() == nil {
			return err
		} else if err == nil {
			done += n
		}
	}
	fmt.Printf("%d tasks\n", done)
	return nil
}

// submit submits tasks, and checks that each result arrives once and is right.
func submit(ctx context.Context, pool *tasks.Pool, n int, lasts time.Duration) error {
	futures := make([]*tasks.Future[int], n)
	index := make(map[*tasks.Future[int]]int, n)
	for i := range futures {
		f, err := square.Task.Submit(ctx, pool, i, lasts)
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

var measures = tasks.Register[int]("measures/v1", func(ctx context.Context, b tasks.Ref[[]byte]) (int, error) {
	all, err := b.Get(ctx)
	return len(all), err
})

// putOne stores a value with Put, and runs a task that reads it.
func putOne(ctx context.Context, size int) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	value := bytes.Repeat([]byte{1, 2, 3, 4}, size/4)
	began := time.Now()
	ref, err := tasks.Put(ctx, pool, value)
	if err != nil {
		return err
	}
	fmt.Printf("put after %v\n", time.Since(began).Round(time.Millisecond))
	for range 2 {
		began = time.Now()
		if n, err := measures.Call(ctx, pool, ref); err != nil || n != len(value) {
			return fmt.Errorf("a task got %d bytes, %w", n, err)
		}
		fmt.Printf("read by a task after %v\n", time.Since(began).Round(time.Millisecond))
	}
	return nil
}

// values passes a result and a value of the client to functions, and checks their results.
func values(ctx context.Context, size int, with byte) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	began := time.Now()
	made, err := makes.Submit(ctx, pool, size, with)
	if err != nil {
		return err
	}
	if err := made.Err(ctx); err != nil {
		return err
	}
	fmt.Printf("made after %v\n", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	got, err := sums.Call(ctx, pool, made)
	if err != nil || got != [2]int{size, size * int(with)} {
		return fmt.Errorf("of a result: %d, %w", got, err)
	}
	fmt.Printf("summed after %v\n", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	put, err := tasks.Put(ctx, pool, bytes.Repeat([]byte{with}, size))
	if err != nil {
		return err
	}
	fmt.Printf("put after %v\n", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	if got, err = sums.Call(ctx, pool, put, made); err != nil || got != [2]int{2 * size, 2 * size * int(with)} {
		return fmt.Errorf("of a value that was put: %d, %w", got, err)
	}
	fmt.Printf("summed after %v\n", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	all, err := made.Get(ctx)
	if err != nil || len(all) != size || size > 0 && (all[0] != with || all[size-1] != with) {
		return fmt.Errorf("%d bytes came, %w", len(all), err)
	}
	fmt.Printf("read after %v\n", time.Since(began).Round(time.Millisecond))
	return nil
}
