// Package retry pauses between the attempts of a loop, longer after each failure, and decides which
// failures to log: the first one, each of another kind, and repetitions at growing intervals.
package retry

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"
)

// Backoff computes a pause that doubles with each consecutive failure. It is a plain value: its
// user keeps the number of failures or the last pause.
type Backoff struct {
	First time.Duration // the pause after the first failure
	Most  time.Duration // the longest pause; 0: no bound
}

// After returns the pause after a number of consecutive failures: First after one, twice as long
// after each further one, up to Most, and 0 after none.
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

// Next returns the pause after the pause last: First after 0.
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

// Pause blocks for the time d, or until ctx ends; then it returns the cause.
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

// Row counts the consecutive failures of something that is retried. The zero value is empty. It
// reads no clock and is for one goroutine.
type Row struct {
	// Least is the shortest time between two logged failures of one kind.
	Least time.Duration
	// Quiet is the time from the first failure in which none is logged, for failures that usually
	// pass.
	Quiet time.Duration

	failures int
	since    time.Time // time of the first failure
	kind     string
	next     int // number of failures at which the kind is logged again
	told     time.Time
}

// Failed adds a failure and returns whether to log it: if it is the first, if its text differs from
// that of the last logged failure in more than digits, or if the number of failures has doubled
// since then. Digits are ignored because ports and counters change between failures of the same
// kind.
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

// Warn adds a failure, as Failed does. If the failure is to be logged, it logs what has failed, the
// error, and that it is tried again.
func (r *Row) Warn(log Logger, now time.Time, what string, err error) {
	switch tell := r.Failed(now, err); {
	case !tell:
	case r.failures == 1:
		log.Warnf("%s, trying again: %v", what, err)
	default:
		log.Warnf("%s, %d failures in %v, trying again: %v", what, r.failures, r.For(now).Round(time.Second), err)
	}
}

// Logger is the part of a log that Warn uses.
type Logger interface {
	Warnf(format string, args ...any)
}

// Failures returns the number of failures.
func (r *Row) Failures() int { return r.failures }

// For returns the time since the first failure; 0: no failure.
func (r *Row) For(now time.Time) time.Duration {
	if r.failures == 0 {
		return 0
	}
	return now.Sub(r.since)
}

// Ended empties the row after a success, and returns the number of failures that it had.
func (r *Row) Ended() (failures int) {
	failures = r.failures
	*r = Row{Least: r.Least, Quiet: r.Quiet}
	return failures
}

// gatePause is the shortest time between two lines that a Gate lets through.
const gatePause = 5 * time.Second

// Gate limits the log lines of many rows of one kind, such as those of the workers of a job: it
// lets one line through every 5 s, and counts the others. The zero value lets the next line
// through. Its method may be called by many goroutines.
type Gate struct {
	mu   sync.Mutex
	told time.Time
	left int // lines that were left out since told
}

// Pass returns whether to log a line, and the text with which it ends: the number of lines left out
// since the last one, or "".
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
