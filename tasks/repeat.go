package tasks

import (
	"slices"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
)

// mostUnaccepted is how many tasks that are over a client remembers, beyond what it needs.
const mostUnaccepted = 1000

// unwritten is what a client says again over the next connection, since the scheduler may not have
// written it down and another one may have taken its place.
type unwritten struct {
	// unaccepted are tasks that the scheduler has not written down, in their order, those that are
	// over too. Those before them are not repeated.
	unaccepted []*taskspb.SubmitTask
	kept       map[uint64]bool // over, and their results are stored
	connects   int             // hellos so far
	remaking   map[uint64]bool // over, and repeated at the last of them for the sake of their results
}

// current returns whether the scheduler knows all that there is to repeat, and its number among
// those that were connected.
func (u *unwritten) current() (connect int, all bool) { return u.connects, len(u.remaking) == 0 }

// remember adds a task that the scheduler has not written down; the lock is held.
func (p *Pool) remember(t *taskspb.SubmitTask) {
	if len(p.unaccepted) > mostUnaccepted+2*(len(p.tasks)+len(p.kept)) { // the scheduler writes nothing down
		p.unaccepted = p.repeated(nil)
	}
	p.unaccepted = append(p.unaccepted, t)
}

// accept notes that tasks up to a number are written down; the lock is held.
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

// repeat says over a new connection what the scheduler may not know of tasks; the lock is held.
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
		part := &taskspb.ToTasks{Submits: []*taskspb.SubmitTask{t}} // in one message, since it may need what is unknown
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

// ends returns the results of tasks that are arguments of unfinished ones. The scheduler may be
// another one than that which sent them, and not have them in its journal. Stored results are left
// out: another scheduler may have to make them again. The lock is held.
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

// repeated returns those of the tasks which the scheduler has not written down that another
// scheduler must know: they are not over, or their result is stored and kept, or is an argument of
// such a task. What those need whose ends are told is not repeated. The lock is held.
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
