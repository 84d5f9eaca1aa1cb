package discoverytest_test

import (
	"testing"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
)

// The test of a source runs the kit with a function that returns a source that finds these hosts.
func ExampleRun() {
	_ = func(t *testing.T) { // TestConformance
		discoverytest.Run(t, func(_ *testing.T, hosts []plan.Host) discovery.Discoverer {
			return discovery.Fixed(hosts)
		})
	}
}
