package decide

import (
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/job"
)

// told are heartbeats in which all workers report commits of generation 3.
type told uint64

func (told) What(time.Time, string) string              { return "" }
func (told) Straggler(time.Time, string) *job.Straggler { return nil }
func (told) Where(string) string                        { return "" }
func (told) Usage(string) *job.Usage                    { return nil }
func (told) Figures(string) []job.Figure                { return nil }

func (n told) Commits(_ string, generation uint64) uint64 {
	if generation == 3 {
		return uint64(n)
	}
	return 0
}

// TestCommitsOfBeats: a status has the newest number of commits that a worker reported for its
// world, and ignores other worlds.
func TestCommitsOfBeats(t *testing.T) {
	m := &Machine{}
	m.hosts = hosts.New(hosts.Cooldowns{})
	w := &Worker{life{Generation: 3, Phase: training}, identity{id: "w"}}
	for _, c := range []struct{ generation, start, want uint64 }{{3, 5, 7}, {3, 9, 9}, {4, 5, 5}} {
		w.Generation, m.Current.Generation, m.Commits = c.generation, c.generation, c.start
		if got := *m.slotStatus(time.Unix(2, 0), w.slot, w, told(7)).Commits; got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
