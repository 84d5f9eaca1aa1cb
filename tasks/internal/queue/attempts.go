package queue

import (
	"fmt"
	"time"
)

// ending is how an attempt of a task has ended.
type ending uint8

const (
	completed      ending = iota // with what becomes of the task, whatever that is
	takenBack                    // it did not begin, or was ended to run elsewhere
	workerLost                   // its worker was lost while it ran
	functionFailed               // its function has returned an error
	inputGone                    // its worker has found a stored argument nowhere
)

// endingOf returns how an attempt has ended whose worker says that this came of it.
func endingOf(r Result) ending {
	if r.State != Failed {
		return completed
	}
	switch r.Failure {
	case Gone:
		return inputGone
	case Lost:
		return workerLost
	case ByUser:
		return functionFailed
	}
	return completed
}

// attempts is what has come of the attempts of a task, as far as it counts. It decides whether one
// more follows. The zero value is that of a task that has not run.
type attempts struct {
	tries  uint8 // beyond the first that count against the retries
	deaths uint8 // workers that were lost while they ran it
	lacked uint8 // that found a stored argument nowhere
}

// limits bound the attempts of a task.
type limits struct {
	retries int  // of attempts whose worker was lost, and, with again, of those that failed
	again   bool // the task runs again where its function has failed
	deaths  int  // so many lost workers are the task's fault
	lacked  int  // so many attempts may find an argument nowhere
}

// ended counts an attempt and returns whether another follows, or why the task fails; None: what
// came of the attempt becomes of the task.
func (a *attempts) ended(how ending, of limits) (another bool, why Failure) {
	switch how {
	case takenBack:
		return true, None
	case workerLost:
		if a.deaths++; int(a.deaths) >= of.deaths {
			return false, Poison
		}
		return a.try(of), Lost
	case functionFailed:
		return of.again && a.try(of), None
	case inputGone:
		if int(a.lacked) >= of.lacked {
			return false, Gone
		}
		a.lacked++
		return true, None
	}
	return false, None
}

// try counts another attempt against the retries, where they permit one.
func (a *attempts) try(of limits) bool {
	if int(a.tries) >= of.retries {
		return false
	}
	a.tries++
	return true
}

// attemptEnded goes on with a task that was taken from its worker: another attempt follows, or r is
// what becomes of it. by is the name of the worker.
func (q *Queue) attemptEnded(now time.Time, t *task, how ending, r Result, by string) {
	tries := t.tries
	another, why := t.ended(how, limits{t.Retries, t.Again, q.cfg.Poison, q.cfg.Rebuilds})
	if how == workerLost {
		t.rest().killers = append(t.rest().killers, by)
		r = Result{State: Failed, Failure: why, Text: fmt.Sprintf("its worker %s was lost", by)}
	}
	switch {
	case another:
		if t.tries > tries {
			q.retried++
		}
		if how == workerLost {
			q.Losses = append(q.Losses, t.ID)
		}
		q.retry(now, t)
		return
	case why == Poison:
		r.Text = fmt.Sprintf("its worker was lost %d times while it ran: %v", t.deaths, t.killers)
	case why == Gone:
		r = Result{State: Failed, Failure: Gone, Text: "a stored argument cannot be fetched"}
	case why == None && t.restored:
		q.finishRestored(now, t, r)
		return
	}
	q.finish(now, t, r)
}

// retry has a task wait for its next attempt, and before that for arguments that were lost.
func (q *Queue) retry(now time.Time, t *task) {
	q.move(t, Waiting)
	t.taking = false
	q.await(now, t)
}
