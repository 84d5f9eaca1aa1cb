package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
)

// takeSlurm applies the settings of --slurm to the job.
func takeSlurm(_ context.Context, r *run) (stop func(), err error) {
	return nil, hostsource.TakeSlurm(r.settings, r.program.Env, r.dir)
}

// openSource opens the source of the job's hosts.
func openSource(_ context.Context, r *run) (stop func(), err error) {
	r.cfg.Source, stop, err = hostsource.Open(r.settings, r.Fixed, r.log)
	return stop, err
}
