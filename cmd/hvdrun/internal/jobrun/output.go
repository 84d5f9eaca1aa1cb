package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/launch"
)

// outputHook writes the output of the workers.
type outputHook struct{}

func (*outputHook) start(_ context.Context, r *run) error {
	s := r.settings
	r.output = &launch.Output{
		Stdout: cli.Lossy(r.program.Stdout), Stderr: cli.Lossy(r.program.Stderr), Dir: s.OutputDir, Timestamps: s.Timestamps, Log: r.log,
	}
	r.output.Shared = s.Tuning.ShareOutput
	r.cfg.Output = r.output
	return nil
}

func (*outputHook) stop(r *run) { _ = r.output.Close() } // a failure has been logged already
