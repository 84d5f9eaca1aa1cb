package storetest

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/torchrun/store"
)

// Memory is a store in the memory of this process. The zero value is empty and ready to use.
type Memory struct {
	mu      sync.Mutex
	values  map[string]store.Entry
	version uint64
	change  chan struct{} // closed at the next change; nil: nobody waits
}

var _ store.Store = (*Memory)(nil)

// Get implements store.Store.
func (m *Memory) Get(ctx context.Context, key string) (store.Entry, error) {
	if err := begin(ctx, key, nil); err != nil {
		return store.Entry{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.entry(key), nil
}

// begin returns an error if an operation must not be tried.
func begin(ctx context.Context, key string, value []byte) error {
	if err := store.Check(key, value); err != nil {
		return err
	}
	return context.Cause(ctx)
}

func (m *Memory) entry(key string) store.Entry {
	e := m.values[key]
	e.Value, e.Now = bytes.Clone(e.Value), time.Now()
	return e
}

// CompareAndSet implements store.Store.
func (m *Memory) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	if err := begin(ctx, key, value); err != nil {
		return store.Entry{}, false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.values[key].Version != version {
		return m.entry(key), false, nil
	}
	if m.values == nil {
		m.values = make(map[string]store.Entry)
	}
	m.version++
	m.values[key] = store.Entry{Value: bytes.Clone(value), Version: m.version}
	if m.change != nil {
		close(m.change)
		m.change = nil
	}
	return m.entry(key), true, nil
}

// Wait implements store.Store.
func (m *Memory) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	for {
		if err := begin(ctx, key, nil); err != nil {
			return store.Entry{}, err
		}
		m.mu.Lock()
		e := m.entry(key)
		if m.change == nil {
			m.change = make(chan struct{})
		}
		change := m.change
		m.mu.Unlock()
		if e.Version != version {
			return e, nil
		}
		select {
		case <-change:
		case <-ctx.Done():
		}
	}
}
