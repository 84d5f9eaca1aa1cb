package tcpstore

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Serve answers the queries of one connection, in either form of the protocol, until the client
// closes it or sends a query that is not valid, and closes it. It blocks as conn does. It returns
// nil if the client has closed the connection between two queries. Closing conn ends it.
func Serve(conn net.Conn, store *Store) error {
	s := &session{conn: conn, store: store, in: reader{r: bufio.NewReader(conn), reading: &store.reading}}
	err := s.run()
	s.in.end()
	conn.Close() // first, since a wait may be blocked in a write
	s.endWait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// session serves one connection.
type session struct {
	conn  net.Conn
	store *Store
	in    reader
	newer bool

	mu  sync.Mutex // guards writes
	end func()     // ends the wait in flight; nil: none
	wg  sync.WaitGroup
}

func (s *session) run() error {
	if err := s.greet(); err != nil {
		return noError(err)
	}
	for {
		q, err := s.next()
		if err != nil {
			return noError(err)
		}
		late := time.AfterFunc(queryTime, func() { s.conn.Close() })
		s.endWait() // another query means that the client has stopped waiting
		answer, err := s.answer(q)
		s.in.end()
		late.Stop()
		if err == nil && s.in.err != nil {
			err = s.in.err
		}
		if err == nil && len(answer) > 0 {
			err = s.write(answer)
		}
		if err != nil {
			return err
		}
	}
}

// noError returns nil for the end of a connection between two queries.
func noError(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// greet determines the form of the protocol. As the length of a key, the magic number would exceed
// the bound.
func (s *session) greet() error {
	first, err := s.in.r.Peek(1)
	if err != nil {
		return err
	}
	if query(first[0]) != validate { // in the older form this number means set
		return nil
	}
	head, err := s.in.r.Peek(5)
	if err != nil {
		return err
	}
	if binary.NativeEndian.Uint32(head[1:]) == magic {
		s.newer = true
		_, err = s.in.r.Discard(len(head))
	}
	return err
}

func (s *session) next() (query, error) {
	b, err := s.in.r.ReadByte()
	if err != nil {
		return 0, err
	}
	s.in.begin()
	q := query(unknown)
	switch {
	case s.newer && query(b) < queries && query(b) != validate:
		q = query(b)
	case !s.newer && int(b) < len(older):
		q = older[b]
	}
	if q == watchKey {
		return 0, errors.New("tcpstore: the query WATCH_KEY is not answered")
	}
	if q == unknown {
		return 0, fmt.Errorf("tcpstore: the query number %d is not known", b)
	}
	return q, nil
}

// answer executes a query and returns the answer, which is meaningless if s.in has failed.
func (s *session) answer(q query) ([]byte, error) {
	in := &s.in
	switch q {
	case set:
		key, value := in.key(), in.value()
		return nil, s.change(func() error { return s.store.Set(key, value) })
	case appendTo:
		key, value := in.key(), in.value()
		return nil, s.change(func() error { return s.store.Append(key, value) })
	case queuePush:
		key, value := in.key(), in.value()
		return nil, s.change(func() error { return s.store.Push(key, value) })
	case multiSet:
		for n := in.count(); n > 0 && in.err == nil; n-- {
			key, value := in.key(), in.value()
			if err := s.change(func() error { return s.store.Set(key, value) }); err != nil {
				return nil, err
			}
		}
		return nil, nil
	case compareSet:
		key, expected, desired := in.key(), in.value(), in.value()
		var present []byte
		err := s.change(func() (err error) {
			present, err = s.store.CompareSet(key, expected, desired)
			return err
		})
		return appendBytes(nil, present), err
	case add:
		key, n := in.key(), int64(in.uint64())
		err := s.change(func() (err error) {
			n, err = s.store.Add(key, n)
			return err
		})
		return appendUint64(nil, uint64(n)), err
	case wait:
		s.wait(in.keys())
		return nil, nil
	}
	return s.look(q), nil
}

// change calls do, unless the query is incomplete. Values that do has kept no longer count as being
// read.
func (s *session) change(do func() error) error {
	if s.in.err != nil {
		return s.in.err
	}
	s.in.end()
	return do()
}

// look answers the queries that cannot fail.
func (s *session) look(q query) []byte {
	in := &s.in
	switch q {
	case get:
		value, _ := s.store.Get(in.key())
		return appendBytes(nil, value)
	case multiGet:
		var answer []byte
		for _, key := range in.keys() {
			if value, _ := s.store.Get(key); len(answer)+len(value) <= maxQuery {
				answer = appendBytes(answer, value)
			} else {
				in.err = fmt.Errorf("tcpstore: values of more than %d bytes were asked for at once", maxQuery)
			}
		}
		return answer
	case check:
		if s.store.Has(in.keys()...) {
			return []byte{ready}
		}
		return []byte{notReady}
	case cancelWait:
		return []byte{waitCancel}
	case getNumKeys:
		return appendUint64(nil, uint64(s.store.Len()))
	case deleteKey:
		key := in.key()
		if in.err == nil && s.store.Delete(key) {
			return appendUint64(nil, 1)
		}
		return appendUint64(nil, 0)
	case ping:
		return binary.NativeEndian.AppendUint32(nil, in.uint32())
	case queuePop:
		key := in.key()
		if in.err != nil {
			return nil
		}
		n, value := s.store.Pop(key)
		answer := appendUint64(nil, uint64(n))
		if n > 0 {
			answer = appendBytes(answer, value)
		}
		return answer
	case queueLen:
		return appendUint64(nil, uint64(s.store.QueueLen(in.key())))
	}
	return nil
}

// wait notifies the client once all keys have values, unless endWait comes first. It does not
// block.
func (s *session) wait(keys []string) {
	if s.in.err != nil {
		return
	}
	there, cancel := s.store.Await(keys...)
	ended := make(chan struct{})
	s.end = func() {
		close(ended)
		cancel()
	}
	s.wg.Go(func() {
		select {
		case <-there:
			_ = s.write([]byte{stopWaiting}) // if it fails, the next read fails too
		case <-ended:
		}
	})
}

// endWait ends the wait in flight, if any, and blocks until it can no longer notify the client.
func (s *session) endWait() {
	if s.end != nil {
		s.end()
		s.end = nil
	}
	s.wg.Wait()
}

func (s *session) write(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.conn.Write(b)
	return err
}
