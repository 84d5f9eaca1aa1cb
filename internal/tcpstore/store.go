package tcpstore

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// defaultMaxBytes is the default of Store.MaxBytes.
const defaultMaxBytes = 256 << 20

// keyCost is the memory of the maps, in bytes, for each key and each element of a queue.
const keyCost = 128

// ErrFull is returned if a value would exceed the Store's bound.
var ErrFull = errors.New("tcpstore: the store is full")

// Store holds keys and values in memory. The zero value is empty and ready to use. It must not be
// copied. Its methods may be called by many goroutines, and do not keep their arguments.
type Store struct {
	// MaxBytes bounds the total size of keys, values and queues, with keyCost for each. Zero:
	// defaultMaxBytes.
	MaxBytes int

	reading atomic.Int64 // bytes of values that connections are reading

	mu      sync.Mutex
	values  map[string][]byte
	queues  map[string][][]byte
	bytes   int
	waiters map[string][]*waiter
}

// waiter waits for keys.
type waiter struct {
	keys  []string
	ready chan struct{} // closed when all keys have values
	done  bool
}

// Set sets a value.
func (s *Store) Set(key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set(key, bytes.Clone(value))
}

// set sets the value; the lock is held.
func (s *Store) set(key string, value []byte) error {
	old, was := s.values[key]
	more := len(value) - len(old)
	if !was {
		more += len(key) + keyCost
	}
	if err := s.take(more); err != nil {
		return err
	}
	if s.values == nil {
		s.values = make(map[string][]byte)
	}
	if value == nil {
		value = []byte{}
	}
	s.values[key] = value
	s.wake(key)
	return nil
}

// ofOneWorld reports whether a key belongs to one world: whether it has the prefix that a program
// of torch gives to the store of a generation (g4/…), or that of a reconfigured process group
// (reconfigure/…, anywhere in the path).
func ofOneWorld(key string) bool {
	key = "/" + strings.TrimLeft(key, "/")
	if strings.Contains(key, "/reconfigure/") {
		return true
	}
	first, _, more := strings.Cut(key[1:], "/")
	number, is := strings.CutPrefix(first, "g")
	return more && is && number != "" && strings.Trim(number, "0123456789") == ""
}

// NextWorld removes the keys that belong to one world. It must be called before a world is
// published: its members have left the world before, and have not set keys for the new one yet.
func (s *Store) NextWorld() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, value := range s.values {
		if ofOneWorld(key) {
			delete(s.values, key)
			s.bytes -= len(key) + len(value) + keyCost
		}
	}
	for key, queue := range s.queues {
		if ofOneWorld(key) {
			delete(s.queues, key)
			for _, value := range queue {
				s.bytes -= len(key) + len(value) + keyCost
			}
		}
	}
}

// take counts more bytes as taken, or fewer if more is negative; the lock is held.
func (s *Store) take(more int) error {
	most := s.MaxBytes
	if most == 0 {
		most = defaultMaxBytes
	}
	if more > 0 && s.bytes+more > most {
		return ErrFull
	}
	s.bytes += more
	return nil
}

// CompareSet sets a value if the present one equals expected; an empty expected stands for an
// absent value. It returns the value that is present afterwards. If none is, although one was
// expected, it returns expected, as PyTorch's store does.
func (s *Store) CompareSet(key string, expected, desired []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	present, there := s.values[key]
	if there && !bytes.Equal(present, expected) {
		return bytes.Clone(present), nil
	}
	if !there && len(expected) > 0 {
		return bytes.Clone(expected), nil
	}
	return bytes.Clone(desired), s.set(key, bytes.Clone(desired))
}

// Get returns a value, and whether there is one.
func (s *Store) Get(key string) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, there := s.values[key]
	return bytes.Clone(value), there
}

// Add adds n to a number, which is stored as decimal digits, and returns the sum. An absent value
// counts as 0.
func (s *Store) Add(key string, n int64) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, there := s.values[key]; there {
		m, err := strconv.ParseInt(string(old), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("tcpstore: the value of %.100q is not a number", key)
		}
		n += m
	}
	return n, s.set(key, strconv.AppendInt(nil, n, 10))
}

// Append appends bytes to a value, which may be absent.
func (s *Store) Append(key string, more []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set(key, slices.Concat(s.values[key], more))
}

// Has returns whether all keys have values or queues that are not empty.
func (s *Store) Has(keys ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.has(keys)
}

func (s *Store) has(keys []string) bool {
	for _, key := range keys {
		if _, there := s.values[key]; !there && len(s.queues[key]) == 0 {
			return false
		}
	}
	return true
}

// Await returns a channel that is closed once all keys have values, and a function that ends the
// wait, which the caller must call.
func (s *Store) Await(keys ...string) (ready <-chan struct{}, cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &waiter{keys: slices.Clone(keys), ready: make(chan struct{})}
	if s.has(keys) {
		close(w.ready)
		return w.ready, func() {}
	}
	if s.waiters == nil {
		s.waiters = make(map[string][]*waiter)
	}
	slices.Sort(w.keys)
	w.keys = slices.Compact(w.keys)
	for _, key := range w.keys {
		s.waiters[key] = append(s.waiters[key], w)
	}
	return w.ready, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.forget(w)
	}
}

// wake ends the waits that lacked only the key; the lock is held.
func (s *Store) wake(key string) {
	for _, w := range slices.Clone(s.waiters[key]) {
		if s.has(w.keys) {
			close(w.ready)
			s.forget(w)
		}
	}
}

// forget removes a waiter; the lock is held.
func (s *Store) forget(w *waiter) {
	if w.done {
		return
	}
	w.done = true
	for _, key := range w.keys {
		left := slices.DeleteFunc(s.waiters[key], func(o *waiter) bool { return o == w })
		if len(left) == 0 {
			delete(s.waiters, key)
		} else {
			s.waiters[key] = left
		}
	}
}

// Len returns the number of keys with values.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.values)
}

// Delete removes a value, and returns whether there was one.
func (s *Store) Delete(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, there := s.values[key]
	if there {
		delete(s.values, key)
		s.bytes -= len(key) + len(value) + keyCost
	}
	return there
}

// Push appends a value to a queue.
func (s *Store) Push(key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.take(len(key) + len(value) + keyCost); err != nil {
		return err
	}
	if s.queues == nil {
		s.queues = make(map[string][][]byte)
	}
	s.queues[key] = append(s.queues[key], bytes.Clone(value))
	s.wake(key)
	return nil
}

// Pop removes the first value of a queue and returns it, and the number of values before that. If n
// is 0, there is no value.
func (s *Store) Pop(key string) (n int, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	queue := s.queues[key]
	if len(queue) == 0 {
		return 0, nil
	}
	value = queue[0]
	if len(queue) == 1 {
		delete(s.queues, key)
	} else {
		s.queues[key] = queue[1:]
	}
	s.bytes -= len(key) + len(value) + keyCost
	return len(queue), value
}

// QueueLen returns the number of values in a queue.
func (s *Store) QueueLen(key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queues[key])
}
