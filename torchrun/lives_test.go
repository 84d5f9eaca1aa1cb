package torchrun

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
)

// TestEvidence: a process counts as dead if it has closed its connection and a new one is refused,
// or if another process has its address. It does not count as dead if the connection was reset, as
// by a firewall, or if a new connection is refused and nothing else is known.
func TestEvidence(t *testing.T) {
	p, err := NewPeers(nil, "run", "", discard())
	if err != nil {
		t.Fatal(err)
	}
	refused := fmt.Errorf("torchrun: %w", syscall.ECONNREFUSED)
	for name, c := range map[string]struct {
		end  func(*net.TCPConn)
		dead bool
	}{
		"closed": {func(conn *net.TCPConn) { conn.Close() }, true},
		"goodbye": {func(conn *net.TCPConn) {
			_, _ = conn.Write([]byte{0})
			conn.Close()
		}, true},
		"reset": {func(conn *net.TCPConn) {
			_ = conn.SetLinger(0)
			conn.Close()
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			life := p.life[:lifeLen-1] + "-"
			member := ln.Addr().String() + "/" + life
			p.watch([]string{member})
			defer p.watch(nil)
			take := func() *net.TCPConn {
				conn, err := ln.Accept()
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(conn, make([]byte, 8)); err != nil {
					t.Fatal(err)
				}
				if _, err := conn.Write([]byte(life)); err != nil {
					t.Fatal(err)
				}
				return conn.(*net.TCPConn)
			}
			conn := take()
			if p.evidence(member, refused).Dead() {
				t.Error("dead, and lives")
			}
			c.end(conn)
			if c.dead {
				p.mu.Lock()
				w := p.lives[member]
				p.mu.Unlock()
				<-w.done
			} else {
				defer take().Close() // the watcher connects again
			}
			if is := p.evidence(member, refused).Dead(); is != c.dead {
				t.Errorf("dead: %v", is)
			}
			if p.evidence(member, io.EOF).Dead() {
				t.Error("dead, and not refused")
			}
		})
	}
	t.Run("another process", func(t *testing.T) {
		other, err := NewPeers(nil, "run", "127.0.0.1", discard())
		if err == nil {
			_, err = other.Listen("127.0.0.1:0")
		}
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close(t.Context())
		conn, err := p.greet(t.Context(), other.Member())
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		before := other.Addr() + "/" + p.life
		if _, err = p.greet(t.Context(), before); !p.evidence(before, err).Dead() {
			t.Errorf("not dead: %v", err)
		}
	})
}
