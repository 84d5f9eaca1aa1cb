package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// asked is a launcher that only records what it is asked to start.
type asked struct{ spec func(*launch.Spec) }

func (a asked) Run(_ context.Context, s *launch.Spec, started func(int)) error {
	started(42)
	a.spec(s)
	return nil
}

// routed is an asked launcher for workers on other machines.
type routed struct{ asked }

func (routed) HostAddr(_ context.Context, host string) (string, error) {
	return host + ".example", nil
}

// Tell implements launch.Teller.
func (routed) Tell([]string, []uint32, []byte, []byte) {}

// TestRouter: the master has the address at which others reach its host. If the launcher cannot
// carry its workers' lines, the driver's process listens for them, on loopback only.
func TestRouter(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	for _, remote := range []bool{false, true} {
		seen := asked{func(s *launch.Spec) {
			env := map[string]string{}
			for _, e := range s.Env {
				name, value, _ := strings.Cut(e, "=")
				env[name] = value
			}
			master, door := "a", "127.0.0.1"
			if remote {
				master, door = "a.example", ""
			}
			host, _, _ := net.SplitHostPort(env[plan.EnvLauncherAddr])
			if host != door || env["MASTER_ADDR"] != master || (s.Talk == nil) != remote {
				t.Errorf("remote %v: door at %s, master at %s", remote, env[plan.EnvLauncherAddr], env["MASTER_ADDR"])
			}
		}}
		cfg := Config{
			Command: []string{"train"}, Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1},
			Launcher: seen, Log: log,
		}
		if remote {
			cfg.Launcher = routed{seen}
		}
		if err := Run(t.Context(), cfg); err != nil {
			t.Error(err)
		}
	}
}

// unreached is a routed launcher that never reaches a host. It interrupts the job instead.
type unreached struct {
	routed
	interrupt func()
}

func (u unreached) HostAddr(ctx context.Context, _ string) (string, error) {
	u.interrupt()
	<-ctx.Done()
	return "", context.Cause(ctx)
}

// TestInterruptedBeforeAHostIsReached: an interrupted job does not wait for the addresses of its
// hosts.
func TestInterruptedBeforeAHostIsReached(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(t.Context())
	seen := asked{func(*launch.Spec) { t.Error("a worker was started") }}
	err := Run(ctx, Config{
		Command: []string{"train"}, Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1},
		Launcher: unreached{routed{seen}, cancel}, Log: log,
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
}
