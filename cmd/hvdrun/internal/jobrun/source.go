package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
)

// slurmHook applies the settings of --slurm to the job.
type slurmHook struct{ startOnly }

func (*slurmHook) start(_ context.Context, r *run) error {
	return hostsource.TakeSlurm(r.settings, r.program.Env, r.dir)
}

// sourceHook opens the source of the job's hosts.
type sourceHook struct{ close func() }

func (h *sourceHook) start(_ context.Context, r *run) (err error) {
	r.cfg.Source, h.close, err = hostsource.Open(r.settings, r.Fixed, r.log)
	return err
}

func (h *sourceHook) stop(*run) { h.close() }
