package queue

import "time"

// TaskCost is about how many bytes a task takes besides its arguments and its result.
const TaskCost = 512

// account is what the tasks of a client take, in bytes.
type account struct {
	tasks  int   // that are known
	open   int64 // of unfinished tasks, with their arguments
	over   int64 // of finished tasks, with their results
	unread int64 // of those results, the ones that the client has not released
	sent   int   // tasks that are with workers
	mean   int64 // moving average of the bytes of a result
}

// share is the ready tasks of a client in a group.
type share struct {
	client  *account
	lines   map[string]*line // by the host that they prefer; pinned: "#" and the worker
	waiting int              // tasks in the lines
}

// ledger is what the tasks of all clients take.
type ledger struct {
	accounts map[uint64]*account // by the client
	bytes    int64               // of all of them
}

// account returns that of a client.
func (l *ledger) account(client uint64) *account {
	a := l.accounts[client]
	if a == nil {
		a = &account{}
		l.accounts[client] = a
	}
	return a
}

// close notes that a task of a client is forgotten: with the last one its account is.
func (l *ledger) close(client uint64) {
	if a := l.account(client); a.tasks > 1 {
		a.tasks--
	} else {
		delete(l.accounts, client)
	}
}

// charge adds what a task takes to the account of its client, or removes it, as it is now: what it
// takes does not change in between.
func (l *ledger) charge(t *task, sign int64) {
	a := l.account(t.ID.Client)
	bytes := int64(t.Cost)
	if !t.state.Over() {
		a.open += sign * bytes
	} else {
		kept := int64(len(t.result.Value))
		if t.result.Failure != Dependency { // those are shared
			kept += int64(len(t.result.Text))
		}
		if t.result.Size == 0 {
			bytes = TaskCost // and its arguments are forgotten
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

// paused returns whether the client has, or will have, so much to read that its tasks wait.
func (q *Queue) paused(a *account) bool {
	return q.cfg.Unread > 0 && a.unread > 0 && a.unread+int64(a.sent)*a.mean > q.cfg.Unread
}

// goOn finds workers for the tasks of a client, which were paused, and are not any more.
func (q *Queue) goOn(now time.Time, client uint64) {
	for _, g := range q.order {
		if g.shares[client] != nil {
			q.seek(now, g)
		}
	}
}

// Usage is what the tasks of a client take, in bytes.
type Usage struct {
	Tasks int
	// Open is the bytes of unfinished tasks, Over those of finished ones, Unread the part of Over
	// that is results which the client has not taken.
	Open, Over, Unread int64
	// Paused: it has so much to take that its tasks wait.
	Paused bool
}

// Bytes returns what all tasks take.
func (l *ledger) Bytes() int64 { return l.bytes }

// Usage returns what the tasks of a client take.
func (q *Queue) Usage(client uint64) Usage {
	a := q.accounts[client]
	if a == nil {
		return Usage{}
	}
	return Usage{Tasks: a.tasks, Open: a.open, Over: a.over, Unread: a.unread, Paused: q.paused(a)}
}
