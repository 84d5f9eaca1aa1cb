package follow

import (
	"os"
	"time"
)

// Patience is the time without progress after which something counts as hung. It does not bound
// work: even a machine a hundred times slower than an idle one makes progress in much less time.
const Patience = 2 * time.Minute

// endless is the time after which a wait gives up although the job makes progress, because the
// awaited event does not happen.
const endless = 4 * Patience

// look is the longest time between two observations that counts in full: a longer time can mean
// that the observer lacked CPU time, or that the machine was suspended.
const look = 200 * time.Millisecond

// stillness measures the time without progress.
type stillness struct {
	limit time.Duration
	last  int64
	still time.Duration
}

// hung is called with a number that changes with progress and the time since the last call. It
// reports whether the number has been constant for the limit.
func (s *stillness) hung(moved int64, since time.Duration) bool {
	if moved != s.last {
		s.last, s.still = moved, 0
		return false
	}
	s.still += min(since, look)
	return s.still >= s.limit
}

// moved returns a number that changes with the job's progress: the bytes that it has written to its
// steplog and its events, the output of a command without a steplog, and what Progress returns.
// Other output of hvdrun does not count as progress: it can report a wait repeatedly.
func (r *Running) moved() int64 {
	paths := []string{r.StepLogPath(), r.EventsPath()}
	if len(r.Command) > 0 {
		paths = append(paths, r.OutputPath())
	}
	var n int64
	for _, path := range paths {
		if fi, err := os.Stat(path); err == nil {
			n += fi.Size()
		}
	}
	if r.Progress != nil {
		n += r.Progress()
	}
	return n
}

// Poll calls done until it returns true, at most for [Patience], and returns its last result. Tests
// use [Await].
func Poll(done func() bool) bool { return poll(Patience, done) }

func poll(limit time.Duration, done func() bool) bool {
	s := stillness{limit: limit}
	for last := time.Now(); ; {
		asked := time.Now()
		if done() {
			return true
		}
		time.Sleep(pause(asked))
		now := time.Now()
		if s.hung(0, now.Sub(last)) {
			return false
		}
		last = now
	}
}
