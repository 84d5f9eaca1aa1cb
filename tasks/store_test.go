package tasks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/follow"
)

// newSafePlace is like newPlace, with workers that provide values for each other.
func newSafePlace(t testing.TB, cfg scheduler.Config) *place {
	t.Helper()
	ca, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Credentials, err = ca.Issue(identity.Subject{Role: identity.Driver}); err != nil {
		t.Fatal(err)
	}
	p := newPlace(t, cfg)
	p.ca, p.creds = ca, cfg.Credentials
	return p
}

var (
	lengths = Register[string]("lengths/v1", func(_ context.Context, all ...[]byte) (string, error) {
		n := 0
		for _, b := range all {
			n += len(b)
		}
		return fmt.Sprint(len(all), " ", n), nil
	})
	made  atomic.Int32
	makes = Register[[]byte]("makes/v1", func(_ context.Context, n int, with byte) ([]byte, error) {
		made.Add(1)
		return bytes.Repeat([]byte{with}, n), nil
	})
	places = Register[string]("places/v1", func(_ context.Context, r Ref[*counted]) (string, error) {
		c, err := r.Get(context.Background())
		return fmt.Sprintf("%p", c), err
	})
	uses = Register[int]("uses/v1", func(_ context.Context, c *counted) (int, error) { return len(c.text), nil })
)

// counted counts how often it is decoded.
type counted struct{ text string }

var decoded atomic.Int32

// MarshalBinary and UnmarshalBinary encode and decode the text.
func (c *counted) MarshalBinary() ([]byte, error) { return []byte(c.text), nil }
func (c *counted) UnmarshalBinary(b []byte) error {
	decoded.Add(1)
	c.text = string(b)
	return nil
}

// sentWith returns how many of a task's arguments were sent with it.
func sentWith[R any](f *Future[R], args int) (inlined int) {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	return args - len(f.spills)
}

// TestArgumentLimits: which arguments are sent with a task and which are stored, to the byte.
func TestArgumentLimits(t *testing.T) {
	const k = 100 << 10
	for _, c := range []struct{ n, size, inlined int }{{1, 0, 1}, {1, k - 1, 1}, {1, k, 1}, {1, k + 1, 0}, {102, k, 102}, {103, k, 102}} {
		p := newSafePlace(t, scheduler.Config{})
		pool := p.connect(ConnectConfig{})
		args := make([]any, c.n)
		for i := range args {
			args[i] = bytes.Repeat([]byte{byte(i)}, c.size)
		}
		f, err := lengths.Submit(t.Context(), pool, args...)
		if err != nil {
			t.Fatal(err)
		}
		if inlined := sentWith(f, c.n); inlined != c.inlined {
			t.Errorf("%d arguments of %d bytes: %d are sent, want %d", c.n, c.size, inlined, c.inlined)
		}
		p.serve(ServeConfig{Host: "a"})
		if got := get(t, f, nil); got != fmt.Sprint(c.n, " ", c.n*c.size) {
			t.Errorf("the function was given %s bytes", got)
		}
	}
}

// TestResultLimits: a result of 102,400 bytes is stored and a smaller one is not; either arrives,
// also as the argument of another task, without passing through the client.
func TestResultLimits(t *testing.T) {
	for _, safe := range []bool{true, false} {
		p := newPlace(t, scheduler.Config{})
		if safe {
			p = newSafePlace(t, scheduler.Config{})
		}
		p.serve(ServeConfig{Host: "a"})
		p.serve(ServeConfig{Host: "b"})
		pool := p.connect(ConnectConfig{})
		for _, size := range []int{0, 1, 102_399, 102_400, 102_401, 3 * transfer.Chunk / 2} {
			f, err := makes.Submit(t.Context(), pool, size, byte(size))
			if err != nil {
				t.Fatal(err)
			}
			g, err := lengths.With(Prefer("b")).Submit(t.Context(), pool, f, f)
			if got := get(t, g, err); got != fmt.Sprint("2 ", 2*size) {
				t.Errorf("size %d: the next function was given %s bytes", size, got)
			}
			if pool.spare != nil {
				t.Errorf("size %d: the client has transferred values", size)
			}
			if stored := f.result.GetSize() > 0; stored != (size >= 102_400) || !stored && f.result.GetInlined() == nil {
				t.Errorf("a result of %d bytes: stored %v", size, stored)
			}
			if got := get(t, f, nil); !bytes.Equal(got, bytes.Repeat([]byte{byte(size)}, size)) {
				t.Errorf("size %d: %d other bytes", size, len(got))
			}
			if c := pool.spare; c != nil {
				pool.spare = nil
				c.Close()
			}
		}
	}
}

