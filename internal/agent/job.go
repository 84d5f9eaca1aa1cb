package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// JobConfig configures a job agent: the agent of one job, on a host without an agent of a cluster.
type JobConfig struct {
	// Hello is the message that the job's driver has sent.
	Hello client.Hello
	// Ready sends the agent's address to the driver.
	Ready func(client.Ready) error
	// Facts are data about the host that drivers may ask for.
	Facts Facts
	// Health, Launcher and Hurry are as in Config.
	Health   func(ctx context.Context, bad func(slots []int)) error
	Launcher launch.Launcher
	Hurry    <-chan struct{}
	// Log takes the agent's messages, which the agent also sends to the driver. Nil: a log that
	// prints nothing.
	Log *logrus.Logger
}

// RunJob runs a job agent: it reports its address, serves the job's driver, and blocks until the
// driver has ended the job's session, does not connect in time or is silent for too long, or ctx
// ends. When it returns, none of its processes and goroutines is left.
func RunJob(ctx context.Context, cfg JobConfig) error {
	creds, err := identity.Decode(cfg.Hello.Credentials)
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	if who := creds.Subject(); who.Role != identity.Agent || who.RunID != cfg.Hello.RunID || who.Host != cfg.Hello.Host {
		return fmt.Errorf("agent: the credentials are those of %v", who)
	}
	if cfg.Launcher == nil {
		cfg.Launcher = launch.Local{}
	}
	if cfg.Log == nil {
		cfg.Log = logrus.New()
		cfg.Log.SetOutput(io.Discard)
	}
	listen, err := listenFor(cfg.Hello)
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	ports, err := identity.ParsePorts(cfg.Hello.Ports)
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	identity.UsePorts(ports)
	ln, err := identity.Drivers.Listen(listen)
	if err != nil {
		return fmt.Errorf("agent: listening for the driver: %w", err)
	}
	srv := newServer(cfg.Hello.Host, plan.MaxSlots, cfg.Log)
	srv.launcher, srv.inspect, srv.over = cfg.Launcher, cfg.Facts.inspector(creds), make(chan error, 8)
	srv.audit = newRecorder(cfg.Log, logrus.DebugLevel) // the events file of the job has most of these records
	srv.lines.wake = wake.New()
	cfg.Log.AddHook(&srv.lines)

	a := &agent{
		cfg:    Config{Drain: cfg.Hello.Drain, Hurry: cfg.Hurry, Log: cfg.Log, Health: cfg.Health},
		server: srv, failed: make(chan error, 2),
	}
	if a.cfg.Drain <= 0 {
		a.cfg.Drain = defaultDrain
	}
	side, cancel := context.WithCancel(context.Background())
	defer a.wg.Wait()
	defer cancel()
	a.wg.Go(func() { a.fail(srv.serve(side, ln, creds)) })
	if err := cfg.Ready(cfg.ready(ln)); err != nil {
		return fmt.Errorf("agent: answering: %w", err)
	}
	if cfg.Health != nil {
		a.wg.Go(func() { a.watchHealth(side) })
	}
	return a.attend(ctx, cfg.Hello.Patience, cfg.Hello.Starter)
}

// listenFor returns the address on which a job agent listens, as net.Listen takes it.
func listenFor(hello client.Hello) (string, error) {
	if hello.Listen == "" {
		if hello.Loopback {
			return identity.ListenLoopback(), nil
		}
		return ":0", nil
	}
	own, err := identity.OwnAddr(hello.Listen)
	return netip.AddrPortFrom(own, 0).String(), err
}

func (cfg JobConfig) ready(ln net.Listener) client.Ready {
	r := client.Ready{
		PID: os.Getpid(), Port: ln.Addr().(*net.TCPAddr).Port,
		Build: cfg.Facts.Version, Machine: client.Machine(),
	}
	if at := ln.Addr().(*net.TCPAddr).IP; !at.IsUnspecified() && !at.IsLoopback() {
		r.Addresses = []string{at.String()}
		return r
	}
	for _, addr := range client.OwnAddrs() {
		r.Addresses = append(r.Addresses, addr.String())
	}
	return r
}

// starterLook is how often a job agent checks, until a driver has connected, that the driver that
// started it still runs.
const starterLook = 10 * time.Millisecond

// attend blocks until the job agent is no longer needed. If the driver that started the agent ends
// before it has recorded that, no other driver connects, so attend returns. If the record exists
// after all, the next driver finds that the process has ended and starts another agent.
func (a *agent) attend(ctx context.Context, patience time.Duration, starter int) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	look := time.NewTicker(starterLook)
	defer look.Stop()
	if starter == 0 {
		look.Stop()
	}
	for {
		select {
		case err := <-a.failed:
			return err
		case why := <-a.server.over:
			look.Stop()
			if !errors.Is(why, errTakenOver) {
				return nil
			}
			late.Reset(patience)
		case <-look.C:
			if _, sessions, _ := a.server.busy(); sessions > 0 {
				look.Stop()
			} else if os.Getppid() != starter {
				return errors.New("agent: the driver that started it ended before it connected")
			}
		case <-late.C:
			if _, sessions, _ := a.server.busy(); sessions == 0 {
				return fmt.Errorf("agent: no driver connected within %v", patience)
			}
		case <-ctx.Done():
			a.cfg.Log.Warnf("agent: %v: ending the workers", context.Cause(ctx))
			a.server.drain()
			a.evict(a.cfg.Drain)
			a.flush()
			return nil
		}
	}
}
