package sandbox

import (
	"flag"
	"time"
)

// farewell is the time for what a test says before the limit of the run.
const farewell = 20 * time.Second

// begun is about when the run of tests begins. Without a monotonic clock it is also comparable with
// the time in a bubble of testing/synctest.
var begun = time.Now().Round(0)

// Limit returns when the waits of a test give up: a little before the limit of the run (go test
// -timeout), so that they can say what they wait for. It is a year after the run's begin where the
// run has no limit.
func Limit() time.Time {
	if f := flag.Lookup("test.timeout"); f != nil {
		if limit, is := f.Value.(flag.Getter).Get().(time.Duration); is && limit > 0 {
			return begun.Add(limit - farewell)
		}
	}
	return begun.AddDate(1, 0, 0)
}

// Expired returns a channel that delivers the time at [Limit].
func Expired() <-chan time.Time { return time.After(time.Until(Limit())) }
