package main

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/gpu"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// runJobAgent is `hvdrun agent --job`: the agent of one job, which a driver has started. What it
// reports before there is a session goes to stdout, in one line; later, into the driver's log.
func (p *program) runJobAgent(ctx context.Context) error {
	answered := false
	err := p.serveJob(ctx, &answered)
	if err == nil {
		return nil
	}
	if !answered {
		_ = client.Ready{Error: err.Error()}.Write(p.stdout) // stderr and the status are the same
	}
	return workFailed(err)
}

func (p *program) serveJob(ctx context.Context, answered *bool) error {
	hello, err := client.ReadHello(p.stdin)
	if err != nil {
		return err
	}
	if hello.Detach {
		hello.Detach = false
		ready, err := client.Exec{}.Start(ctx, hello.Host, hello)
		if err != nil {
			return errors.Unwrap(err) // the driver knows which host this is
		}
		*answered = true
		return ready.Write(p.stdout)
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	if log.Level, err = logrus.ParseLevel(hello.LogLevel); err != nil {
		return err
	}
	cfg := agent.JobConfig{
		Hello: hello, Facts: facts(), Hurry: p.hurry, Log: log,
		Ready: func(r client.Ready) error {
			*answered = true
			if err := r.Write(p.stdout); err != nil {
				return err
			}
			return closeStreams()
		},
	}
	if hello.BindGPUs {
		s := settings{bindGPUs: true, provenance: provenance{origins: map[string]string{}}}
		if cfg.Launcher, cfg.Health, err = s.agentDevices(log, plan.MaxSlots); err != nil {
			return err
		}
	}
	defer inherit(log, agentReaps)()
	return agent.RunJob(ctx, cfg)
}

const (
	// agentReaps and driverReaps are how long an agent and a driver leave inherited processes that
	// have ended to others: an agent starts all of its children by internal/proc, a driver does
	// not.
	agentReaps  = 100 * time.Millisecond
	driverReaps = 10 * time.Second
)

// inherit makes this process the parent of those that its descendants leave behind, and reaps them
// until release is called.
func inherit(log logrus.FieldLogger, patience time.Duration) (release func()) {
	if err := proc.Adopt(); err != nil {
		log.Warnf("what workers leave behind may outlive them: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var reaping sync.WaitGroup
	reaping.Go(func() { proc.Reap(ctx, patience) })
	return func() {
		cancel()
		reaping.Wait()
	}
}

// facts are what an agent reports of its host.
func facts() agent.Facts {
	return agent.Facts{Version: version(), GPUs: func() (int, error) {
		devices, err := localDevices()
		if errors.Is(err, gpu.ErrNoGPU) {
			err = nil
		}
		return len(devices), err
	}}
}

// closeStreams lets go of the streams that this process was given: their other ends may be those of
// a driver that dies, or of an ssh that waits for them to close.
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
