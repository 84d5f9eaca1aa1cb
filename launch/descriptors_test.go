package launch_test

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/launch"
)

// limitDescriptors allows this process more open files than it has now, up to the given number,
// until restore is called.
func limitDescriptors(t *testing.T, more int) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	now := before
	now.Cur = uint64(len(open) - 1 + more) // one of them was that of /proc/self/fd
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	}
}

// TestFewDescriptors: whichever descriptor a start lacks, its error names the limit and how to
// raise it. Many workers can start at the same time if there are 5 descriptors for each and those
// of one more start.
func TestFewDescriptors(t *testing.T) {
	spec := func(ctx context.Context) *launch.Spec {
		return &launch.Spec{
			Incarnation: "i", Command: []string{"/bin/sleep", "1000"}, Env: os.Environ(),
			Talk: func(context.Context, int, net.Conn) func() { <-ctx.Done(); return nil },
		}
	}
	failed := 0
	for more := 0; ; more++ {
		ctx, stop := context.WithCancel(t.Context())
		restore := limitDescriptors(t, more)
		err := launch.Local{}.Run(ctx, spec(ctx), func(int) { stop() })
		restore()
		stop()
		var start *launch.StartError
		if !errors.As(err, &start) {
			break
		}
		failed++
		if text := err.Error(); !errors.Is(err, unix.EMFILE) || strings.Count(text, "ulimit -n") != 1 || !strings.Contains(text, "needs 5 for each worker") {
			t.Errorf("with %d descriptors: %v", more, err)
		}
	}
	if failed < 5 || failed > 12 {
		t.Errorf("a start needs %d descriptors", failed)
	}

	const workers = 24
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var started, ended sync.WaitGroup
	started.Add(workers)
	restore := limitDescriptors(t, 5*workers+failed)
	for range workers {
		ended.Go(func() {
			done := sync.OnceFunc(started.Done)
			defer done()
			if err := (launch.Local{}).Run(ctx, spec(ctx), func(int) { done() }); errors.Is(err, unix.EMFILE) {
				t.Error(err)
			}
		})
	}
	started.Wait()
	stop()
	ended.Wait()
	restore()
}
