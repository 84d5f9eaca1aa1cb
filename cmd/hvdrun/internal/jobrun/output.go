package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/launch"
)

// writeOutput writes the output of the workers.
func writeOutput(_ context.Context, r *run) (stop func(), err error) {
	s := r.settings
	r.output = &launch.Output{
		Stdout: cli.Lossy(r.program.Stdout), Stderr: cli.Lossy(r.program.Stderr), Dir: s.OutputDir, Shared: s.Tuning.ShareOutput,
		Timestamps: s.Timestamps, Log: r.log,
	}
	r.cfg.Output = r.output
	return func() { _ = r.output.Close() }, nil // a failure has been logged already
}