// TestRef: a value is stored once; it is decoded once per process for functions that take a Ref,
// and for each task otherwise; and it is removed when it is no longer needed.
func TestRef(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{})
	p.serve(ServeConfig{Host: "a"})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	for _, text := range []string{"", "short", strings.Repeat("long", 1<<20)} {
		r, err := Put(ctx, pool, &counted{text})
		if err != nil {
			t.Fatal(err)
		}
		decoded.Store(0)
		seen := map[string]bool{}
		for range 5 {
			f, err := places.Submit(ctx, pool, r)
			seen[get(t, f, err)] = true
		}
		if n := decoded.Load(); n != 1 || len(seen) != 1 {
			t.Errorf("decoded %d times, to %v", n, seen)
		}
		f, err := uses.Submit(ctx, pool, r)
		if n := get(t, f, err); n != len(text) || decoded.Load() != 2 {
			t.Errorf("%d bytes; decoded %d times", n, decoded.Load())
		}
		if c, err := r.Get(ctx); err != nil || c.text != text {
			t.Errorf("the client reads %d bytes, %v", len(c.text), err)
		}
		r.Release()
		r.Release()
		if _, err := uses.Submit(ctx, pool, r); err == nil || !strings.Contains(err.Error(), "argument 1 is a Ref that was released") {
			t.Errorf("what was released is sent: %v", err)
		}
	}
	p.awaitEmpty(t)
	var nothing Ref[*counted]
	if _, err := places.Submit(ctx, pool, nothing); err == nil || !strings.Contains(err.Error(), "argument 1 is a Ref that refers to no stored value") {
		t.Errorf("%v", err)
	}
	if _, err := places.Submit(ctx, pool, &counted{}); err == nil || !strings.Contains(err.Error(), "argument 1 is a *tasks.counted, not a tasks.Ref[") {
		t.Errorf("%v", err)
	}
	if r, err := Put(ctx, pool, 5); err != nil {
		t.Error(err)
	} else if _, err := places.Submit(ctx, pool, r); err == nil || !strings.Contains(err.Error(), "argument 1 is a Ref of int, not of tasks.Ref[") {
		t.Errorf("%v", err)
	}
}

// awaitEmpty waits until no value is stored.
func (p *place) awaitEmpty(t *testing.T) {
	t.Helper()
	var left []string
	if !follow.Await(t, func() bool {
		left = nil
		runtime.GC()
		for _, pattern := range []string{"[0-9a-f]*", ".new-*"} {
			found, _ := filepath.Glob(filepath.Join(p.root, "*", "*", "*", pattern))
			left = append(left, found...)
		}
		return len(left) == 0
	}) {
		t.Errorf("%d values are left: %s", len(left), left[0])
	}
}

// TestStoredResultsAreDropped: stored results are removed when their futures are garbage.
func TestStoredResultsAreDropped(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{})
	p.serve(ServeConfig{Host: "a"})
	p.serve(ServeConfig{Host: "b"})
	pool := p.connect(ConnectConfig{})
	for i := range 20 {
		f, err := makes.Submit(t.Context(), pool, 200_000+i, byte(7))
		if err != nil {
			t.Fatal(err)
		}
		g, err := lengths.Submit(t.Context(), pool, f, make([]byte, 300_000))
		get(t, g, err)
		if i%2 == 0 {
			get(t, f, nil)
		}
	}
	p.awaitEmpty(t)
}

