package identity_test

import (
	"net"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
)

func TestListenLoopback(t *testing.T) {
	lis, err := net.Listen("tcp", identity.ListenLoopback())
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	conn, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if at := lis.Addr().(*net.TCPAddr); !at.IP.IsLoopback() {
		t.Errorf("it listens at %v, where others can reach it", at)
	}
}
