// Package retry pauses between the attempts of a loop, longer after each failure, and decides which
// failures are logged: the first one, each one of another kind, and repetitions ever less often.
package retry

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"
)

// Backoff is a pause that doubles with each failure in a row. It is a plain value: its user keeps
// the number of failures, or the last pause.
type Backoff struct {
	First time.Duration // the pause after the first failure
	Most  time.Duration // the longest pause; 0: no bound
}

// After returns the pause after so many failures in a row: First after one, twice as long after
// each further one, up to Most, and 0 after none.
func (b Backoff) After(failures int) (pause time.Duration) {
	for range failures {
		next := b.Next(pause)
		if next == pause {
			break
		}
		pause = next
	}
	return pause
}

// Next returns the pause that follows another: First after 0.
func (b Backoff) Next(last time.Duration) time.Duration {
	most := b.Most
	if most <= 0 {
		most = math.MaxInt64
	}
	if last <= 0 {
		return min(b.First, most)
	}
	last = min(last, most)
	return last + min(last, most-last) // cannot overflow
}

// Pause blocks for the time d, or until ctx ends, whose cause it returns then.
func Pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Row is a row of failures of one thing that is tried again and again. The zero value is empty. It
// reads no clock and is for one goroutine.
type Row struct {
	// Least is the shortest time between two failures of one kind that are told.
	Least time.Duration
	// Quiet is the time from the first failure in which none is told, where failures that pass are
	// no news.
	Quiet time.Duration

	failures int
	since    time.Time // the first
	kind     string
	next     int // the number of failures at which one of the kind is told again
	told     time.Time
}

// Failed adds a failure, and returns whether it is to be told: where it is the first, where its
// text differs from the last one's in more than digits, and otherwise each time that there are
// twice as many. Ports and counters do not make another failure of it.
func (r *Row) Failed(now time.Time, err error) (tell bool) {
	if r.failures++; r.failures == 1 {
		r.since = now
	}
	kind := strings.Map(func(c rune) rune {
		if '0' <= c && c <= '9' {
			return -1
		}
		return c
	}, err.Error())
	if now.Sub(r.since) < r.Quiet {
		return false
	}
	if kind == r.kind && (r.failures < r.next || now.Sub(r.told) < r.Least) {
		return false
	}
	r.kind, r.next, r.told = kind, 2*r.failures, now
	return true
}

// Warn adds a failure, as Failed does, and logs it where it is to be told: what has failed and is
// tried again.
func (r *Row) Warn(log Logger, now time.Time, what string, err error) {
	switch tell := r.Failed(now, err); {
	case !tell:
	case r.failures == 1:
		log.Warnf("%s, trying again: %v", what, err)
	default:
		log.Warnf("%s, %d failures in %v, trying again: %v", what, r.failures, r.For(now).Round(time.Second), err)
	}
}

// Logger is what Warn needs of a log.
type Logger interface {
	Warnf(format string, args ...any)
}

// Failures is their number.
func (r *Row) Failures() int { return r.failures }

// For is how long ago the first one was; 0: no failure.
func (r *Row) For(now time.Time) time.Duration {
	if r.failures == 0 {
		return 0
	}
	return now.Sub(r.since)
}

// Ended ends the row, because what was tried has succeeded, and returns how many failures it had.
func (r *Row) Ended() (failures int) {
	failures = r.failures
	*r = Row{Least: r.Least, Quiet: r.Quiet}
	return failures
}

// gatePause is the least time between two lines that a Gate lets through.
const gatePause = 5 * time.Second

// Gate is shared by the rows of many things of one kind, such as the workers of a job. It lets one
// of their lines through in 5 s, and counts the others. The zero value lets the next one through.
// Its method may be called by many goroutines.
type Gate struct {
	mu   sync.Mutex
	told time.Time
	left int // lines that were left out since told
}

// Pass returns whether a line is to be told, and what it is to end with: how many were left out
// since the last one, or nothing.
func (g *Gate) Pass(now time.Time) (more string, tell bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now.Sub(g.told) < gatePause {
		g.left++
		return "", false
	}
	if g.left > 0 {
		more = fmt.Sprintf("; and %d more such failures in %v", g.left, now.Sub(g.told).Round(time.Second))
	}
	g.told, g.left = now, 0
	return more, true
}
