package queue

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
	retries int  // of attempts whose worker was lost, and, with again, of failed ones
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
