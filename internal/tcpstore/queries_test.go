package tcpstore

import (
	"context"
	"fmt"
)

// The queries that only programs of PyTorch send.

// CompareSet is Store.CompareSet.
func (c *Client) CompareSet(ctx context.Context, key string, expected, desired []byte) (present []byte, err error) {
	err = c.ask(ctx, compareSet, func(b []byte) []byte {
		return appendBytes(appendBytes(appendKey(b, key), expected), desired)
	}, func(in *reader) { present = in.value() })
	return present, err
}

// Delete removes a value, and returns whether there was one.
func (c *Client) Delete(ctx context.Context, key string) (was bool, err error) {
	err = c.ask(ctx, deleteKey, func(b []byte) []byte { return appendKey(b, key) },
		func(in *reader) { was = in.uint64() == 1 })
	return was, err
}

// Append appends bytes to a value. PyTorch before 2.0 has no such query.
func (c *Client) Append(ctx context.Context, key string, more []byte) error {
	return c.ask(ctx, appendTo, func(b []byte) []byte { return appendBytes(appendKey(b, key), more) }, nil)
}

// MultiGet blocks until all keys have values, and returns them. PyTorch before 2.0 has no such
// query.
func (c *Client) MultiGet(ctx context.Context, keys ...string) (values [][]byte, err error) {
	if err := c.Wait(ctx, keys...); err != nil {
		return nil, err
	}
	err = c.ask(ctx, multiGet, appendKeys(keys), func(in *reader) {
		for range keys {
			values = append(values, in.value())
		}
	})
	return values, err
}

// MultiSet sets several values, not atomically. PyTorch before 2.0 has no such query.
func (c *Client) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("tcpstore: %d keys are given for %d values", len(keys), len(values))
	}
	return c.ask(ctx, multiSet, func(b []byte) []byte {
		b = appendUint64(b, uint64(len(keys)))
		for i, key := range keys {
			b = appendBytes(appendKey(b, key), values[i])
		}
		return b
	}, nil)
}

// Push appends a value to a queue. The older form has no such query.
func (c *Client) Push(ctx context.Context, key string, value []byte) error {
	return c.ask(ctx, queuePush, func(b []byte) []byte { return appendBytes(appendKey(b, key), value) }, nil)
}

// Pop removes the first value of a queue and returns it; was is false if the queue is empty. The
// older form has no such query.
func (c *Client) Pop(ctx context.Context, key string) (value []byte, was bool, err error) {
	err = c.ask(ctx, queuePop, func(b []byte) []byte { return appendKey(b, key) }, func(in *reader) {
		if was = in.uint64() > 0; was {
			value = in.value()
		}
	})
	return value, was, err
}

// QueueLen returns the number of values in a queue. The older form has no such query.
func (c *Client) QueueLen(ctx context.Context, key string) (n int, err error) {
	err = c.ask(ctx, queueLen, func(b []byte) []byte { return appendKey(b, key) },
		func(in *reader) { n = int(in.uint64()) })
	return n, err
}