// TestLostHost: results that were stored on a lost host are computed again, for tasks and for the
// client; a value that was put is stored beside the scheduler.
func TestLostHost(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{WorkerGrace: time.Millisecond})
	leave := p.serve(ServeConfig{Host: "a"})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	made.Store(0)
	f, err := makes.Submit(ctx, pool, 300_000, byte(1))
	if err == nil {
		err = f.Err(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	g, err := makes.Submit(ctx, pool, 400_000, byte(2))
	if err == nil {
		err = g.Err(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	leave()
	p.serve(ServeConfig{Host: "b"})
	h, err := lengths.Submit(ctx, pool, f)
	if got := get(t, h, err); got != "1 300000" || made.Load() != 3 {
		t.Errorf("%s, after %d calls", got, made.Load())
	}
	if got := get(t, g, nil); len(got) != 400_000 || made.Load() != 4 {
		t.Errorf("%d bytes, after %d calls", len(got), made.Load())
	}
}

// TestUnreachableHost: if the scheduler cannot fetch results that are stored at a worker, the log
// says so once, and Get does not wait longer than the client's patience.
func TestUnreachableHost(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	p := newSafePlace(t, scheduler.Config{Log: log})
	stranger, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	p.ca = stranger // of the worker: the scheduler does not trust it
	p.serve(ServeConfig{Host: "a"})
	pool := p.connect(ConnectConfig{Patience: time.Nanosecond})
	f, err := makes.Submit(t.Context(), pool, 200_000, byte(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var far *transfer.UnreachableError
		if _, err := f.Get(t.Context()); !errors.As(err, &far) {
			t.Errorf("the error is %v", err)
		}
	}
	if told := hook.AllEntries(); len(told) != 1 || !strings.Contains(told[0].Message, "stored on a cannot be fetched") {
		t.Errorf("the log has %v", told)
	}
}

// opens returns once its gate is open.
var (
	gates = [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	opens = Register[int]("opens/v1", func(ctx context.Context, gate int) (int, error) {
		select {
		case <-gates[gate]:
			return gate + 1, nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	})
)

// TestNothingWritten: a scheduler that has reported results, but recorded none of them, ends. From
// what the client repeats, the next scheduler computes stored results, and results that other tasks
// need, again.
func TestNothingWritten(t *testing.T) {
	unwritten := scheduler.Config{Repeated: true}
	p := newSafePlace(t, unwritten)
	p.serve(ServeConfig{Host: "a"})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	gates = [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	gated := opens.With(CPU(0.1))
	first, err := gated.Submit(ctx, pool, 0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := gated.Submit(ctx, pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	through, err := sum.With(CPU(0.1)).Submit(ctx, pool, first)
	if err != nil {
		t.Fatal(err)
	}
	both, err := sum.With(CPU(0.1)).Submit(ctx, pool, through, second)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := makes.With(CPU(0.1)).Submit(ctx, pool, 300_000, byte(1))
	if err == nil {
		err = stored.Err(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	close(gates[0])
	if n := get(t, through, nil); n != 1 {
		t.Errorf("%d", n)
	}
	unwritten.Credentials = p.creds
	p.replace(unwritten)
	close(gates[1])
	if n := get(t, both, nil); n != 3 {
		t.Errorf("%d", n)
	}
	if b := get(t, stored, nil); len(b) != 300_000 || b[0] != 1 {
		t.Errorf("%d bytes", len(b))
	}
}

// TestManySources: a large value that several hosts have is fetched from all of them, and is
// correct even if one of them has other bytes under its name.
func TestManySources(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{})
	pool := p.connect(ConnectConfig{})
	chunks := 16
	if testing.Short() {
		chunks = 4
	}
	value := bytes.Repeat([]byte("0123456789abcdef"), chunks*transfer.Chunk/16)
	r, err := Put(t.Context(), pool, value)
	if err != nil {
		t.Fatal(err)
	}
	for i, host := range []string{"a", "b", "c", "d"} {
		p.serve(ServeConfig{Host: host})
		awaitWorkers(t, pool, i+1)
		if host == "c" { // b's copy is damaged
			store, err := blob.Open(blob.Config{Root: p.root, Run: "run", Host: "b"})
			if err != nil {
				t.Fatal(err)
			}
			f, _, err := store.Open(r.ref.id)
			if err != nil {
				t.Fatal(err)
			}
			w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.WriteAt([]byte("X"), int64(i)*1000)
			if err = errors.Join(err, w.Close(), f.Close(), store.Close()); err != nil {
				t.Fatal(err)
			}
		}
		all, err := RunAll(t.Context(), pool, lengths, r)
		for _, got := range all {
			if got != fmt.Sprint("1 ", len(value)) {
				t.Fatalf("host %s: %s", host, got)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if got, err := r.Get(t.Context()); err != nil || !bytes.Equal(got, value) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// awaitWorkers waits until n workers have joined.
func awaitWorkers(t *testing.T, pool *Pool, n int) {
	t.Helper()
	if !follow.Await(t, func() bool {
		s, err := pool.Status(t.Context())
		return err == nil && len(s.Workers) == n
	}) {
		t.Fatalf("there are not %d workers", n)
	}
}

// TestFullStores: a value that does not fit is refused with one clear error, whichever store is
// full.
func TestFullStores(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{Store: blob.Config{Most: 1 << 20}})
	p.serve(ServeConfig{Host: "a", StoreBytes: 500_000})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	if _, err := Put(ctx, pool, make([]byte, 1<<20)); !errors.Is(err, ErrStoreFull) ||
		!strings.Contains(err.Error(), "0 of at most 1048576 bytes are taken, and 1048577 more are needed") {
		t.Errorf("Put: %v", err)
	}
	if _, err := lengths.Submit(ctx, pool, make([]byte, 2<<20)); !errors.Is(err, ErrStoreFull) {
		t.Errorf("Submit: %v", err)
	}
	if _, err := makes.Call(ctx, pool, 600_000, byte(1)); err == nil || !strings.Contains(err.Error(), "the result cannot be stored: blob: the store is full") {
		t.Errorf("a result: %v", err)
	}
	if _, err := lengths.Call(ctx, pool, make([]byte, 700_000)); err == nil || !strings.Contains(err.Error(), "argument 1: blob: the store is full") {
		t.Errorf("an argument: %v", err)
	}
	if n, err := makes.Call(ctx, pool, 400_000, byte(1)); err != nil || len(n) != 400_000 {
		t.Errorf("and then: %v", err)
	}
}

// TestFullDisk: if other programs have filled the memory, the error is the same as for a full
// store; earlier values remain, and there is room once the memory is free again.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a file system that is filled")
	}
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=32m"); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(disk, unix.MNT_DETACH) })
	p := newSafePlace(t, scheduler.Config{Store: blob.Config{Root: disk, Most: 1 << 30}})
	p.serve(ServeConfig{Host: "a", StoreBytes: 1 << 30})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	first, err := Put(ctx, pool, bytes.Repeat([]byte{7}, 5<<20))
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 10<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	large := make([]byte, 26<<20)
	if _, err := Put(ctx, pool, large); !errors.Is(err, ErrStoreFull) || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("Put: %v", err)
	}
	if _, err := makes.Call(ctx, pool, 26<<20, byte(1)); err == nil || !strings.Contains(err.Error(), "the result cannot be stored: blob: the store is full") {
		t.Errorf("a result: %v", err)
	}
	if n, err := lengths.Call(ctx, pool, first); err != nil || n != fmt.Sprint(1, " ", 5<<20) {
		t.Errorf("what was stored before: %s, %v", n, err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if _, err := Put(ctx, pool, large[:15<<20]); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// TestManyResults: arguments that are results, of more than 10 MiB together, arrive.
func TestManyResults(t *testing.T) {
	p := newSafePlace(t, scheduler.Config{})
	pool := p.connect(ConnectConfig{})
	var args []any
	for i := range 150 {
		f, err := makes.Submit(t.Context(), pool, 102_000+i, byte(i))
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, f)
	}
	f, err := lengths.Submit(t.Context(), pool, args...)
	if err != nil {
		t.Fatal(err)
	}
	p.serve(ServeConfig{Host: "a"})
	if got := get(t, f, nil); got != fmt.Sprint("150 ", 150*102_000+149*75) {
		t.Errorf("the function was given %s bytes", got)
	}
	g, err := lengths.Submit(t.Context(), pool, args...) // this time from the client, which has the results now
	if got := get(t, g, err); got != fmt.Sprint("150 ", 150*102_000+149*75) {
		t.Errorf("the function was given %s bytes", got)
	}
}
