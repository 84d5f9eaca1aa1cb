// Package link sends and receives messages over a connection, each preceded by its length. A Link
// collects what several goroutines send: what is added while a message is being written goes into
// the next message. Under load, many small parts therefore cost one system call, and without load
// no part waits.
package link

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// MaxFrame bounds a message in bytes.
const MaxFrame = 64 << 20

// flushAt is the number of pending bytes beyond which Wait blocks senders.
const flushAt = 1 << 20

// sealAt is the size of a message beyond which a new one is started.
const sealAt = 16 << 20

// errClosed is returned after Close.
var errClosed = errors.New("link: closed")

// LastWords is how long to wait for the arrival of what a peer has sent before it ended.
const LastWords = time.Second

// Link sends messages of type M. A message collects parts from several goroutines.
type Link[M proto.Message] struct {
	conn net.Conn
	make func() M

	mu      sync.Mutex
	sealed  []sealed[M] // complete messages, to be sent before pending
	pending M
	spare   M
	buf     []byte
	some    bool
	writing bool
	raw     syscall.RawConn // nil: not available
	bytes   int             // upper bound of the bytes in pending and sealed
	last    int             // upper bound of the bytes in pending
	err     error
	news    sync.Cond
	done    chan struct{}
}

// sealed is a complete message that has not been written yet.
type sealed[M proto.Message] struct {
	m     M
	bytes int
}

// New returns a Link on a connection, which the Link owns. make returns an empty message.
func New[M proto.Message](conn net.Conn, make_ func() M) *Link[M] {
	l := &Link[M]{conn: conn, make: make_, pending: make_(), spare: make_(), raw: rawOf(conn), done: make(chan struct{})}
	l.news.L = &l.mu
	go l.write()
	return l
}

// TooLargeError is returned for a part that does not fit into a message.
type TooLargeError struct{ Bytes, Most int }

// Error includes the sizes.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("link: a message of %d bytes; at most %d", e.Bytes, e.Most)
}

// around is the number of bytes that a message needs in addition to a part. small is the largest
// size of a part that has only a few numbers.
const (
	around = 16
	small  = 64
)

// SizeOf returns an upper bound of the bytes that a part needs in a message; nil stands for a part
// that has only a few numbers.
func SizeOf(part proto.Message) int {
	if part == nil {
		return small
	}
	return around + proto.Size(part)
}

// Put calls add with the message that the next Push sends. part is what add adds to the message,
// and determines the message's size; nil means that add adds only a few numbers. If part does not
// fit into a message, Put returns a *TooLargeError and does not call add. If the link is broken,
// Put does not call add either and returns nil. Put does not block on the peer.
func (l *Link[M]) Put(part proto.Message, add func(M)) error {
	bytes := SizeOf(part)
	if bytes > MaxFrame {
		return &TooLargeError{bytes, MaxFrame}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil
	}
	if l.some && l.last+bytes > sealAt {
		l.sealed = append(l.sealed, sealed[M]{l.pending, l.last})
		l.pending, l.last = l.make(), 0
	}
	add(l.pending)
	l.bytes += bytes
	l.last += bytes
	l.some = true
	return nil
}

// Push sends everything that was Put. It does not block on the peer.
func (l *Link[M]) Push() {
	l.mu.Lock()
	if !l.some || l.writing || l.err != nil {
		l.mu.Unlock()
		return
	}
	if l.bytes > mostInPlace || !l.drained() {
		l.news.Broadcast()
		l.mu.Unlock()
		return
	}
	l.out()
	l.mu.Unlock()
}

// Say is like Send, for a part that has only a few numbers, which always fits.
func (l *Link[M]) Say(add func(M)) { _ = l.Send(nil, add) }

// Send calls Put and Push.
func (l *Link[M]) Send(part proto.Message, add func(M)) error {
	err := l.Put(part, add)
	l.Push()
	return err
}

// mostInPlace is the number of bytes up to which the caller of Push writes them itself, because
// passing them to another goroutine would take longer. The empty buffer of a socket holds more, so
// the write does not block.
const mostInPlace = 4 << 10

// drained reports whether the socket's buffer is known to be empty. The caller holds the lock.
func (l *Link[M]) drained() bool {
	if l.raw == nil {
		return false
	}
	left, failed := 0, error(nil)
	if err := l.raw.Control(func(fd uintptr) { left, failed = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); err != nil {
		return false
	}
	return failed == nil && left == 0
}

// rawOf returns the socket of a connection, or nil.
func rawOf(conn net.Conn) syscall.RawConn {
	for {
		above, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = above.NetConn()
	}
	s, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// Wait blocks while more than flushAt bytes are pending, until they are written, the link is broken
// or ctx ends.
func (l *Link[M]) Wait(ctx context.Context) error {
	return l.await(ctx, func() bool { return l.bytes <= flushAt })
}

// Written blocks until everything that was sent is written, the link is broken or ctx ends.
func (l *Link[M]) Written(ctx context.Context) error {
	return l.await(ctx, func() bool { return !l.some && !l.writing })
}

// await blocks until the condition is true, the link is broken or ctx ends. It evaluates the
// condition with the lock held.
func (l *Link[M]) await(ctx context.Context, is func() bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || is() {
		return nil
	}
	stop := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.news.Broadcast()
	})
	defer stop()
	for l.err == nil && !is() && ctx.Err() == nil {
		l.news.Wait()
	}
	return ctx.Err()
}

