// Package tcpstore implements the protocol of PyTorch's TCPStore, the key-value store by which the
// processes of torch.distributed find each other: a server, whose values are in a Store, and a
// Client.
//
// The protocol has two forms: that of PyTorch 1.13 and 2.0, and the newer one, which begins with a
// magic number and has more queries. The server tells them apart by the first bytes of a
// connection. Numbers are in the byte order of the machine. The protocol has no authentication:
// whoever serves a connection must authenticate the peer first.
package tcpstore

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// The bounds of one query. PyTorch's own server has the same bound for keys, and 8 MiB for values.
const (
	maxKey   = 8 << 10
	maxKeys  = 128 << 10
	maxValue = 64 << 20
	// maxQuery bounds the total size of the keys and values of one query, in bytes.
	maxQuery = 96 << 20
	// smallValue is the size in bytes up to which a value that is being read does not count towards
	// maxReading, so that large values do not keep small ones out.
	smallValue = 64 << 10
	// maxReading bounds the larger keys and values that all connections of a store are reading, in
	// bytes.
	maxReading = 192 << 20
	// queryTime bounds the time in which a query arrives.
	queryTime = time.Minute
)

// magic follows the query validate at the beginning of a connection of the newer form.
const magic = 0x3C85F7CE

// query is the kind of a query, numbered as in the newer form.
type query byte

const (
	validate query = iota
	set
	compareSet
	get
	add
	check
	wait
	getNumKeys
	deleteKey
	appendTo
	multiGet
	multiSet
	cancelWait
	ping
	queuePush
	queuePop
	queueLen
	queries  // the number of kinds
	watchKey = 100
	unknown  = 101
)

// older has the queries by their numbers in the older form. Its watchKey, which calls functions
// back over a separate connection, is refused: PyTorch's Python interface does not use it.
var older = [...]query{set, compareSet, get, add, check, wait, getNumKeys, watchKey, deleteKey, appendTo, multiGet, multiSet, cancelWait}

// IsQuery returns whether the first bytes of a connection, at least five, may be those of a client
// of a TCPStore.
func IsQuery(first []byte) bool {
	if len(first) < 5 {
		return false
	}
	number := binary.NativeEndian.Uint32(first[1:5])
	if query(first[0]) == validate && number == magic {
		return true
	}
	return int(first[0]) < len(older) && 0 < number && number <= maxKey // the length of a key, or a number of keys
}

// The server's answers about keys, and to a wait.
const (
	ready, notReady         = 0, 1
	stopWaiting, waitCancel = 0, 1
)

// reader reads the parts of queries. After the first error all reads fail.
type reader struct {
	r    *bufio.Reader
	left int // bytes that remain to the query
	err  error

	reading *atomic.Int64 // bytes that all connections of the store have allocated for larger values
	taken   int64         // bytes of reading for this query
}

// begin must be called before each query.
func (r *reader) begin() { r.left = maxQuery }

// end must be called after each query. What the query has read no longer counts.
func (r *reader) end() {
	r.reading.Add(-r.taken)
	r.taken = 0
}

// grow returns b with more capacity, at most n, and counts the memory.
func (r *reader) grow(b []byte, n int) []byte {
	room := min(n, max(smallValue, 2*len(b)))
	more := int64(room - cap(b))
	if r.taken += more; r.reading.Add(more) > maxReading {
		r.err = fmt.Errorf("tcpstore: a value of %d bytes: %w: other values are being sent", n, ErrFull)
		return nil
	}
	return append(make([]byte, 0, room), b...)
}

func (r *reader) full(b []byte) bool {
	if r.err == nil {
		_, r.err = io.ReadFull(r.r, b)
		if errors.Is(r.err, io.EOF) {
			r.err = io.ErrUnexpectedEOF
		}
	}
	return r.err == nil
}

func (r *reader) uint64() uint64 {
	var b [8]byte
	if !r.full(b[:]) {
		return 0
	}
	return binary.NativeEndian.Uint64(b[:])
}

func (r *reader) uint32() uint32 {
	var b [4]byte
	if !r.full(b[:]) {
		return 0
	}
	return binary.NativeEndian.Uint32(b[:])
}

// bytes reads a length and that many bytes. It allocates memory as they arrive.
func (r *reader) bytes(what string, most int) []byte {
	n := r.uint64()
	if r.err == nil && (n > uint64(most) || n > uint64(r.left)) {
		r.err = fmt.Errorf("tcpstore: a %s has %d bytes; at most %d are allowed", what, n, min(most, r.left))
	}
	if r.err != nil {
		return nil
	}
	r.left -= int(n)
	if n <= smallValue {
		b := make([]byte, n)
		r.full(b)
		return b
	}
	var b []byte
	for len(b) < int(n) {
		if b = r.grow(b, int(n)); r.err != nil {
			return nil
		}
		at := len(b)
		if b = b[:cap(b)]; !r.full(b[at:]) {
			return nil
		}
	}
	return b
}

func (r *reader) key() string   { return string(r.bytes("key", maxKey)) }
func (r *reader) value() []byte { return r.bytes("value", maxValue) }

// count reads the number of keys that follow.
func (r *reader) count() int {
	n := r.uint64()
	if r.err == nil && n > maxKeys {
		r.err = fmt.Errorf("tcpstore: a query has %d keys; at most %d are allowed", n, maxKeys)
	}
	if r.err != nil {
		return 0
	}
	return int(n)
}

func (r *reader) keys() (keys []string) {
	for n := r.count(); n > 0 && r.err == nil; n-- {
		keys = append(keys, r.key())
	}
	return keys
}

func appendUint64(b []byte, n uint64) []byte { return binary.NativeEndian.AppendUint64(b, n) }

func appendBytes(b, value []byte) []byte {
	return append(appendUint64(b, uint64(len(value))), value...)
}
