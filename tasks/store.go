package tasks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
)

// holdings is what a client knows about stored values.
type holdings struct {
	puts  map[blob.ID]*holding // values that it needs
	spare *transfer.Client     // an idle connection for values; nil: none
}

// takeSpare returns the idle connection, which the caller then owns; nil: no connection is idle.
func (h *holdings) takeSpare() *transfer.Client {
	c := h.spare
	h.spare = nil
	return c
}

// dialValues returns a connection that carries values to and from the scheduler.
func dialValues(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	conn, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	b, err := link.Frame(nil, &taskspb.ToTasks{Transfer: true})
	if err == nil {
		_, err = conn.Write(b)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// withValues calls use with a connection that carries values. It repeats the call after an error,
// unless the error concerns the value, ctx ends, or Patience has passed.
func (p *Pool) withValues(ctx context.Context, use func(*transfer.Client) error) error {
	missed := 0 // number of the connection on which the value was missing
	for since := time.Now(); ; {
		c, err := p.values(ctx)
		if err == nil {
			if err = use(c); err == nil {
				p.keepValues(c)
				return nil
			}
			_ = c.Close()
		}
		var refused *transfer.RefusedError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &refused):
			return storeError(refused.Text)
		case errors.Is(err, blob.ErrMissing) && p.settled(&missed):
			return fmt.Errorf("%w: no host has it", ErrGone)
		case errors.Is(err, transfer.ErrLater):
			since = time.Now() // the scheduler is reachable, and has learned more
		case time.Since(since) > p.cfg.Patience:
			return fmt.Errorf("tasks: the stored value could not be transferred: %w", err)
		}
		p.mu.Lock()
		failed := p.failed
		p.mu.Unlock()
		if failed != nil {
			return failed
		}
		select {
		case <-time.After(reachEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// settled reports whether the value is definitely missing: the scheduler knows everything that this
// client had to repeat, and has lacked the value before on the same connection. A new scheduler
// must first learn of the tasks that make the value.
func (p *Pool) settled(missed *int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := *missed
	connect, all := p.current()
	*missed = connect
	return p.link != nil && all && before == connect
}

// storeError returns the error for a store's refusal.
func storeError(text string) error {
	if rest, ok := strings.CutPrefix(text, blob.ErrFull.Error()); ok {
		return fmt.Errorf("%w%s", ErrStoreFull, rest)
	}
	return errors.New("tasks: " + text)
}

// values returns a connection that carries values: the idle one, or a new one.
func (p *Pool) values(ctx context.Context) (*transfer.Client, error) {
	p.mu.Lock()
	c := p.takeSpare()
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	conn, err := dialValues(ctx, p.cfg.Dial)
	if err != nil {
		return nil, err
	}
	return transfer.NewClient(conn), nil
}

func (p *Pool) keepValues(c *transfer.Client) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.spare == nil && p.failed == nil {
		p.spare = c
		return
	}
	_ = c.Close()
}

// bring stores a value beside the scheduler.
func (p *Pool) bring(ctx context.Context, parts [][]byte) (id blob.ID, err error) {
	err = p.withValues(ctx, func(c *transfer.Client) error {
		id, err = c.Put(ctx, parts...)
		return err
	})
	return id, err
}

// fetch returns the bytes of a stored value.
func (p *Pool) fetch(ctx context.Context, id blob.ID, size int64) (b []byte, err error) {
	if size > transfer.MaxSize {
		return nil, fmt.Errorf("tasks: a stored value cannot have %d bytes", size)
	}
	err = p.withValues(ctx, func(c *transfer.Client) error {
		b, err = c.ReadAll(ctx, id, size)
		return err
	})
	return b, err
}
