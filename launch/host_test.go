package launch_test

import (
	"net"
	"os"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
)

func TestIsLocal(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	local := []string{
		"localhost", "LOCALHOST", "localhost.", own,
		"127.0.0.1", "127.0.0.2", "127.255.0.9", "::1", "[::1]", "::ffff:127.0.0.1",
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		local = append(local, a.(*net.IPNet).IP.String())
	}
	for _, host := range local {
		if !launch.IsLocal(host) {
			t.Errorf("%q is this machine", host)
		}
	}
	// 192.0.2.0/24 and 2001:db8::/32 are for documentation, .invalid never resolves (RFC 5737,
	// 3849, 6761).
	for _, host := range []string{"", ".", "192.0.2.1", "2001:db8::1", "no-such-host.invalid", "not a name", "127.0.0.1:22"} {
		if launch.IsLocal(host) {
			t.Errorf("%q is not this machine", host)
		}
	}
}
