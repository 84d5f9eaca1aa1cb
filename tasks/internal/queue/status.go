package queue

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/tasks/report"
)

// mostListed is the largest number of functions in a status. maxWhy bounds, in bytes, the reason
// why tasks of a function do not run. listedFor is how long a function without known tasks is
// listed.
const (
	mostListed = 2000
	listedFor  = 15 * time.Minute
	maxWhy     = 4 << 10
)

// Status returns the status for users.
func (q *Queue) Status(now time.Time) report.Status {
	s := report.Status{Waiting: q.counts[Waiting], Ready: q.counts[Ready], Running: q.counts[Sent], Retried: q.retried, Suspended: q.suspended}
	for _, g := range q.order {
		if len(s.Functions) >= mostListed {
			break
		}
		of := report.GroupStatus{Function: g.Name(), Demand: g.Demand.String(), Ready: g.waiting, PaceUS: g.pace.Microseconds()}
		for _, w := range q.list {
			of.Running += w.lease(g).sent
		}
		if g.known == 0 && now.Sub(g.at) > listedFor {
			continue
		}
		if of.Ready > 0 {
			of.Why = q.explain(now, g)
		} else if of.Running == 0 && len(q.order) > mostListed {
			continue
		}
		s.Functions = append(s.Functions, of)
	}
	for _, w := range q.list {
		s.Workers = append(s.Workers, report.WorkerStatus{
			ID: w.ID, Rank: w.Rank, Name: w.Name, Host: w.Host, Offers: MakeDemand(w.Offers).String(), Running: w.running, Ahead: len(w.sent) - w.running,
			Done: w.done, Leaving: w.leaving, Trains: w.trains, Waits: w.waiting(), Stopped: w.stoppedStatus(now),
		})
	}
	s.Offered = q.functions()
	return s
}

// functions returns the functions that workers can run, sorted by name.
func (q *Queue) functions() []report.Offered {
	of := map[string]*report.Offered{}
	for _, w := range q.list {
		for key := range w.Functions {
			name, _, _ := strings.Cut(key, "@")
			o := of[name]
			if o == nil {
				o = &report.Offered{Function: name}
				of[name] = o
			}
			if o.Workers++; !w.closed() {
				o.CPU += float64(w.Offers[CPU]) / Unit
			}
		}
	}
	all := make([]report.Offered, 0, len(of))
	for _, o := range of {
		all = append(all, *o)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Function < all[j].Function })
	return all
}

// Name returns the function's name, without its hash.
func (g *Group) Name() string {
	name, _, _ := strings.Cut(g.Function, "@")
	return name
}

// explain returns the reason why ready tasks of a group do not run.
func (q *Queue) explain(now time.Time, g *Group) string {
	if len(q.list) == 0 {
		return "there is no worker"
	}
	why := map[string]int{}
	for _, w := range q.list {
		why[q.whyNot(now, w, g)]++
	}
	var all []string
	for text, n := range why {
		if n == 1 {
			all = append(all, "1 worker "+text)
		} else {
			all = append(all, fmt.Sprintf("%d workers %s", n, plural(text)))
		}
	}
	sort.Strings(all)
	return Cut(strings.Join(all, "; "), maxWhy)
}

// Unserved returns the reason why no present worker can run the ready tasks of a group: none has
// what they need, or everything that those workers run waits for tasks. "": one can, or no task is
// ready.
func (q *Queue) Unserved(now time.Time, g *Group) string {
	if g.waiting == 0 || slices.ContainsFunc(q.list, func(w *worker) bool { return w.serves(g) && !w.jammed(q, g) }) {
		return ""
	}
	return fmt.Sprintf("%d tasks of %s (%s) do not run: %s", g.waiting, g.Name(), g.Demand, q.explain(now, g))
}

func (q *Queue) whyNot(now time.Time, w *worker, g *Group) string {
	switch l := w.lease(g); {
	case w.leaving:
		return "leaves"
	case w.trains:
		return "trains"
	case !w.knows(g):
		for f := range w.Functions {
			if strings.HasPrefix(f, g.Name()+"@") {
				return "has the function with other types"
			}
		}
		return "has no such function"
	case !g.Demand.Fits(w.Offers):
		return "offers " + MakeDemand(w.Offers).String() + ", less than " + g.Demand.String()
	case l.state == leaseRefused:
		return "has refused: " + l.why
	case l.state == leaseAsked:
		return fmt.Sprintf("has been asked for a lease %v ago", now.Sub(l.at).Round(time.Millisecond))
	case w.stopped > 0 && !w.mayHave(q, g):
		s := w.stoppedStatus(now)[0]
		return fmt.Sprintf("is busy with a task of %s that, %v", s.Function, s)
	case w.jammed(q, g):
		return w.whyJammed()
	case !w.mayHave(q, g):
		return "is busy"
	}
	return "has room, and the tasks are for others"
}

// plural converts text about one worker to text about many.
func plural(does string) string {
	verb, rest, _ := strings.Cut(does, " ")
	if many := map[string]string{"has": "have", "is": "are"}[verb]; many != "" {
		verb = many
	} else {
		verb = strings.TrimSuffix(verb, "s")
	}
	return strings.TrimSpace(verb + " " + rest)
}
