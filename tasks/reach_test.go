package tasks

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// TestReach: a client keeps trying to reach a scheduler that may come back.
func TestReach(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
	absent := &net.OpError{Op: "dial", Net: "unix", Err: syscall.ENOENT}
	for _, c := range []struct {
		name  string
		err   error // of all attempts but the last
		tries int   // 0: all attempts fail
		want  error
		least time.Duration
		most  time.Duration
	}{
		{"a job that is resumed", refused, 100, nil, 4 * time.Second, 6 * time.Second},
		{"a job whose agent holds no driver", io.EOF, 100, nil, 4 * time.Second, 6 * time.Second},
		{"a driver that does not come back", refused, 0, syscall.ECONNREFUSED, time.Minute, 61 * time.Second},
		{"a job that begins", absent, 20, nil, 0, 2 * time.Second},
		{"a job that is over", absent, 0, ErrNoJob, 2 * time.Second, 3 * time.Second},
		{"a scheduler that refuses", refusedError{"no"}, 0, refusedError{"no"}, 0, 0},
		{"a stranger", &net.OpError{Op: "remote error", Err: errors.New("bad certificate")}, 0, nil, 0, 0},
		{"to a stranger", &tls.CertificateVerificationError{Err: errors.New("not of the job")}, 0, nil, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, n := time.Now(), 0
				_, err := reach(t.Context(), time.Minute, quiet(), true, func(context.Context) (*session, error) {
					if n++; n == c.tries {
						return nil, nil
					}
					return nil, fmt.Errorf("tasks: connecting: %w", c.err)
				})
				if took := time.Since(began); took < c.least || took > c.most {
					t.Errorf("it took %v", took)
				}
				if c.tries > 0 && err != nil || c.tries == 0 && (err == nil || c.want != nil && !errors.Is(err, c.want)) {
					t.Errorf("the error is %v", err)
				}
				if is := errors.Is(err, fs.ErrNotExist); is != (errors.Is(c.err, fs.ErrNotExist) && c.tries == 0) {
					t.Errorf("the error is %v", err)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := reach(ctx, time.Minute, quiet(), true, func(context.Context) (*session, error) { return nil, refused })
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("where the caller does not wait, the error is %v", err)
		}
	})
}

// TestEndWhileReaching: if the context ends while a connection is being made, the connection ends
// like any other.
func TestEndWhileReaching(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	connect := func() *session {
		near, far := net.Pipe()
		far.Close()
		return &session{conn: near, r: link.NewReader(near)}
	}
	ends := 0
	err := hearAll(ctx, connect(), 0, quiet(), func(context.Context) (*session, error) {
		cancel()
		return connect(), nil
	}, nil, func() bool { ends++; return true })
	if err != nil || ends != 2 {
		t.Errorf("%v; %d of 2 connections have ended", err, ends)
	}
}

// TestBeginWithoutScheduler: a client and a worker that start before the scheduler connect to it
// once it is there.
func TestBeginWithoutScheduler(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	tries := make(chan struct{}, 4)
	dial := func(ctx context.Context) (net.Conn, error) {
		select {
		case tries <- struct{}{}:
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		default:
			return p.dial(ctx)
		}
	}
	p.serve(ServeConfig{})
	pool, err := Connect(t.Context(), ConnectConfig{Dial: dial, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if n, err := double.Call(t.Context(), pool, 4); n != 8 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}
