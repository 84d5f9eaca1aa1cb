package queue

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/tasks/report"
)

// mostExplained is the largest number of tasks in an answer.
const mostExplained = 20

// ExplainTask explains the tasks with number n, of which each client may have one.
func (q *Queue) ExplainTask(now time.Time, n uint64) (all []report.Explanation) {
	for id, t := range q.tasks {
		if id.N == n {
			all = append(all, q.explainTask(now, t))
		}
	}
	for _, t := range q.allStopped() {
		if t.ID.N == n {
			all = append(all, q.explainTask(now, t))
		}
	}
	slices.SortFunc(all, func(a, b report.Explanation) int { return cmp.Compare(a.Client, b.Client) })
	return all[:min(len(all), mostExplained)]
}

// ExplainFunction explains the unfinished tasks of a function, those that have waited longest
// first, and its attempts that were asked to stop and have not ended.
func (q *Queue) ExplainFunction(now time.Time, name string) (all []report.Explanation) {
	found := slices.DeleteFunc(q.allStopped(), func(t *task) bool { return t.Group.Name() != name })
	for _, t := range q.tasks {
		if t.Group.Name() == name && !t.state.Over() {
			found = append(found, t)
		}
	}
	slices.SortFunc(found, func(a, b *task) int {
		return cmp.Or(cmp.Compare(a.state, b.state), cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.order, b.order))
	})
	for _, t := range found[:min(len(found), mostExplained)] {
		all = append(all, q.explainTask(now, t))
	}
	return all
}

func (q *Queue) explainTask(now time.Time, t *task) report.Explanation {
	return report.Explanation{
		Client: t.ID.Client, N: t.ID.N, Function: t.Group.Name(), Demand: t.Group.Demand.String(), Priority: t.Priority,
		State: t.state.String(), Tries: int(t.tries), Deaths: int(t.deaths), Why: q.why(now, t),
	}
}

func (q *Queue) why(now time.Time, t *task) string {
	switch t.state {
	case Waiting:
		return q.whyWaiting(t)
	case Ready:
		return q.whyReady(now, t)
	case Sent:
		if t.stopped {
			return fmt.Sprintf("worker %s runs an attempt that, %v", t.worker.Name, t.stoppedStatus(now))
		}
		i := slices.Index(t.worker.sent, t)
		if i < t.worker.running {
			why := "worker " + t.worker.Name + " runs it"
			if t.waits > 0 {
				why += ", and it waits for other tasks"
			}
			return why
		}
		return fmt.Sprintf("worker %s has it, and runs it after %d others", t.worker.Name, i)
	}
	if t.result.Text != "" {
		return t.result.Text
	}
	return "its client has not taken the result yet"
}

func (q *Queue) whyWaiting(t *task) string {
	var parts []string
	for _, id := range t.Needs {
		if n := q.tasks[id]; n != nil && !n.state.Over() {
			parts = append(parts, fmt.Sprintf("task %d (%s, %s)", id.N, n.Group.Name(), n.state))
		}
	}
	for _, id := range q.inputIDs(t) {
		if hosts, size := q.Holders(id); len(hosts) == 0 {
			parts = append(parts, fmt.Sprintf("a stored value of %d bytes, which is computed again", size))
		}
	}
	if len(parts) > 5 {
		parts = append(parts[:5], fmt.Sprintf("%d more", len(parts)-5))
	}
	return "it waits for " + strings.Join(parts, ", ")
}

func (q *Queue) whyReady(now time.Time, t *task) string {
	earlier := 0
	for _, g := range q.order {
		for _, s := range g.shares {
			if q.paused(s.client) {
				continue
			}
			for _, l := range s.lines {
				for _, other := range l.tasks {
					if before(other, t) {
						earlier++
					}
				}
			}
		}
	}
	if a := q.account(t.ID.Client); q.paused(a) {
		return fmt.Sprintf("its client has %d bytes of results that it has not taken, and gets more once it has taken them", a.unread)
	}
	why := ""
	if earlier > 0 {
		why = fmt.Sprintf("%d tasks go before it; ", earlier)
	}
	if w := q.workers[t.Pin]; t.Pin != 0 && w != nil {
		return why + "it is for worker " + w.Name + " alone, which " + q.whyNot(now, w, t.Group)
	}
	if t.Prefer != "" {
		why += "it prefers host " + t.Prefer + "; "
	}
	return why + q.explain(now, t.Group)
}
