package discovery

import (
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
)

// TestToldOnce: a message that a script prints in each run is logged once, even if a number in it
// changes; new messages are logged.
func TestToldOnce(t *testing.T) {
	var out strings.Builder
	log := logrus.New()
	log.SetOutput(&out)
	s := Script{Command: `n=$RUN; echo "warning $n of a version" >&2; [ $n != 3 ] || echo other >&2; echo a:1`, Log: log, Told: new(Told)}
	for _, n := range []string{"1", "2", "3", "4"} {
		s.Env = []string{"RUN=" + n}
		if _, err := s.Discover(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n, other := strings.Count(out.String(), "says: warning"), strings.Count(out.String(), "says: other"); n != 1 || other != 1 {
		t.Errorf("%d and %d lines:\n%s", n, other, &out)
	}
}
