// Package transfer copies stored values from one process to another, in chunks and with a check of
// the hash. Serve provides values, and Fetch fetches a value from several peers at a time.
//
// A connection carries taskspb.ValueRequest in one direction and, in the same order,
// taskspb.ValueReply in the other.
package transfer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

const (
	// Chunk is the number of bytes that a request asks for.
	Chunk = 4 << 20
	// depth is the number of chunks requested from a peer at a time.
	depth = 2
	// silence is how long a peer may take to send a chunk.
	silence = 20 * time.Second
	// MaxSize is the largest size of a value in bytes.
	MaxSize = 1 << 40
)

// BesideScheduler is the name of the scheduler's store, in place of the name of a host.
const BesideScheduler = "\x00scheduler"

// ErrLater is returned for a value that is still being computed.
var ErrLater = errors.New("transfer: the value is being made")

// UnreachableError is returned if nobody who has a value can be reached.
type UnreachableError struct{ Why string }

// Error includes the reason.
func (e *UnreachableError) Error() string { return "transfer: the value is out of reach: " + e.Why }

// Reader reads a part of a value. It returns blob.ErrMissing if it does not have the value. It
// returns ErrLater or an *UnreachableError if the caller may ask again later.
type Reader func(ctx context.Context, id blob.ID, at int64, b []byte) error

// FromStore returns a Reader of the values of a store.
func FromStore(s *blob.Store) Reader {
	return func(_ context.Context, id blob.ID, at int64, b []byte) error {
		f, size, err := s.Open(id)
		if err != nil {
			return err
		}
		defer f.Close()
		if at < 0 || at+int64(len(b)) > size {
			return fmt.Errorf("transfer: bytes %d to %d are requested, and the value has %d", at, at+int64(len(b)), size)
		}
		_, err = f.ReadAt(b, at)
		return err
	}
}

// ServeConfig describes what Serve offers to a peer.
type ServeConfig struct {
	Read Reader
	// Store stores values that the peer sends. Nil: none are accepted.
	Store *blob.Store
	// Brought, if not nil, is called with each value that the peer has sent, before the peer gets
	// its answer. It returns false if the value has already been removed again; the peer then gets
	// ErrLater, and may send the value again.
	Brought func(id blob.ID, size int64) bool
}

