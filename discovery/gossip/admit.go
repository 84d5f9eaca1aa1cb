package gossip

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/hashicorp/memberlist"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// The first bytes of memberlist's messages, and the sizes of the parts of an encrypted message: its
// length, a version, a nonce, and the tag of AES-GCM at the end.
const (
	labelMessage     = 244
	encryptedMessage = 10

	lengthSize  = 4
	versionSize = 1
	nonceSize   = 12
	tagSize     = 16
	leastSealed = versionSize + nonceSize + tagSize
)

// members distinguishes streams of members of the cluster from those of strangers.
type members struct {
	label  string
	keys   *memberlist.Keyring
	blocks chan *block                            // free blocks; nil: not allocated yet
	long   func(from net.Addr, bytes, most int64) // called for the first message that is too long; may be nil
	told   sync.Once

	mu   sync.Mutex
	text []byte // the message that is being checked
}

// block is a part of a message. Messages of strangers are kept in reused blocks, because growing
// buffers would leave many times their size to the garbage collector.
type block [blockSize]byte

const blockSize = 4 << 10

func newMembers(label string, keys *memberlist.Keyring) *members {
	// The number of blocks covers the bytes that unproven streams may hold, with one partly filled
	// block for each. A stream that finds no free block therefore waits only for streams that have
	// been evicted and are about to end.
	most := int(identity.Gossip.Total)/blockSize + identity.Gossip.Unproven
	m := &members{label: label, keys: keys, blocks: make(chan *block, most)}
	for range most {
		m.blocks <- nil
	}
	return m
}

// admit reads the first message of a connection. If a key of the cluster has encrypted it, the
// connection counts as proven, and admit returns a connection that starts with the message again.
// For a message that memberlist refuses, it returns a connection with a short beginning to which
// memberlist gives the same answer. It returns nil if the connection has ended or announces a
// message that is too long.
func (m *members) admit(c net.Conn, counted *identity.Conn) net.Conn {
	head, of := m.readHead(c)
	if head == nil {
		return nil
	}
	if of < 0 {
		return &stream{c, head} // another label, or not encrypted: memberlist reads no further
	}
	length := int64(binary.BigEndian.Uint32(head[of+1:]))
	if length > identity.Gossip.Bytes {
		if m.long != nil {
			m.told.Do(func() { m.long(c.RemoteAddr(), length, identity.Gossip.Bytes) })
		}
		return nil
	}
	parts, err := m.read(c, length, counted.Gone())
	defer m.release(parts)
	if err != nil {
		return nil
	}
	if !m.sealed(parts, head[of:]) {
		begin := binary.BigEndian.AppendUint32(head[:of+1], leastSealed)
		return &stream{c, append(begin, make([]byte, leastSealed)...)}
	}
	if !counted.Proven() {
		return nil
	}
	return &stream{c, slices.Concat(append([][]byte{head}, parts...)...)}
}

// readHead reads a stream up to and including the length of its message. It returns the bytes read
// and the offset of the message, or -1 if these bytes make memberlist refuse it. It returns nil if
// the stream has ended.
func (m *members) readHead(c net.Conn) (head []byte, of int) {
	more := func(n int) bool {
		had := len(head)
		head = append(head, make([]byte, n)...)
		_, err := io.ReadFull(c, head[had:])
		return err == nil
	}
	if !more(1) {
		return nil, 0
	}
	label := ""
	if head[0] == labelMessage {
		if !more(1) || !more(int(head[1])) {
			return nil, 0
		}
		label, of = string(head[2:]), len(head)
		if label == m.label && !more(1) {
			return nil, 0
		}
	}
	if label != m.label || head[of] != encryptedMessage {
		return head, -1
	}
	if !more(lengthSize) {
		return nil, 0
	}
	return head, of
}

// read reads n bytes into blocks. It returns an error if the connection ends or gone is closed.
func (m *members) read(c net.Conn, n int64, gone <-chan struct{}) (parts [][]byte, err error) {
	for n > 0 {
		var b *block
		select {
		case b = <-m.blocks:
		case <-gone:
			return parts, net.ErrClosed
		}
		if b == nil {
			b = new(block)
		}
		part := b[:min(n, blockSize)]
		parts = append(parts, part)
		if _, err := io.ReadFull(c, part); err != nil {
			return parts, err
		}
		n -= int64(len(part))
	}
	return parts, nil
}

// release returns the blocks for reuse.
func (m *members) release(parts [][]byte) {
	for _, part := range parts {
		m.blocks <- (*block)(part[:blockSize])
	}
}

// sealed reports whether one of the cluster's keys has encrypted a message. before is the message's
// type and length.
func (m *members) sealed(parts [][]byte, before []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := append(bytes.Clone(before), m.label...)
	for _, key := range m.keys.GetKeys() {
		m.text = slices.Grow(m.text[:0], len(parts)*blockSize)
		for _, part := range parts {
			m.text = append(m.text, part...)
		}
		if len(m.text) < leastSealed {
			return false
		}
		if opens(key, m.text, known) { // a failed attempt overwrites the text
			return true
		}
	}
	return false
}

// opens reports whether the key has encrypted a message. It decrypts in place.
func opens(key, sealed, known []byte) bool {
	cipherBlock, err := aes.NewCipher(key)
	if err != nil {
		return false
	}
	gcm, err := cipher.NewGCM(cipherBlock)
	if err != nil {
		return false
	}
	nonce, text := sealed[versionSize:versionSize+nonceSize], sealed[versionSize+nonceSize:]
	_, err = gcm.Open(text[:0], nonce, text, known)
	return err == nil
}

// stream is a connection that first returns bytes that were read from it before.
type stream struct {
	net.Conn
	begin []byte
}

// Read returns the bytes read before, and then the rest.
func (s *stream) Read(p []byte) (n int, err error) {
	if len(s.begin) == 0 {
		return s.Conn.Read(p)
	}
	n = copy(p, s.begin)
	s.begin = s.begin[n:]
	return n, nil
}
