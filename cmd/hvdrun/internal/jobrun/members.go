package jobrun

import (
	"context"
	"strings"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
)

// recordMembers records the addresses of some members of the cluster whenever the hosts change, for
// the next driver. The agents may know no address but the driver's. Without the record, the next
// driver could only wait until the agents notice that the driver is gone and find the new one,
// which takes some time.
func recordMembers(_ context.Context, r *run) (stop func(), err error) {
	if r.dir == nil || r.settings.Cluster.Source == nil {
		return nil, nil
	}
	changed := wake.New()
	r.events = append(r.events, func(e job.Event) {
		if e.Name == job.HostsFound {
			changed.Set()
		}
	})
	return cli.Background(func(ctx context.Context) { r.writeMembers(ctx, changed) }), nil
}

// writeMembers writes the record at each change, until ctx ends.
func (r *run) writeMembers(ctx context.Context, changed wake.Flag) {
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		addrs := r.settings.Cluster.Source.Addrs()
		if len(addrs) == 0 {
			continue // keep the record: those members may return
		}
		text := strings.Join(addrs[:min(len(addrs), jobdir.MaxMembers)], "\n") + "\n"
		if err := safefile.Replace(r.dir.MembersPath(), []byte(text), safefile.Private); err != nil {
			r.log.WithError(err).Warn("another driver would not know the cluster's members")
		}
	}
}