// Pending returns approximately how many bytes have not been written.
func (l *Link[M]) Pending() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bytes
}

func (l *Link[M]) write() {
	defer close(l.done)
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.writing || !l.some && l.err == nil {
			l.news.Wait()
		}
		if l.err != nil && (!l.some || !errors.Is(l.err, errFlushed)) {
			return
		}
		l.out()
	}
}

// out writes what is pending. The caller holds the lock, which out releases during the write.
func (l *Link[M]) out() {
	m := l.pending
	if len(l.sealed) > 0 {
		m = l.sealed[0].m
		l.bytes -= l.sealed[0].bytes
		l.sealed = slices.Delete(l.sealed, 0, 1)
	} else {
		l.pending, l.spare = l.spare, m
		l.some, l.bytes, l.last = false, 0, 0
	}
	l.writing = true
	l.mu.Unlock()

	buf, err := Frame(l.buf[:0], m)
	if err == nil {
		_, err = l.conn.Write(buf)
	}
	proto.Reset(m)
	if l.buf = buf; cap(buf) > 4*flushAt {
		l.buf = nil
	}
	if err != nil {
		// The peer may have ended, but what it sent before must still be read.
		time.AfterFunc(LastWords, func() { l.conn.Close() })
	}
	l.mu.Lock()
	l.writing = false
	if err != nil && (l.err == nil || errors.Is(l.err, errFlushed)) {
		l.err = err
		l.some, l.sealed = false, nil
	}
	l.news.Broadcast()
}

// errFlushed ends a link once everything pending has been written.
var errFlushed = fmt.Errorf("%w in order", errClosed)

func (l *Link[M]) fail(err error) {
	l.mu.Lock()
	if l.err == nil || errors.Is(l.err, errFlushed) {
		l.err = err
	}
	l.some, l.sealed = false, nil
	l.news.Broadcast()
	l.mu.Unlock()
	l.conn.Close()
}

// Close closes the connection at once and drops what is pending.
func (l *Link[M]) Close() {
	l.fail(errClosed)
	<-l.done
}

// flushWithin bounds Flush if the peer does not read.
const flushWithin = 5 * time.Second

// Flush writes what is pending, within 5 s, and closes the connection.
func (l *Link[M]) Flush() {
	_ = l.conn.SetWriteDeadline(time.Now().Add(flushWithin))
	l.mu.Lock()
	if l.err == nil {
		l.err = errFlushed
	}
	l.news.Broadcast()
	l.mu.Unlock()
	<-l.done
	l.conn.Close()
}

// Frame appends a message to b, preceded by its length.
func Frame(b []byte, m proto.Message) ([]byte, error) {
	at := len(b)
	b, err := (proto.MarshalOptions{}).MarshalAppend(append(b, 0, 0, 0, 0), m)
	n := len(b) - at - 4
	if err == nil && n > MaxFrame {
		err = &TooLargeError{n, MaxFrame}
	}
	if err == nil {
		binary.LittleEndian.PutUint32(b[at:], uint32(n))
	}
	return b, err
}

// Reader reads messages from a connection.
type Reader struct {
	// Most is the largest size of a message in bytes. NewReader sets it to MaxFrame.
	Most int
	r    *bufio.Reader
	buf  []byte
}

// NewReader returns a Reader of the messages from conn.
func NewReader(conn io.Reader) *Reader {
	return &Reader{Most: MaxFrame, r: bufio.NewReaderSize(conn, 64<<10)}
}

// Read reads the next message into m, which it resets first. It allocates memory as bytes arrive.
func (r *Reader) Read(m proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return err
	}
	n := int(binary.LittleEndian.Uint32(head[:]))
	if n > r.Most {
		return &TooLargeError{n, r.Most}
	}
	r.buf = r.buf[:0]
	for len(r.buf) < n {
		part := min(n-len(r.buf), 1<<20)
		at := len(r.buf)
		r.buf = append(r.buf, make([]byte, part)...)
		if _, err := io.ReadFull(r.r, r.buf[at:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	err := proto.Unmarshal(r.buf, m)
	if cap(r.buf) > 4*flushAt {
		r.buf = nil
	}
	return err
}
