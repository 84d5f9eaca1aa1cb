package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// asked is a launcher that only records what it has to start.
type asked struct{ spec func(*launch.Spec) }

func (a asked) Run(_ context.Context, s *launch.Spec, started func(int)) error {
	started(42)
	a.spec(s)
	return nil
}

// routed is an asked launcher for workers on other machines.
type routed struct {
	asked
	port *int
}

func (routed) ListenAddr() string   { return ":0" }
func (r routed) Listening(port int) { *r.port = port }
func (routed) HostAddr(_ context.Context, host string) (string, error) {
	return host + ".example", nil
}

// The driver is reachable from other machines only if workers may be there.
func TestRouter(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	for _, remote := range []bool{false, true} {
		told := 0
		seen := asked{func(s *launch.Spec) {
			env := map[string]string{}
			for _, e := range s.Env {
				name, value, _ := strings.Cut(e, "=")
				env[name] = value
			}
			host, port, err := net.SplitHostPort(env[plan.EnvDriverAddr])
			master := "a"
			if remote {
				master = "a.example"
			}
			if err != nil || !remote && host != "127.0.0.1" || remote && port != strconv.Itoa(told) || env["MASTER_ADDR"] != master {
				t.Errorf("driver at %s, master at %s", env[plan.EnvDriverAddr], env["MASTER_ADDR"])
			}
			conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.2", port))
			if (err == nil) != remote {
				t.Errorf("remote %v: connecting by another address: %v", remote, err)
			}
			if err == nil {
				conn.Close()
			}
		}}
		cfg := Config{
			Command: []string{"train"}, Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1},
			Launcher: seen, Log: log,
		}
		if remote {
			cfg.Launcher = routed{seen, &told}
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

// An interrupted job does not wait for the addresses of its hosts.
func TestInterruptedBeforeAHostIsReached(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(t.Context())
	seen := asked{func(*launch.Spec) { t.Error("a worker was started") }}
	err := Run(ctx, Config{
		Command: []string{"train"}, Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1},
		Launcher: unreached{routed{seen, new(int)}, cancel}, Log: log,
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
}

// widened is a routed launcher whose workers are on this machine until one is started.
type widened struct {
	routed
	open *func() (int, error)
}

func (widened) ListenAddr() string                        { return "127.0.0.1:0" }
func (w widened) Widen(open func() (port int, err error)) { *w.open = open }

// The driver listens on loopback until the launcher asks for more, and on both after that.
func TestWidener(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	near := 0
	var open func() (int, error)
	reaches := func(host string, port int) bool {
		conn, err := net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			conn.Close()
		}
		return err == nil
	}
	seen := asked{func(*launch.Spec) {
		if !reaches("127.0.0.1", near) || reaches("127.0.0.2", near) {
			t.Error("the driver does not listen on loopback alone")
		}
		far, err := open()
		if err != nil || !reaches("127.0.0.2", far) || !reaches("127.0.0.1", near) {
			t.Errorf("the driver is not reached at port %d: %v", far, err)
		}
	}}
	err := Run(t.Context(), Config{
		Command: []string{"train"}, Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1},
		Launcher: widened{routed{seen, &near}, &open}, Log: log,
	})
	if err != nil {
		t.Error(err)
	}
}
