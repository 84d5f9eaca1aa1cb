// Package store defines a store of small values by which processes on several machines meet. Each
// value has a version. With the methods of a Store, a process can write a value if the value still
// has a given version, and wait for another version.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// MaxKey is the largest length of a key, in bytes.
	MaxKey = 1 << 10
	// MaxValue is the largest length of a value, in bytes.
	MaxValue = 4 << 20
)

// ErrClosed means that the store was closed.
var ErrClosed = errors.New("store: it is closed")

// SizeError means that a key or a value is too long, or that a key is empty.
type SizeError struct {
	What        string // "key" or "value"
	Bytes, Most int
}

// Error includes what is too long.
func (e *SizeError) Error() string {
	return fmt.Sprintf("store: a %s of %d bytes, not of up to %d", e.What, e.Bytes, e.Most)
}

// Entry is a value at some moment.
type Entry struct {
	// Value is the value, which the caller may change.
	Value []byte
	// Version differs from the versions of all earlier values of the key. 0: there is no value.
	Version uint64
	// Now is the time of the store's clock, which is the same for all its users.
	Now time.Time
}

// Clock is the clock of a store. It advances with the monotonic clock of this process, so that a
// change of this machine's time of day does not affect it. The zero value is the time of day.
type Clock struct{ at, read time.Time }

// ClockAt returns a clock whose current time is now.
func ClockAt(now time.Time) Clock { return Clock{now, time.Now()} }

// Now returns the current time of the clock.
func (c Clock) Now() time.Time {
	if c.at.IsZero() {
		return time.Now()
	}
	return c.at.Add(time.Since(c.read))
}

// Store keeps values. Its methods are safe for concurrent use. They return the cause of ctx's end,
// a *SizeError, ErrClosed, or an error if the store is unreachable.
type Store interface {
	// Get returns the value of a key.
	Get(ctx context.Context, key string) (Entry, error)
	// CompareAndSet sets the value of a key if it still has the given version; version 0 means that
	// there is no value. It returns the entry after the call, and whether this call has set it.
	CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (Entry, bool, error)
	// Wait blocks until the key's value has another version, and returns the value. It may miss
	// values in between.
	Wait(ctx context.Context, key string, version uint64) (Entry, error)
}

// Check returns a *SizeError for a key or value that no store accepts.
func Check(key string, value []byte) error {
	switch {
	case key == "" || len(key) > MaxKey:
		return &SizeError{"key", len(key), MaxKey}
	case len(value) > MaxValue:
		return &SizeError{"value", len(value), MaxValue}
	}
	return nil
}
