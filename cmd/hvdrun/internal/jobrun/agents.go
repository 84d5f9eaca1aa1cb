package jobrun

import (
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// agentsHook makes agents start the workers. If another driver may take over the job, the hook
// records the agents for it.
type agentsHook struct{}

func (*agentsHook) start(ctx context.Context, r *run) error {
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
	return nil
}

func (*agentsHook) stop(r *run) { r.agents.Close() }

// prepareHook starts the agents of fixed hosts before the driver waits for a worker. Agents of this
// machine need no preparation, and the agents of a resumed job run already.
type prepareHook struct{ startOnly }

func (*prepareHook) start(ctx context.Context, r *run) error {
	if r.resumed || r.localOnly {
		return nil
	}
	if err := hostsource.Prepare(ctx, r.agents, r.Fixed, r.Size, r.log); err != nil {
		return cli.Failed(err)
	}
	return nil
}
