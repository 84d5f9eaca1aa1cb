package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// deaf returns a machine whose name service does not answer.
func deaf() own {
	return own{resolve: func(ctx context.Context, _, _ string) ([]netip.Addr, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
}

func names(n int) (hosts []string) {
	for i := range n {
		hosts = append(hosts, fmt.Sprintf("node%d", i))
	}
	return hosts
}

// TestNamesAreResolvedSideBySide: if the name service does not answer, LocalHosts waits for a
// hundred names at the same time, and for ten thousand no longer than the bound or the caller's
// context.
func TestNamesAreResolvedSideBySide(t *testing.T) {
	for _, c := range []struct {
		names int
		limit time.Duration // of the context
		want  time.Duration
	}{{100, time.Hour, 4 * time.Second}, {10_000, resolveAll, resolveAll}, {100, time.Millisecond, time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.limit)
			defer cancel()
			begin, told := time.Now(), 0
			done := make(chan int, c.names)
			deaf().each(ctx, append(names(c.names-1), "localhost"), func(i int, its bool) {
				if its != (i == c.names-1) {
					t.Errorf("name %d: local is %v", i, its)
				}
				done <- i
			})
			told = len(done)
			if took := time.Since(begin); took != c.want || told != c.names {
				t.Errorf("%d names: %d were told of in %v, want %v", c.names, told, took, c.want)
			}
		})
	}
}

func TestLocalHosts(t *testing.T) {
	hosts := []string{"localhost", "192.0.2.1", "127.0.0.2", ""}
	local, err := LocalHosts(t.Context(), hosts)
	if err != nil || fmt.Sprint(local) != "[true false true false]" {
		t.Errorf("%v, %v", local, err)
	}
	if AllLocal(t.Context(), hosts) || !AllLocal(t.Context(), hosts[:1]) || AllLocal(t.Context(), nil) {
		t.Error("AllLocal is wrong")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no longer wanted")
	cancel(why)
	if _, err := LocalHosts(ctx, hosts); !errors.Is(err, why) {
		t.Errorf("a context that has ended: %v", err)
	}
}

// TestShortNameIsLocal: the first part of this machine's name means this machine, unless a name
// service knows another machine by it.
func TestShortNameIsLocal(t *testing.T) {
	found := map[string][]netip.Addr{"rack": {netip.MustParseAddr("192.0.2.7")}}
	resolve := func(_ context.Context, _, host string) ([]netip.Addr, error) { return found[host], nil }
	for _, c := range []struct {
		own, host string
		want      bool
	}{
		{"gpu-box-77.unknown", "gpu-box-77", true}, {"gpu-box-77.unknown", "GPU-Box-77", true}, {"gpu-box-77.unknown", "gpu-box-7", false},
		{"rack.example", "rack", false}, {"", "", false}, {".x", "x", false},
	} {
		if got := (own{name: c.own, resolve: resolve}).has(t.Context(), c.host); got != c.want {
			t.Errorf("%q on %q: %v", c.host, c.own, got)
		}
	}
}

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
		if !newOwn().has(t.Context(), host) {
			t.Errorf("%q is this machine", host)
		}
	}
	// 192.0.2.0/24 and 2001:db8::/32 are for documentation, .invalid never resolves (RFC 5737,
	// 3849, 6761).
	for _, host := range []string{"", ".", "192.0.2.1", "2001:db8::1", "no-such-host.invalid", "not a name", "127.0.0.1:22"} {
		if newOwn().has(t.Context(), host) {
			t.Errorf("%q is not this machine", host)
		}
	}
}
