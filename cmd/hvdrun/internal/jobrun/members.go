package jobrun

import (
	"strings"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// rememberMembers writes down, whenever hosts have changed, where some members of the cluster are,
// until the returned function is called. The driver may be the only one whose address agents know:
// then the driver that follows is looked for by agents that have missed the one before, which takes
// some time.
func rememberMembers(s *settings.Settings, d *jobdir.Dir, cfg *driver.Config, log logrus.FieldLogger) (end func()) {
	if d == nil || s.Cluster.Source == nil {
		return func() {}
	}
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	next := cfg.Events
	cfg.Events = func(e job.Event) {
		if next != nil {
			next(e)
		}
		if e.Name != job.HostsFound {
			return
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	var writing sync.WaitGroup
	writing.Go(func() {
		for {
			select {
			case <-changed:
			case <-ended:
				return
			}
			addrs := s.Cluster.Source.Addrs()
			if len(addrs) == 0 {
				continue // those of before may come back
			}
			text := strings.Join(addrs[:min(len(addrs), jobdir.MaxMembers)], "\n") + "\n"
			if err := safefile.Replace(d.MembersPath(), []byte(text), safefile.Private); err != nil {
				log.WithError(err).Warn("another driver would not know the cluster's members")
			}
		}
	})
	return func() {
		close(ended)
		writing.Wait()
	}
}
