package jobrun

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// passSignals kills the workers when the user asks a second time to stop, and passes on signals
// that are meant for the workers.
func passSignals(ctx context.Context, r *run) (stop func(), err error) {
	pass := cli.Background(func(ctx context.Context) {
		for {
			select {
			case s := <-r.program.Signals:
				sig := s.(syscall.Signal)
				r.log.Infof("%s is passed on to the workers", unix.SignalName(sig))
				r.agents.Signal(sig)
			case <-ctx.Done():
				return
			}
		}
	})
	watch := WatchStop(ctx, r.program, r.log, func() {
		r.again.Set()
		r.agents.Kill()
		r.output.Hurry()
	}, fmt.Sprintf("%v at most, or as long as the last checkpoint grows", r.settings.Timeouts.WithDefaults().Drain))
	return func() {
		pass()
		watch()
	}, nil
}

// WatchStop starts a goroutine that logs when the job is asked to stop, and how long that may take,
// and calls kill when it is asked again. The function that it returns ends the goroutine and waits
// for it.
func WatchStop(ctx context.Context, p *cli.Program, log *logrus.Logger, kill func(), howLong string) func() {
	return cli.Background(func(done context.Context) {
		select {
		case <-ctx.Done():
			level := logrus.WarnLevel
			if errors.Is(context.Cause(ctx), cli.StopSignal{Signal: syscall.SIGPIPE}) {
				level = logrus.DebugLevel // like other programs, silent when a closed pipe ends it
			}
			log.Logf(level, "%v: stopping the workers, %s; again to kill them", context.Cause(ctx), howLong)
		case <-done.Done():
			return
		}
		for {
			select {
			case <-p.Hurry:
				p.Hurried.Store(true)
				log.Warn("killing the workers")
				kill()
			case <-done.Done():
				return
			}
		}
	})
}
