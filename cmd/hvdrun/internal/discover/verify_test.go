package discover

import (
	"context"
	"io"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

// stoppingSource is a source that stops the program, as its user would, while it is asked for
// hosts.
type stoppingSource func()

func (s stoppingSource) Discover(ctx context.Context) ([]plan.Host, error) {
	s()
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// TestVerifyCloses: a source is closed exactly once, even if its test ends early.
func TestVerifyCloses(t *testing.T) {
	stopped, stop := context.WithCancel(t.Context())
	for what, c := range map[string]struct {
		source discovery.Discoverer
		broken int
		fails  bool
	}{
		"all is well":       {discovery.Fixed{{Name: "a", Slots: 1}}, 0, false},
		"the first fails":   {failingSource{}, 1, false},
		"the user stops it": {stoppingSource(stop), 0, true},
	} {
		ctx, closes := t.Context(), 0
		if c.fails {
			ctx = stopped
		}
		broken, err := verifySource(&cli.Program{Stdout: io.Discard, Stderr: io.Discard}, ctx, &settings.Settings{}, "discovery-plugin",
			func(string, logrus.FieldLogger) (discovery.Discoverer, func(), error) {
				return c.source, func() { closes++ }, nil
			})
		if closes != 1 || broken != c.broken || (err != nil) != c.fails {
			t.Errorf("%s: closed %d times, %d promises are broken, %v", what, closes, broken, err)
		}
	}
}
