package decide

import (
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
)

// TestCommitsOfBeats: a status has the newest number of commits that a worker reported for its
// world, and ignores other worlds.
func TestCommitsOfBeats(t *testing.T) {
	beats := func(_ string, generation uint64) (b Beat) {
		if generation == 3 {
			b.Commits = 7
		}
		return b
	}
	m := &Machine{}
	m.hosts = hosts.New(hosts.Cooldowns{})
	w := &Worker{life{Generation: 3, Phase: training}, identity{id: "w"}}
	for _, c := range []struct{ generation, start, want uint64 }{{3, 5, 7}, {3, 9, 9}, {4, 5, 5}} {
		w.Generation, m.Current.Generation, m.Commits = c.generation, c.generation, c.start
		if got := *m.slotStatus(time.Unix(2, 0), w.slot, w, beats).Commits; got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
