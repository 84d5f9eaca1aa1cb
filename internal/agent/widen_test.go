package agent

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// TestListenOnLoopbackRefusesOthers: a driver whose --listen is a loopback address refuses hosts
// that are other machines, and gives the reason.
func TestListenOnLoopbackRefusesOthers(t *testing.T) {
	l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) {
		cfg.LocalOnly, cfg.Listen = false, netip.MustParseAddr("127.0.0.1")
	})
	l.Widen(func() { t.Error("the driver is told that another machine takes part") })
	failed := l.Prepare(t.Context(), []string{"a"})
	if err := failed["a"]; err == nil || !strings.Contains(err.Error(), "--listen is 127.0.0.1, a loopback address") {
		t.Errorf("a host that is not this machine: %v", err)
	}
}

// TestDriverIsAskedToWiden: the driver is notified once that other machines take part, before
// anything is started there, even if their agents connected before it began.
func TestDriverIsAskedToWiden(t *testing.T) {
	for _, early := range []bool{true, false} {
		l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) { cfg.LocalOnly = false })
		if early {
			if failed := l.Prepare(t.Context(), []string{"a"}); len(failed) > 0 {
				t.Fatal(failed)
			}
		}
		told := 0
		l.Widen(func() { told++ })
		s, _ := script(t, 0, "true")
		if err := start(t, l, s).wait(); err != nil || told != 1 {
			t.Errorf("%v; the driver was told %d times", err, told)
		}
	}
}
