package jobrun

import (
	"context"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// startAgents makes agents start the workers. If another driver may take over the job, it records
// the agents for it. It starts the agent of this machine at once, while the driver opens its
// journal.
func startAgents(ctx context.Context, r *run) (stop func(), err error) {
	cfg, err := hostsource.Agents(ctx, r.settings, r.Authority, r.Fixed, r.log)
	if err != nil {
		return nil, err
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
	var starting sync.WaitGroup
	if r.localOnly && !r.resumed {
		starting.Go(func() { r.agents.Prepare(ctx, hostsource.HostNames(r.Fixed)) }) // the start of a worker reports a failure
	}
	return func() {
		r.agents.Close()
		starting.Wait()
	}, nil
}

// prepareAgents starts the agents of fixed hosts before the driver waits for a worker. The agent of
// a job on this machine alone is started by startAgents, and those of a resumed job run already.
func prepareAgents(ctx context.Context, r *run) (stop func(), err error) {
	if r.resumed || r.localOnly {
		return nil, nil
	}
	return nil, cli.Failed(hostsource.Prepare(ctx, r.agents, r.Fixed, r.Size, r.log))
}
