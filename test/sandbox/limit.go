package sandbox

import (
	"flag"
	"time"
)

// farewell is the time that a test has to report before the limit of the run.
const farewell = 20 * time.Second

// begun is about the time when the run of tests began. Without a monotonic clock it is also
// comparable with the time in a bubble of testing/synctest.
var begun = time.Now().Round(0)

// Limit returns when the waits of a test give up: shortly before the limit of the run (go test
// -timeout), so that they can report what they wait for. If the run has no limit, it is a year
// after the run began.
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
