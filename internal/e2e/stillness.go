package e2e

import (
	"os"
	"time"
)

// Patience is how long nothing may move before something counts as hung. It bounds no work: a
// machine that is a hundred times slower than an idle one does not come near it.
const Patience = 2 * time.Minute

// look is the longest time between two looks at what moves that counts as so long. Whoever looks
// may be starved too, or the machine may have slept.
const look = 200 * time.Millisecond

// stillness measures how long nothing has moved.
type stillness struct {
	limit time.Duration
	last  int64
	still time.Duration
}

// hung takes a number that changes when something moves, and the time since the last call. It tells
// whether the number has stayed the same for as long as the limit.
func (s *stillness) hung(moved int64, since time.Duration) bool {
	if moved != s.last {
		s.last, s.still = moved, 0
		return false
	}
	s.still += min(since, look)
	return s.still >= s.limit
}

// moved is the number of bytes that the job has written so far: its diary and its events, and the
// output of a command that writes no diary. What hvdrun prints beside events is no progress: it may
// say again and again that it waits.
func (r *Running) moved() int64 {
	paths := []string{r.DiaryPath(), r.EventsPath()}
	if len(r.Command) > 0 {
		paths = append(paths, r.OutputPath())
	}
	var n int64
	for _, path := range paths {
		if fi, err := os.Stat(path); err == nil {
			n += fi.Size()
		}
	}
	return n
}

// Poll calls done until it returns true, or for [Patience]. It returns what done returned last.
func Poll(done func() bool) bool {
	s := stillness{limit: Patience}
	for last := time.Now(); !done(); time.Sleep(5 * time.Millisecond) {
		now := time.Now()
		if s.hung(0, now.Sub(last)) {
			return false
		}
		last = now
	}
	return true
}
