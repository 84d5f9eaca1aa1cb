package tasks

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"
)

// errNoRoom makes Submit wait.
var errNoRoom = errors.New("tasks: there is no room")

// roomWarnedAfter is how long Submit waits for room in the scheduler's memory before it logs a
// warning.
const roomWarnedAfter = 5 * time.Second

// admission bounds the unfinished tasks of a client: their number, and the bytes that they take in
// the scheduler.
type admission struct {
	window    int   // largest number of tasks
	mostBytes int64 // largest number of bytes, as the scheduler has set it; 0: no limit
	bytes     int64 // bytes that the tasks take now
	short     int64 // size of the smallest task for which a Submit waits; 0: no Submit waits
	room      chan struct{}
}

// newLimits sets the largest number of tasks for a new connection: window, or own if that is
// smaller and not 0.
func (a *admission) newLimits(window, own int) {
	if a.window, a.mostBytes = window, 0; own > 0 {
		a.window = min(window, own)
	}
}

// mayHave sets the largest number of bytes that the scheduler accepts; 0: unchanged.
func (a *admission) mayHave(bytes uint64) {
	if bytes > 0 {
		a.mostBytes = int64(min(bytes, math.MaxInt64))
	}
	if a.short > 0 && a.hasRoom(a.short) {
		a.retry()
	}
}

// hasRoom reports whether the scheduler accepts that many further bytes.
func (a *admission) hasRoom(more int64) bool { return a.mostBytes == 0 || a.bytes+more <= a.mostBytes }

// take counts the bytes of a task and returns true, or returns false if there is no room.
func (a *admission) take(cost int64) bool {
	if !a.hasRoom(cost) {
		if a.short == 0 || cost < a.short {
			a.short = cost
		}
		return false
	}
	a.bytes += cost
	return true
}

// free gives back the bytes of a task that is over. left is the number of tasks that are still
// unfinished.
func (a *admission) free(left int, cost int64) {
	a.bytes -= cost
	if left == a.window-1 || a.short > 0 && a.hasRoom(a.short) {
		a.retry()
	}
}

// retry wakes the calls of Submit that wait for room.
func (a *admission) retry() {
	a.short = 0
	close(a.room)
	a.room = make(chan struct{})
}

// waitFor blocks until room is closed or ctx ends.
func (p *Pool) waitFor(ctx context.Context, room <-chan struct{}, f *function) error {
	warn := time.NewTimer(roomWarnedAfter)
	defer warn.Stop()
	for {
		select {
		case <-room:
			return nil
		case <-warn.C:
			p.mu.Lock()
			bytes, most, short := p.bytes, p.mostBytes, p.short > 0
			p.mu.Unlock()
			if short {
				p.cfg.Log.Warnf("tasks: Submit of %s waits: the unfinished tasks of this program have %d bytes, and the scheduler allows %d now "+
					"(--tasks-memory); hvdrun tasks shows the tasks of each client", f.name, bytes, most)
			}
		case <-ctx.Done():
			return fmt.Errorf("%w for a task of %s: %w", ErrQueueFull, f.name, ctx.Err())
		}
	}
}
