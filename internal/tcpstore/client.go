package tcpstore

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Client sends queries to a store over a connection. Its methods may be called by many goroutines;
// one query is in flight at a time. If the context of a call ends while its query is in flight, the
// connection breaks, and all later calls fail.
type Client struct {
	conn  net.Conn
	newer bool

	turn chan struct{} // of capacity 1
	in   reader

	mu     sync.Mutex
	broken error
}

// errOlder is returned for queries that only the newer form of the protocol has.
var errOlder = errors.New("tcpstore: the older form of the protocol has no such query")

// NewClient returns a client of the newer form of the protocol, or, with older set, of that of
// PyTorch 1.13. It sends the greeting. Close closes the connection.
func NewClient(conn net.Conn, older bool) (*Client, error) {
	c := &Client{conn: conn, newer: !older, turn: make(chan struct{}, 1),
		in: reader{r: bufio.NewReader(conn), reading: new(atomic.Int64)}}
	if older {
		return c, nil
	}
	if _, err := conn.Write(binary.NativeEndian.AppendUint32([]byte{byte(validate)}, magic)); err != nil {
		return nil, fmt.Errorf("tcpstore: greeting: %w", err)
	}
	return c, nil
}

// Close closes the connection. A call in flight fails.
func (c *Client) Close() error { return c.conn.Close() }

// Set sets a value. The server does not answer: a later call returns its error.
func (c *Client) Set(ctx context.Context, key string, value []byte) error {
	return c.ask(ctx, set, func(b []byte) []byte { return appendBytes(appendKey(b, key), value) }, nil)
}

// Get blocks until a key has a value, and returns it.
func (c *Client) Get(ctx context.Context, key string) (value []byte, err error) {
	if err := c.Wait(ctx, key); err != nil {
		return nil, err
	}
	err = c.ask(ctx, get, func(b []byte) []byte { return appendKey(b, key) }, func(in *reader) { value = in.value() })
	return value, err
}

// Add adds n to a number, as Store.Add does, and returns the sum.
func (c *Client) Add(ctx context.Context, key string, n int64) (sum int64, err error) {
	err = c.ask(ctx, add, func(b []byte) []byte { return appendUint64(appendKey(b, key), uint64(n)) },
		func(in *reader) { sum = int64(in.uint64()) })
	return sum, err
}

// Check returns whether all keys have values.
func (c *Client) Check(ctx context.Context, keys ...string) (all bool, err error) {
	err = c.ask(ctx, check, appendKeys(keys), func(in *reader) {
		b := in.byte()
		if in.err == nil && b != ready && b != notReady {
			in.err = fmt.Errorf("tcpstore: %d is not an answer to a check", b)
		}
		all = in.err == nil && b == ready
	})
	return all, err
}

// Wait blocks until all keys have values.
func (c *Client) Wait(ctx context.Context, keys ...string) error {
	return c.ask(ctx, wait, appendKeys(keys), func(in *reader) {
		if b := in.byte(); in.err == nil && b != stopWaiting {
			in.err = fmt.Errorf("tcpstore: %d is not an answer to a wait", b)
		}
	})
}

// Len returns the number of keys with values.
func (c *Client) Len(ctx context.Context) (n int, err error) {
	err = c.ask(ctx, getNumKeys, nil, func(in *reader) { n = int(in.uint64()) })
	return n, err
}

// Ping sends a query and checks the answer. The older form has no such query.
func (c *Client) Ping(ctx context.Context) error {
	nonce := uint32(time.Now().UnixNano())
	return c.ask(ctx, ping, func(b []byte) []byte { return binary.NativeEndian.AppendUint32(b, nonce) }, func(in *reader) {
		if got := in.uint32(); in.err == nil && got != nonce {
			in.err = errors.New("tcpstore: the answer to a ping is not what was sent")
		}
	})
}

func appendKey(b []byte, key string) []byte { return appendBytes(b, []byte(key)) }

func appendKeys(keys []string) func(b []byte) []byte {
	return func(b []byte) []byte {
		b = appendUint64(b, uint64(len(keys)))
		for _, key := range keys {
			b = appendKey(b, key)
		}
		return b
	}
}

// number returns the number of the query in the client's form of the protocol.
func (c *Client) number(q query) (byte, error) {
	if c.newer {
		return byte(q), nil
	}
	for n, o := range older {
		if o == q {
			return byte(n), nil
		}
	}
	return 0, errOlder
}

// ask sends a query and reads its answer. A nil answer means that the query has none.
func (c *Client) ask(ctx context.Context, q query, body func(b []byte) []byte, answer func(in *reader)) error {
	n, err := c.number(q)
	if err != nil {
		return err
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := c.failed(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
	text := []byte{n}
	if body != nil {
		text = body(text)
	}
	c.in.begin()
	defer c.in.end()
	if _, err = c.conn.Write(text); err == nil && answer != nil {
		answer(&c.in)
		err = c.in.err
	}
	inTime := stop()
	if err == nil && inTime {
		return nil
	}
	if !inTime && (err == nil || errors.Is(err, os.ErrDeadlineExceeded)) {
		err = context.Cause(ctx)
	} else if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) {
		err = fmt.Errorf("tcpstore: the store has closed the connection: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken = err
	return err
}

func (c *Client) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return fmt.Errorf("tcpstore: an earlier call has failed: %w", c.broken)
	}
	return nil
}

// byte reads one byte.
func (r *reader) byte() byte {
	var b [1]byte
	r.full(b[:])
	return b[0]
}
