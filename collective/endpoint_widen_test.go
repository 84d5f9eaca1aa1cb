package collective_test

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func addrsOf(t *testing.T, all []string) (addrs []netip.Addr) {
	t.Helper()
	for _, a := range all {
		at, err := netip.ParseAddrPort(a)
		if err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, at.Addr())
	}
	return addrs
}

// TestWiden: after Widen, an endpoint on loopback can be reached at its other addresses too.
func TestWiden(t *testing.T) {
	e, err := collective.Listen(collective.Config{Credentials: credentials(t, 0), ListenAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	narrow := e.Addrs()
	wide, err := e.Widen()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(wide, e.Addrs()) || slices.Equal(wide, narrow) {
		t.Errorf("the addresses are %v, and %v after that", narrow, wide)
	}
	for _, addr := range append(narrow, wide...) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Errorf("%s: %v", addr, err)
			continue
		}
		c.Close()
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if _, err := e.Widen(); err == nil {
		t.Error("a closed endpoint is widened")
	}
}

// TestInterfacesAreBoundTo: with names of interfaces, an endpoint listens only on these.
func TestInterfacesAreBoundTo(t *testing.T) {
	e, err := collective.Listen(collective.Config{Credentials: credentials(t, 0), Interfaces: []string{"lo"}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for i, addr := range addrsOf(t, e.Addrs()) {
		if !addr.IsLoopback() {
			t.Errorf("%v is offered, and is no address of lo", addr)
		}
		_, port, _ := net.SplitHostPort(e.Addrs()[i])
		if c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.2", port)); err == nil {
			c.Close()
			t.Errorf("the endpoint listens at 127.0.0.2:%s too", port)
		}
	}
	if _, err := collective.Listen(collective.Config{Credentials: credentials(t, 0), Interfaces: []string{"no-such"}}); err == nil {
		t.Error("an interface that there is not is listened on")
	}
}
