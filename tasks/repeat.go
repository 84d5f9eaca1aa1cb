package tasks

import (
	"slices"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
)

// mostUnaccepted is the number of finished tasks that a client remembers in addition to those that
// it needs.
const mostUnaccepted = 1000

// unwritten is what a client repeats over its next connection, because the scheduler may not have
// recorded it and another scheduler may have taken its place.
type unwritten struct {
	// unaccepted are the tasks that the scheduler has not recorded, in their order, including
	// finished ones. Tasks before these are not repeated.
	unaccepted []*taskspb.SubmitTask
	kept       map[uint64]bool // finished tasks whose results are stored
	connects   int             // number of connections so far
	remaking   map[uint64]bool // finished tasks that were repeated over the last connection, so that their results are made again
}

// current returns the number of the current connection, and reports whether the scheduler knows
// everything that had to be repeated.
func (u *unwritten) current() (connect int, all bool) { return u.connects, len(u.remaking) == 0 }

// remember adds a task that the scheduler has not recorded. The caller holds the lock.
func (p *Pool) remember(t *taskspb.SubmitTask) {
	if len(p.unaccepted) > mostUnaccepted+2*(len(p.tasks)+len(p.kept)) { // the scheduler records nothing
		p.unaccepted = p.repeated(nil)
	}
	p.unaccepted = append(p.unaccepted, t)
}

// accept records that the scheduler has recorded all tasks up to number n. The caller holds the
// lock.
func (p *Pool) accept(n uint64) {
	i := 0
	for ; i < len(p.unaccepted) && p.unaccepted[i].GetN() <= n; i++ {
		if t := p.tasks[p.unaccepted[i].GetN()]; t != nil {
			t.submit = nil
		}
		p.unaccepted[i] = nil
	}
	p.unaccepted = p.unaccepted[i:]
}

// repeat sends what the scheduler may not know about tasks over a new connection. The caller holds
// the lock.
func (p *Pool) repeat() {
	ends := p.ends()
	p.unaccepted = p.repeated(ends)
	p.connects++
	p.remaking = map[uint64]bool{}
	for _, t := range p.unaccepted {
		end := ends[t.GetN()]
		delete(ends, t.GetN())
		if p.tasks[t.GetN()] == nil && end == nil {
			p.remaking[t.GetN()] = true
		}
		part := &taskspb.ToTasks{Submits: []*taskspb.SubmitTask{t}} // in one message, because the task may need tasks that the scheduler does not know
		if end != nil {
			part.Ends = []*taskspb.TaskTold{{N: t.GetN(), Result: end}}
		}
		p.send(part, func(m *taskspb.ToTasks) {
			m.Submits, m.Ends = append(m.Submits, part.GetSubmits()...), append(m.Ends, part.GetEnds()...)
		})
	}
	for n, end := range ends {
		told := &taskspb.TaskTold{N: n, Result: end}
		p.send(told, func(m *taskspb.ToTasks) { m.Ends = append(m.Ends, told) })
	}
}

// ends returns the results of tasks that are arguments of unfinished ones. The scheduler may not be
// the one that sent these results, and may not have them in its journal. Stored results are left
// out, because another scheduler may have to make them again. The caller holds the lock.
func (p *Pool) ends() map[uint64]*taskspb.TaskResult {
	all := map[uint64]*taskspb.TaskResult{}
	for _, t := range p.tasks {
		for _, need := range t.needs {
			if n, ok := need.(*pending); ok && n.result != nil && n.result.GetSize() == 0 {
				all[n.n] = n.result
			}
		}
	}
	return all
}

// repeated returns those tasks in unaccepted that another scheduler must know: unfinished tasks,
// tasks whose stored results are kept, and tasks whose results are arguments of such tasks. A task
// in ends is repeated with its result, so the tasks that it needs are not repeated. The caller
// holds the lock.
func (p *Pool) repeated(ends map[uint64]*taskspb.TaskResult) (all []*taskspb.SubmitTask) {
	needed := make(map[uint64]bool)
	for _, t := range slices.Backward(p.unaccepted) {
		if p.tasks[t.GetN()] == nil && !p.kept[t.GetN()] && !needed[t.GetN()] {
			continue
		}
		all = append(all, t)
		if ends[t.GetN()] != nil {
			continue
		}
		for _, n := range t.GetOptions().GetNeeds() {
			needed[n] = true
		}
	}
	slices.Reverse(all)
	return all
}
