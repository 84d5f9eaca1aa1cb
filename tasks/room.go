package tasks

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"
)

// errNoRoom has Submit wait.
var errNoRoom = errors.New("tasks: there is no room")

// roomWarnedAfter is how long Submit waits for room in the scheduler's memory before its user is
// told.
const roomWarnedAfter = 5 * time.Second

// admission bounds the tasks of a client that are not over: by their number, and by the bytes that
// they take of the scheduler.
type admission struct {
	window    int   // how many there may be
	mostBytes int64 // of theirs, as the scheduler says; 0: any number
	bytes     int64 // that they have
	short     int64 // those of the smallest for which Submit waits; 0: it waits for none
	room      chan struct{}
}

// newLimits notes what another connection permits: so many tasks, or fewer where own is not 0.
func (a *admission) newLimits(window, own int) {
	if a.window, a.mostBytes = window, 0; own > 0 {
		a.window = min(window, own)
	}
}

// mayHave notes how many bytes the scheduler takes; 0: what it said before.
func (a *admission) mayHave(bytes uint64) {
	if bytes > 0 {
		a.mostBytes = int64(min(bytes, math.MaxInt64))
	}
	if a.short > 0 && a.hasRoom(a.short) {
		a.retry()
	}
}

// full returns whether there are as many tasks as may be.
func (a *admission) full(tasks int) bool { return tasks >= a.window }

// hasRoom returns whether the scheduler takes so many bytes more.
func (a *admission) hasRoom(more int64) bool { return a.mostBytes == 0 || a.bytes+more <= a.mostBytes }

// take counts the bytes of a task, if there is room.
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

// free gives back what a task took that is over, of which so many are left that are not.
func (a *admission) free(left int, cost int64) {
	a.bytes -= cost
	if left == a.window-1 || a.short > 0 && a.hasRoom(a.short) {
		a.retry()
	}
}

// retry wakes the submitters that wait for room.
func (a *admission) retry() {
	a.short = 0
	close(a.room)
	a.room = make(chan struct{})
}

// waitFor waits for room.
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
				p.cfg.Log.Warnf("tasks: Submit of %s waits: %d bytes of tasks of this program are not over, and the scheduler takes %d now "+
					"(--tasks-memory); hvdrun tasks shows the tasks of each client", f.name, bytes, most)
			}
		case <-ctx.Done():
			return fmt.Errorf("%w for a task of %s: %w", ErrQueueFull, f.name, ctx.Err())
		}
	}
}
