package jobrun

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// signalsHook kills the workers when a person is impatient, and passes on the signals that are for
// them.
type signalsHook struct{ end func() }

func (h *signalsHook) start(ctx context.Context, r *run) error {
	done := make(chan struct{})
	var passing sync.WaitGroup
	passing.Go(func() {
		for {
			select {
			case s := <-r.program.Signals:
				sig := s.(syscall.Signal)
				r.log.Infof("%s is passed on to the workers", unix.SignalName(sig))
				r.agents.Signal(sig)
			case <-done:
				return
			}
		}
	})
	stopped := WatchStop(ctx, r.program, r.log, func() {
		r.agents.Kill()
		r.output.Hurry()
	}, r.settings.Timeouts.Drain)
	h.end = func() {
		close(done)
		passing.Wait()
		stopped()
	}
	return nil
}

func (h *signalsHook) stop(*run) { h.end() }

// WatchStop logs what happens when the job is asked to stop, and kills the workers when it is asked
// again. The function it returns ends the watch.
func WatchStop(ctx context.Context, p *cli.Program, log *logrus.Logger, kill func(), grace time.Duration) func() {
	if grace == 0 {
		grace = 30 * time.Second
	}
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-ctx.Done():
			level := logrus.WarnLevel
			if errors.Is(context.Cause(ctx), cli.StopSignal{Signal: syscall.SIGPIPE}) {
				level = logrus.DebugLevel // as silent as others that the end of a pipe ends
			}
			log.Logf(level, "%v: stopping the workers, %v at most, or as long as a last checkpoint grows; again to kill them",
				context.Cause(ctx), grace)
		case <-done:
			return
		}
		for {
			select {
			case <-p.Hurry:
				p.Hurried.Store(true)
				log.Warn("killing the workers")
				kill()
			case <-done:
				return
			}
		}
	})
	return func() {
		close(done)
		watching.Wait()
	}
}
