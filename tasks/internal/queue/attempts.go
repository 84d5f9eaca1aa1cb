package queue

// ending is the way in which an attempt of a task has ended.
type ending uint8

const (
	completed      ending = iota // its result is the result of the task
	takenBack                    // it did not begin, or was stopped to run elsewhere
	workerLost                   // its worker was lost while it ran
	functionFailed               // its function has returned an error
	inputGone                    // its worker could not find a stored argument anywhere
)

// endingOf returns how an attempt has ended whose worker reports r.
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

// attempts counts those attempts of a task that affect whether another one follows. The zero value
// is for a task that has not run.
type attempts struct {
	tries  uint8 // attempts beyond the first that count against the retries
	deaths uint8 // workers that were lost while they ran the task
	lacked uint8 // attempts that could not find a stored argument
}

// limits bound the attempts of a task.
type limits struct {
	retries int  // further attempts after a lost worker and, if again is set, after a failure
	again   bool // the task runs again if its function has failed
	deaths  int  // number of lost workers after which the task is blamed
	lacked  int  // number of attempts that may lack an argument
}

// ended counts an attempt that has ended and reports whether another one follows. If none follows,
// why is the reason why the task fails; None means that the result of the attempt is the result of
// the task.
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

// try counts another attempt against the retries and returns true, or returns false if no retry is
// left.
func (a *attempts) try(of limits) bool {
	if int(a.tries) >= of.retries {
		return false
	}
	a.tries++
	return true
}
