package elastictest_test

import (
	"math"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/elastic/elastictest"
)

// inTime runs a test of jobs. With -short it uses virtual time and an in-memory network, otherwise
// real time and the kernel's network. No goroutine may remain.
func inTime(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	if testing.Short() {
		synctest.Test(t, test)
		return
	}
	t.Cleanup(func() { goleak.VerifyNone(t) }) // it waits, because timers of a dismissed worker run for a second
	test(t)
}

// timed returns the config for a job of inTime. The job has no time limit, because the test has
// one. In virtual time the seed determines the latencies of the network.
func timed(seed uint64, cfg elastictest.Config) elastictest.Config {
	cfg.Limit = math.MaxInt64
	if testing.Short() {
		return cfg.InMemory(seed)
	}
	return cfg
}

// begin starts a job within inTime.
func begin(cfg elastictest.Config) *elastictest.Job { return elastictest.Start(timed(*firstSeed, cfg)) }
