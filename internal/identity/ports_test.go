package identity

import (
	"net"
	"strings"
	"testing"
)

func TestParsePorts(t *testing.T) {
	for text, want := range map[string]Ports{"": {}, "40000-40100": {40000, 40100}, "7-7": {7, 7}, " 1 - 65535 ": {1, 65535}} {
		if got, err := ParsePorts(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"40000", "40100-40000", "0-5", "1-65536", "a-b", "-", "1-2-3"} {
		if got, err := ParsePorts(text); err == nil || !strings.Contains(err.Error(), "such as 40000-40100") {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// TestPortRange: listeners use the ports of the range until all are in use. Those on loopback, and
// those with a given port, use others.
func TestPortRange(t *testing.T) {
	free, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	UsePorts(Ports{uint16(free), uint16(free)})
	t.Cleanup(func() { UsePorts(Ports{}) })
	if n, err := FreePort(); err != nil || n != free {
		t.Errorf("a free port: %d, %v; want %d", n, err, free)
	}
	first, err := Drivers.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if got := first.Addr().(*net.TCPAddr).Port; got != free {
		t.Errorf("port %d, want %d", got, free)
	}
	if l, err := Drivers.Listen("0.0.0.0:0"); err == nil {
		l.Close()
		t.Error("a second listener has the only port")
	} else if !strings.Contains(err.Error(), "--port-range") {
		t.Error(err)
	}
	near, err := Drivers.Listen(ListenLoopback())
	if err != nil {
		t.Fatal(err)
	}
	near.Close()
}
