package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/hvdrun/hvdrun/tasks"
)

// appends returns its bytes followed by one more.
var appends = tasks.Register[[]byte]("appends/v1", func(_ context.Context, b []byte, one byte) ([]byte, error) {
	return append(b, one), nil
})

// rebuild stores results of this size, and others that are computed from them, on each of the
// hosts. It reads them once its standard input has ended.
func rebuild(ctx context.Context, hosts string, size int) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	var made, more []*tasks.Future[[]byte]
	for i, host := range strings.Split(hosts, ",") {
		here := tasks.Prefer(host)
		first, err := makes.With(here).Submit(ctx, pool, size, byte(i+1))
		if err != nil {
			return err
		}
		second, err := appends.With(here).Submit(ctx, pool, first, byte(100))
		if err != nil {
			return err
		}
		if err := second.Err(ctx); err != nil {
			return err
		}
		made, more = append(made, first), append(more, second)
	}
	fmt.Println("stored on all hosts")
	if _, err := io.Copy(io.Discard, bufio.NewReader(os.Stdin)); err != nil {
		return err
	}
	for i := range made {
		want := bytes.Repeat([]byte{byte(i + 1)}, size)
		got, err := sums.Call(ctx, pool, more[i], made[i])
		if err != nil || got != [2]int{2*size + 1, 2*size*(i+1) + 100} {
			return fmt.Errorf("of the results of host %d: %d, %w", i, got, err)
		}
		if b, err := more[i].Get(ctx); err != nil || !bytes.Equal(b, append(want, 100)) {
			return fmt.Errorf("the second result of host %d: %d bytes, %w", i, len(b), err)
		}
		if b, err := made[i].Get(ctx); err != nil || !bytes.Equal(b, want) {
			return fmt.Errorf("the first result of host %d: %d bytes, %w", i, len(b), err)
		}
	}
	fmt.Println("all right")
	return nil
}
