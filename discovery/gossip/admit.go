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

// The first bytes of memberlist's messages, and what those have that are encrypted: their length,
// a version, a nonce, and the tag of AES-GCM at the end.
const (
	labelMessage     = 244
	encryptedMessage = 10

	lengthSize  = 4
	versionSize = 1
	nonceSize   = 12
	tagSize     = 16
	leastSealed = versionSize + nonceSize + tagSize
)

// members tells streams of members of the cluster from those of strangers.
type members struct {
	label  string
	keys   *memberlist.Keyring
	blocks chan *block                            // that are free; nil: it is to be made
	long   func(from net.Addr, bytes, most int64) // is called for the first message that is too long, unless nil
	told   sync.Once

	mu   sync.Mutex
	text []byte // of the message that is being checked
}

// block is a part of a message. Messages of strangers are kept in blocks that are used again,
// because buffers that grow leave many times their size to the garbage collector.
type block [blockSize]byte

const blockSize = 4 << 10

func newMembers(label string, keys *memberlist.Keyring) *members {
	// What unproven streams may hold, with one block of each that is partly filled. So a stream
	// that finds no block waits only for those that have given way and are about to end.
	most := int(identity.Gossip.Total)/blockSize + identity.Gossip.Unproven
	m := &members{label: label, keys: keys, blocks: make(chan *block, most)}
	for range most {
		m.blocks <- nil
	}
	return m
}

// admit reads the first message of a connection. It returns a connection that begins with it if a
// key of the cluster has encrypted it, which is proven then. For what memberlist refuses it returns
// one that is short, so that memberlist answers as it does; nil if the connection has ended, or
// announces too much.
func (m *members) admit(c net.Conn, counted *identity.Conn) net.Conn {
	head, of := m.readHead(c)
	if head == nil {
		return nil
	}
	if of < 0 {
		return &stream{c, head} // of another label, or not encrypted: memberlist reads no more of it
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

// readHead reads a stream up to the length of its message, and returns it with the place where the
// message begins; -1 if memberlist refuses it by what it has read. It returns nil if the stream has
// ended.
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

// read reads so many bytes into blocks, unless the connection is gone.
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

// release has the blocks used again.
func (m *members) release(parts [][]byte) {
	for _, part := range parts {
		m.blocks <- (*block)(part[:blockSize])
	}
}

// sealed returns whether one of the cluster's keys has encrypted a message; before is its type and
// length.
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
		if opens(key, m.text, known) { // what it does not open it overwrites
			return true
		}
	}
	return false
}

// opens returns whether the key has encrypted a message. It decrypts in place.
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

// stream is a connection of which something was read before.
type stream struct {
	net.Conn
	begin []byte
}

// Read returns what was read before, and then the rest.
func (s *stream) Read(p []byte) (n int, err error) {
	if len(s.begin) == 0 {
		return s.Conn.Read(p)
	}
	n = copy(p, s.begin)
	s.begin = s.begin[n:]
	return n, nil
}
