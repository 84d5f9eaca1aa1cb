package agent

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/plan"
)

// runJobAgent implements `hvdrun agent --job`: the agent of one job, which a driver starts. Before
// it has a session with the driver, it reports in one line on stdout; afterwards it writes to the
// driver's log.
func runJobAgent(ctx context.Context, p *cli.Program) error {
	answered := false
	err := serveJob(ctx, p, &answered)
	if err == nil {
		return nil
	}
	if !answered {
		_ = client.Ready{Error: err.Error()}.Write(p.Stdout) // stderr and the exit status report the same
	}
	return cli.Failed(err)
}

func serveJob(ctx context.Context, p *cli.Program, answered *bool) error {
	hello, err := client.ReadHello(p.Stdin)
	if err != nil {
		return err
	}
	if hello.Detach {
		hello.Detach = false
		ready, err := client.Exec{}.Start(ctx, hello.Host, hello)
		if err != nil {
			return errors.Unwrap(err) // the driver adds the name of the host
		}
		*answered = true
		return ready.Write(p.Stdout)
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	if log.Level, err = logrus.ParseLevel(hello.LogLevel); err != nil {
		return err
	}
	cfg := agent.JobConfig{
		Hello: hello, Facts: hostsource.Facts(), Hurry: p.Hurry, Log: log,
		Ready: func(r client.Ready) error {
			*answered = true
			if err := r.Write(p.Stdout); err != nil {
				return err
			}
			return closeStreams()
		},
	}
	if hello.BindGPUs {
		s := settings.Settings{BindGPUs: true, Provenance: settings.Provenance{Origins: map[string]string{}}}
		if cfg.Launcher, cfg.Health, err = agentDevices(&s, log, plan.MaxSlots); err != nil {
			return err
		}
	}
	defer cli.Inherit(log, cli.AgentReaps)()
	return agent.RunJob(ctx, cfg)
}

// closeStreams replaces the standard streams by /dev/null: their other ends may belong to a driver
// that dies, or to an ssh that waits until they are closed.
func closeStreams() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := range 3 {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return os.NewSyscallError("dup3", err)
		}
	}
	return nil
}
