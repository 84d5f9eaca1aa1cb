package netif

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

// TestBits: the speed of a link counts only if its hardware has one.
func TestBits(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(root, "class/net", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("eth0/speed", "25000\n")
	write("eth0/device/vendor", "")
	write("bond0/speed", "200000\n")
	write("bond0/bonding/mode", "")
	write("veth0/speed", "10000\n")
	write("virtio/speed", "-1\n")
	write("virtio/device/vendor", "")
	write("torn/speed", "")
	write("torn/device/vendor", "")
	for name, want := range map[string]int64{"eth0": 25e9, "bond0": 200e9, "veth0": 0, "virtio": 0, "torn": 0, "none": 0, "": 0} {
		if got := bits(root, name); got != want {
			t.Errorf("%q: %d bit/s, not %d", name, got, want)
		}
	}
}

func TestRate(t *testing.T) {
	for bits, want := range map[float64]string{100e6: "100 Mbit/s", 1e9: "1 Gbit/s", 25e9: "25 Gbit/s", 9.41e9: "9.4 Gbit/s", 94.6e6: "94.6 Mbit/s", 123.4e9: "123 Gbit/s"} {
		if got := Rate(bits); got != want {
			t.Errorf("%v: %q, not %q", bits, got, want)
		}
	}
}

func TestOwn(t *testing.T) {
	lo := Of(netip.MustParseAddr("127.0.0.1"))
	if lo.Name == "" || !lo.Up || lo.Bits != 0 {
		t.Errorf("loopback is %+v", lo)
	}
	if c := Of(netip.MustParseAddr("::ffff:127.0.0.1")); c != lo {
		t.Errorf("by its address in IPv6 it is %+v", c)
	}
	if c := Of(netip.MustParseAddr("192.0.2.1")); c != (Card{}) {
		t.Errorf("an address that is not this host's is of %+v", c)
	}
}

func TestWatchEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Watch(ctx, func() {}) }()
	cancel()
	if err := <-done; err != nil {
		t.Skip(err) // this kernel reports nothing to this process
	}
}
