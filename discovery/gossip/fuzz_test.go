package gossip

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"io"
	"net"
	"testing"

	"github.com/hashicorp/memberlist"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// FuzzStranger: whatever arrives over TCP or UDP from a stranger without the key, a member learns
// of no other member, answers little, and continues.
func FuzzStranger(f *testing.F) {
	cfg := agentConfig("a", 0)
	m, err := Join(f.Context(), cfg)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { m.Close() })
	f.Add(pushState("test", 40))
	f.Add([]byte{6, 0x80})
	f.Add([]byte{244, 4, 't', 'e', 's', 't', 0, 0x83})
	f.Add([]byte{12, 0, 0, 0, 0, 9, 2, 0x80})
	f.Fuzz(func(t *testing.T, said []byte) {
		datagram, err := net.Dial("udp", m.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer datagram.Close()
		datagram.Write(said)
		stream, err := net.Dial("tcp", m.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		stream.SetDeadline(sandbox.Limit())
		stream.Write(said)
		stream.(*net.TCPConn).CloseWrite()
		answer, err := io.ReadAll(stream)
		if n, ok := err.(net.Error); ok && n.Timeout() || len(answer) > 4096 {
			t.Errorf("%d bytes of answer, %v", len(answer), err)
		}
		if n := m.agentsKnown(); n != 0 {
			t.Errorf("%d others are known", n)
		}
	})
}

// FuzzAdmit: the beginning of a stream is passed on unchanged if a key of the cluster has encrypted
// it, and otherwise cut short; all blocks are returned.
func FuzzAdmit(f *testing.F) {
	keys, err := memberlist.NewKeyring([][]byte{bytes.Repeat([]byte{2}, keyLen)}, bytes.Repeat([]byte{1}, keyLen))
	if err != nil {
		f.Fatal(err)
	}
	m := newMembers("test", keys)
	f.Add(pushState("test", 40), byte(0))
	f.Add([]byte("whatever a member says"), byte(1))
	f.Add(make([]byte, 3*blockSize), byte(2))
	f.Add([]byte("another key's"), byte(3))
	f.Fuzz(func(t *testing.T, said []byte, key byte) {
		head := pushState("test", uint32(leastSealed+len(said)))
		if key != 0 {
			said = append(head, seal(t, bytes.Repeat([]byte{key}, keyLen), head[len(head)-5:], said)...)
		}
		near, far := net.Pipe()
		go func() {
			far.Write(said) // ends when the other side closes, at the latest
			far.Close()
		}()
		counted := identity.NewPending(identity.Gossip).Admit(near)
		s := m.admit(counted, counted)
		var got []byte
		if s != nil {
			got, _ = io.ReadAll(s)
		}
		near.Close()
		if len(m.blocks) != cap(m.blocks) {
			t.Errorf("%d of %d blocks are back", len(m.blocks), cap(m.blocks))
		}
		switch {
		case key == 1 || key == 2:
			if !bytes.Equal(got, said) {
				t.Errorf("%x became %x", said, got)
			}
		case key != 0 && len(got) != len(head)+leastSealed:
			t.Errorf("%d bytes are handed on of what another key has encrypted", len(got))
		}
	})
}

// seal encrypts a message as memberlist does.
func seal(t *testing.T, key, before, text []byte) []byte {
	t.Helper()
	cipherBlock, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	gcm, err := cipher.NewGCM(cipherBlock)
	if err != nil {
		t.Fatal(err)
	}
	sealed := make([]byte, versionSize+nonceSize)
	sealed[0] = 1
	return gcm.Seal(sealed, sealed[versionSize:], text, append(bytes.Clone(before), "test"...))
}