// Serve answers the requests of a peer until the connection ends. r is the reader that has read the
// previous messages of the connection.
func Serve(ctx context.Context, conn net.Conn, r *link.Reader, cfg ServeConfig) error {
	var q taskspb.ValueRequest
	for {
		if err := r.Read(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var reply *taskspb.ValueReply
		if q.GetPut() > 0 {
			var err error
			if reply, err = cfg.take(conn, r, q.GetPut()); err != nil {
				return err
			}
		} else {
			reply = cfg.answer(ctx, &q)
		}
		if err := write(conn, reply); err != nil {
			return err
		}
	}
}

// answer answers a request for a part of a value.
func (cfg *ServeConfig) answer(ctx context.Context, q *taskspb.ValueRequest) *taskspb.ValueReply {
	id, ok := blob.ParseID(q.GetValue())
	if !ok || q.GetLength() > Chunk || q.GetOffset() > MaxSize {
		return &taskspb.ValueReply{Failed: "a request that is out of bounds"}
	}
	data := make([]byte, q.GetLength())
	var far *UnreachableError
	switch err := cfg.Read(ctx, id, int64(q.GetOffset()), data); {
	case errors.Is(err, blob.ErrMissing):
		return &taskspb.ValueReply{Missing: true}
	case errors.Is(err, ErrLater):
		return &taskspb.ValueReply{Later: true}
	case errors.As(err, &far):
		return &taskspb.ValueReply{Later: true, Failed: queue.Cut(far.Why, link.MaxWhy)}
	case err != nil:
		return &taskspb.ValueReply{Failed: queue.Cut(err.Error(), link.MaxWhy)}
	}
	return &taskspb.ValueReply{Data: data}
}

// take stores a value that the peer sends.
func (cfg *ServeConfig) take(conn net.Conn, r *link.Reader, size uint64) (*taskspb.ValueReply, error) {
	if cfg.Store == nil || size > MaxSize {
		return &taskspb.ValueReply{Failed: "no values are taken here"}, nil
	}
	w, err := cfg.Store.Create(int64(size))
	if err != nil {
		return &taskspb.ValueReply{Failed: queue.Cut(err.Error(), link.MaxWhy)}, nil
	}
	defer w.Abort()
	if err := write(conn, &taskspb.ValueReply{}); err != nil {
		return nil, err
	}
	var q taskspb.ValueRequest
	var failed error
	for left := size; left > 0; left -= uint64(len(q.GetData())) {
		if err := r.Read(&q); err != nil {
			return nil, err
		}
		if n := len(q.GetData()); n == 0 || uint64(n) > left {
			return nil, fmt.Errorf("transfer: %d bytes, where %d are left", n, left)
		}
		if failed != nil {
			continue // closing with unread bytes would discard the answer
		}
		if _, failed = w.Write(q.GetData()); failed != nil {
			w.Abort()
		}
	}
	if failed != nil {
		return &taskspb.ValueReply{Failed: queue.Cut(failed.Error(), link.MaxWhy)}, nil
	}
	id, err := w.Commit()
	if err != nil {
		return &taskspb.ValueReply{Failed: queue.Cut(err.Error(), link.MaxWhy)}, nil
	}
	if cfg.Brought != nil && !cfg.Brought(id, int64(size)) {
		return &taskspb.ValueReply{Later: true}, nil
	}
	return &taskspb.ValueReply{Value: id[:]}, nil
}

func write(conn net.Conn, m proto.Message) error {
	b, err := link.Frame(nil, m)
	if err == nil {
		_, err = conn.Write(b)
	}
	return err
}

// Client sends requests over a connection, which it owns. It is not safe for concurrent use.
type Client struct {
	conn net.Conn
	r    *link.Reader
	buf  []byte
}

// NewClient returns a Client for the connection.
func NewClient(conn net.Conn) *Client { return &Client{conn: conn, r: link.NewReader(conn)} }

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Ask requests n bytes of a value, starting at offset at. Answer returns the answer.
func (c *Client) Ask(id blob.ID, at int64, n int) error {
	return c.send(&taskspb.ValueRequest{Value: id[:], Offset: uint64(at), Length: uint32(n)})
}

func (c *Client) send(q *taskspb.ValueRequest) (err error) {
	if c.buf, err = link.Frame(c.buf[:0], q); err != nil {
		return err
	}
	_ = c.conn.SetDeadline(time.Now().Add(silence))
	_, err = c.conn.Write(c.buf)
	return err
}

// Answer returns the answer, of n bytes, to the oldest request without an answer. The error is
// blob.ErrMissing if the peer does not have the value.
func (c *Client) Answer(n int) ([]byte, error) {
	reply, err := c.reply()
	if err == nil && len(reply.GetData()) != n {
		err = fmt.Errorf("transfer: received %d bytes of %d", len(reply.GetData()), n)
	}
	return reply.GetData(), err
}

func (c *Client) reply() (*taskspb.ValueReply, error) {
	var reply taskspb.ValueReply
	_ = c.conn.SetDeadline(time.Now().Add(silence))
	switch err := c.r.Read(&reply); {
	case err != nil:
		return nil, fmt.Errorf("transfer: %w", err)
	case reply.GetMissing():
		return nil, blob.ErrMissing
	case reply.GetLater() && reply.GetFailed() != "":
		return nil, &UnreachableError{reply.GetFailed()}
	case reply.GetLater():
		return nil, ErrLater
	case reply.GetFailed() != "":
		return nil, &RefusedError{reply.GetFailed()}
	}
	return &reply, nil
}

// RefusedError is a peer's reason for refusing a request.
type RefusedError struct{ Text string }

// Error is the peer's text.
func (e *RefusedError) Error() string { return e.Text }

// Put sends a value, which is the concatenation of the parts, and returns its ID. If ctx ends, the
// connection is closed.
func (c *Client) Put(ctx context.Context, parts ...[]byte) (id blob.ID, err error) {
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer func() {
		if !stop() {
			err = errors.Join(ctx.Err(), err)
		}
	}()
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	if err := c.send(&taskspb.ValueRequest{Put: uint64(size)}); err != nil {
		return id, err
	}
	if _, err := c.reply(); err != nil {
		return id, err
	}
	sum := sha256.New()
	for _, p := range parts {
		for len(p) > 0 {
			n := min(len(p), Chunk)
			_, _ = sum.Write(p[:n])
			if err := c.send(&taskspb.ValueRequest{Data: p[:n]}); err != nil {
				if _, rerr := c.reply(); rerr != nil { // the reason, if the peer could send it
					err = rerr
				}
				return id, err
			}
			p = p[n:]
		}
	}
	reply, err := c.reply()
	if err != nil {
		return id, err
	}
	if id, _ = blob.ParseID(reply.GetValue()); id != blob.ID(sum.Sum(nil)) {
		return id, errors.New("transfer: the value does not match its hash")
	}
	return id, nil
}

// ReadAll reads a value of the given size into memory.
func (c *Client) ReadAll(ctx context.Context, id blob.ID, size int64) (b []byte, err error) {
	b = make([]byte, size)
	sum := sha256.New()
	f := &fetch{id: id, size: size, left: size, took: func(part []byte, at int64) error {
		copy(b[at:], part)
		_, _ = sum.Write(part)
		return nil
	}}
	if err := f.from(ctx, c); err != nil {
		return nil, err
	}
	if blob.ID(sum.Sum(nil)) != id {
		return nil, errOther
	}
	return b, nil
}

var errOther = errors.New("transfer: the value does not match its hash")

// Source is a peer that may have a value.
type Source struct {
	// Name is the name of the peer, for errors.
	Name string
	Dial func(ctx context.Context) (net.Conn, error)
}

// SourceError is an error of a source.
type SourceError struct {
	Name string
	Err  error
}

// Error includes the name.
func (e *SourceError) Error() string { return e.Name + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *SourceError) Unwrap() error { return e.Err }

// Fetch copies a value into a store from all of the sources at a time, from each as fast as it
// sends. Chunks that a source fails to send are requested from others. It returns the errors of
// sources, and an error if the value could not be fetched because all sources have failed or the
// store has no room.
func Fetch(ctx context.Context, s *blob.Store, id blob.ID, size int64, sources []Source) ([]*SourceError, error) {
	bad, err := fetchOnce(ctx, s, id, size, sources)
	if !errors.Is(err, errOther) || len(sources) < 2 {
		return bad, err
	}
	// At least one source has sent wrong bytes. Try each source alone.
	for _, one := range sources {
		of, err := fetchOnce(ctx, s, id, size, []Source{one})
		if err == nil {
			return bad, nil
		}
		for _, e := range of {
			bad = append(bad, &SourceError{one.Name, e.Err})
		}
		if errors.Is(err, errOther) {
			bad = append(bad, &SourceError{one.Name, err})
		}
	}
	return bad, err
}

func fetchOnce(ctx context.Context, s *blob.Store, id blob.ID, size int64, sources []Source) ([]*SourceError, error) {
	if size <= 0 || size > MaxSize {
		return nil, fmt.Errorf("transfer: a value cannot have %d bytes", size)
	}
	w, err := s.Create(size)
	if err != nil {
		return nil, err
	}
	defer w.Abort()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var bad []*SourceError
	f := &fetch{id: id, size: size, left: size, took: func(b []byte, at int64) error {
		mu.Lock()
		defer mu.Unlock()
		_, err := w.WriteAt(b, at)
		if err != nil {
			cancel(err)
		}
		return err
	}}
	failed := make([]bool, len(sources))
	for !f.whole() && ctx.Err() == nil && slices.Contains(failed, false) {
		var all sync.WaitGroup
		for i, src := range sources {
			if failed[i] {
				continue
			}
			all.Go(func() {
				err := f.fromSource(ctx, src)
				if err != nil && ctx.Err() == nil {
					mu.Lock()
					defer mu.Unlock()
					failed[i] = true
					bad = append(bad, &SourceError{src.Name, err})
				}
			})
		}
		all.Wait()
	}
	if ctx.Err() != nil {
		return bad, context.Cause(ctx)
	}
	if !f.whole() {
		return bad, fmt.Errorf("transfer: %w", errors.Join(joined(bad)...))
	}
	got, err := w.Commit()
	if err == nil && got != id {
		err = errors.Join(errOther, s.Remove(got))
	}
	return bad, err
}

func joined(bad []*SourceError) (all []error) {
	for _, e := range bad {
		all = append(all, e)
	}
	if len(all) == 0 {
		all = append(all, blob.ErrMissing)
	}
	return all
}

// fetch is a value that is being fetched.
type fetch struct {
	id   blob.ID
	size int64
	took func(b []byte, at int64) error

	mu   sync.Mutex
	next int64   // offset from which on nothing has been requested
	back []int64 // offsets of chunks that were requested but not received
	left int64   // number of missing bytes
}

func (f *fetch) fromSource(ctx context.Context, src Source) error {
	conn, err := src.Dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f.from(ctx, NewClient(conn))
}

// chunk returns the next chunk to request; false: no chunk is left.
func (f *fetch) chunk() (at int64, n int, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch last := len(f.back) - 1; {
	case last >= 0:
		at = f.back[last]
		f.back = f.back[:last]
	case f.next < f.size:
		at = f.next
		f.next += Chunk
	default:
		return 0, 0, false
	}
	return at, int(min(Chunk, f.size-at)), true
}

func (f *fetch) whole() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left == 0
}

// from requests chunks from a peer until no chunk is left. If ctx ends, it closes the connection.
func (f *fetch) from(ctx context.Context, c *Client) error {
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	type part struct {
		at int64
		n  int
	}
	var asked []part
	giveBack := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, p := range asked {
			f.back = append(f.back, p.at)
		}
	}
	for {
		for len(asked) < depth {
			at, n, ok := f.chunk()
			if !ok {
				break
			}
			asked = append(asked, part{at, n})
			if err := c.Ask(f.id, at, n); err != nil {
				giveBack()
				return err
			}
		}
		if len(asked) == 0 {
			return nil
		}
		b, err := c.Answer(asked[0].n)
		if err != nil {
			giveBack()
			return err
		}
		if err := f.took(b, asked[0].at); err != nil {
			return err
		}
		f.mu.Lock()
		f.left -= int64(asked[0].n)
		f.mu.Unlock()
		asked = asked[1:]
	}
}
