package queue

import "time"

// TaskCost is approximately how many bytes a task takes in addition to its arguments and its
// result.
const TaskCost = 512

// account is the memory that a client's tasks take, in bytes.
type account struct {
	tasks  int   // number of known tasks
	open   int64 // of unfinished tasks, with their arguments
	over   int64 // of finished tasks, with their results
	unread int64 // the part of over that the client's unreleased results take
	sent   int   // number of tasks that are with workers
	mean   int64 // moving average of the size of a result
}

// share holds the ready tasks of a client in a group.
type share struct {
	client  *account
	lines   map[string]*line // by the preferred host or, for pinned tasks, "#" and the worker
	waiting int              // number of tasks in the lines
}

// ledger is the memory that the tasks of all clients take.
type ledger struct {
	accounts map[uint64]*account // by client
	bytes    int64               // total of all accounts
}

// account returns the account of a client, which it creates if necessary.
func (l *ledger) account(client uint64) *account {
	a := l.accounts[client]
	if a == nil {
		a = &account{}
		l.accounts[client] = a
	}
	return a
}

// close records that a task of a client is forgotten. It deletes the client's account with its last
// task.
func (l *ledger) close(client uint64) {
	if a := l.account(client); a.tasks > 1 {
		a.tasks--
	} else {
		delete(l.accounts, client)
	}
}

// charge adds the memory that a task takes now to the account of its client, or subtracts it if
// sign is -1. That memory must not change between the two calls.
func (l *ledger) charge(t *task, sign int64) {
	a := l.account(t.ID.Client)
	bytes := int64(t.Cost)
	if !t.state.Over() {
		a.open += sign * bytes
	} else {
		kept := int64(len(t.result.Value))
		if t.result.Failure != Dependency { // tasks share the text otherwise
			kept += int64(len(t.result.Text))
		}
		if t.result.Size == 0 {
			bytes = TaskCost // its arguments are no longer stored
		}
		bytes += kept
		if sign > 0 {
			a.mean += (kept - a.mean) / 8
		}
		if a.over += sign * bytes; !t.released {
			a.unread += sign * kept
		}
	}
	l.bytes += sign * bytes
}

// paused reports whether the client has, or is about to have, so many unread results that its tasks
// must wait.
func (q *Queue) paused(a *account) bool {
	return q.cfg.Unread > 0 && a.unread > 0 && a.unread+int64(a.sent)*a.mean > q.cfg.Unread
}

// goOn finds workers for the tasks of a client that was paused until now.
func (q *Queue) goOn(now time.Time, client uint64) {
	for _, g := range q.order {
		if g.shares[client] != nil {
			q.seek(now, g)
		}
	}
}

// Usage is the memory that the tasks of a client take, in bytes.
type Usage struct {
	Tasks int
	// Open is the size of unfinished tasks, and Over that of finished ones. Unread is the part of
	// Over that the results take which the client has not taken.
	Open, Over, Unread int64
	// Paused means that the client has so many unread results that its tasks wait.
	Paused bool
}

// Bytes returns the memory that all tasks take, in bytes.
func (l *ledger) Bytes() int64 { return l.bytes }

// Usage returns the memory that the tasks of a client take.
func (q *Queue) Usage(client uint64) Usage {
	a := q.accounts[client]
	if a == nil {
		return Usage{}
	}
	return Usage{Tasks: a.tasks, Open: a.open, Over: a.over, Unread: a.unread, Paused: q.paused(a)}
}
