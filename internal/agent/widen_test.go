package agent

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// A driver that listens on a loopback address because it was told to refuses hosts that are other
// machines, and says why.
func TestListenOnLoopbackRefusesOthers(t *testing.T) {
	l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) {
		cfg.LocalOnly, cfg.Listen = false, netip.MustParseAddr("127.0.0.1")
	})
	if got := l.ListenAddr(); got != "127.0.0.1:0" {
		t.Errorf("the driver is to listen at %s", got)
	}
	l.Widen(func() (int, error) {
		t.Error("the driver is asked to listen elsewhere")
		return 1, nil
	})
	failed := l.Prepare(t.Context(), []string{"a"})
	if err := failed["a"]; err == nil || !strings.Contains(err.Error(), "--listen is 127.0.0.1, a loopback address") {
		t.Errorf("a host that is not this machine: %v", err)
	}
}

// The driver is asked once to listen for other machines, before anything is started there, also by
// agents that were there before it began.
func TestDriverIsAskedToWiden(t *testing.T) {
	for _, early := range []bool{true, false} {
		l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) { cfg.LocalOnly = false })
		if early {
			if failed := l.Prepare(t.Context(), []string{"a"}); len(failed) > 0 {
				t.Fatal(failed)
			}
		}
		far := echo(t, "the far port")
		asked := 0
		l.Listening(1)
		l.Widen(func() (int, error) {
			asked++
			return int(far.Port()), nil
		})
		s, _ := script(t, 0, "exec 3<>/dev/tcp/${HVD_DRIVER_ADDR%:*}/${HVD_DRIVER_ADDR##*:}; echo hello >&3; head -n 1 <&3")
		s.Command[0] = "bash"
		r := start(t, l, s)
		if err := r.wait(); err != nil || r.stdout.String() != "the far port heard hello\n" {
			t.Errorf("%v, %q", err, r.stdout.String())
		}
		if asked != 1 {
			t.Errorf("the driver was asked %d times", asked)
		}
	}
}
