package jobrun

import (
	"context"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
)

// membersHook records the addresses of some members of the cluster whenever the hosts change, for
// the next driver. The agents may know no address but the driver's. Without the record, the next
// driver could only wait until the agents notice that the driver is gone and find the new one,
// which takes some time.
type membersHook struct {
	changed wake.Flag
	ended   chan struct{}
	writing sync.WaitGroup
}

func (h *membersHook) start(_ context.Context, r *run) error {
	if r.dir == nil || r.settings.Cluster.Source == nil {
		return nil
	}
	h.changed, h.ended = wake.New(), make(chan struct{})
	r.events = append(r.events, h.event)
	h.writing.Go(func() { h.write(r) })
	return nil
}

func (h *membersHook) event(e job.Event) {
	if e.Name != job.HostsFound {
		return
	}
	h.changed.Set()
}

func (h *membersHook) write(r *run) {
	for {
		select {
		case <-h.changed:
		case <-h.ended:
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

func (h *membersHook) stop(*run) {
	if h.ended != nil {
		close(h.ended)
		h.writing.Wait()
	}
}
