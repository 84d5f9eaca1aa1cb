package jobrun

import (
	"context"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// agentsHook makes agents start the workers. If another driver may take over the job, the hook
// records the agents for it. It starts the agent of this machine at once, while the driver opens
// its journal.
type agentsHook struct{ starting sync.WaitGroup }

func (h *agentsHook) start(ctx context.Context, r *run) error {
	cfg, err := hostsource.Agents(ctx, r.settings, r.Authority, r.Fixed, r.log)
	if err != nil {
		return err
	}
	cfg.Await = !r.Size.Elastic // an elastic job continues without the host and retries it
	if r.dir == nil || r.dir.Secrets.Dir == "" {
		cfg.Orphan = 0 // no driver can take over
	}
	if r.dir != nil {
		cfg.Ahead = func(err error) {
			leave(r.program, r.log, fmt.Sprintf("%v. This hvdrun ends, and the workers train on: put the job's last journal back as %s and "+
				"resume it, or end the workers with `hvdrun stop %s`", err, r.dir.Journal(), r.dir.About.RunID))
		}
		cfg.Keep, cfg.Begun, cfg.Known = true, r.begun, r.known
	}
	r.agents, r.localOnly = client.New(cfg), cfg.LocalOnly
	r.cfg.Launcher = r.agents
	if r.localOnly && !r.resumed {
		h.starting.Go(func() { r.agents.Prepare(ctx, hostsource.HostNames(r.Fixed)) }) // the start of a worker reports a failure
	}
	return nil
}

func (h *agentsHook) stop(r *run) {
	r.agents.Close()
	h.starting.Wait()
}

// prepareHook starts the agents of fixed hosts before the driver waits for a worker. The agents of
// a job on this machine alone are started by agentsHook, and those of a resumed job run already.
type prepareHook struct{ startOnly }

func (*prepareHook) start(ctx context.Context, r *run) error {
	if r.resumed || r.localOnly {
		return nil
	}
	return cli.Failed(hostsource.Prepare(ctx, r.agents, r.Fixed, r.Size, r.log))
}
