package queue

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"
)

// Status is what people want to see of a queue.
type Status struct {
	Waiting   int            `json:"waiting"` // for results that are arguments
	Ready     int            `json:"ready"`
	Running   int            `json:"running"` // or sent ahead
	Retried   int            `json:"retried"`
	Functions []GroupStatus  `json:"functions,omitempty"`
	Workers   []WorkerStatus `json:"workers,omitempty"`
	// Suspended are the tasks of a journal, among the waiting ones, for which workers are waited
	// that may have them.
	Suspended int `json:"suspended,omitempty"`
	// Journal says what is wrong with the journal; empty: nothing.
	Journal string `json:"journal,omitempty"`
	// Memory is what tasks take, in bytes, where it is bounded.
	Memory *Memory `json:"memory,omitempty"`
	// Offered are the functions that workers have, by name.
	Offered []Offered `json:"offered,omitempty"`
}

// Memory is how many bytes tasks and their results take of the scheduler, and of how many.
type Memory struct {
	Used int64 `json:"used"`
	Most int64 `json:"most"`
	// Clients are those that take most, in that order.
	Clients []ClientStatus `json:"clients,omitempty"`
}

// ClientStatus tells of a client.
type ClientStatus struct {
	Name  string `json:"name"`
	Tasks int    `json:"tasks"`
	Bytes int64  `json:"bytes"`
	// Unread are bytes of results that it has not taken. Paused: they are so many that its tasks
	// wait.
	Unread int64 `json:"unread,omitempty"`
	Paused bool  `json:"paused,omitempty"`
	// Gone: it has no connection.
	Gone bool `json:"gone,omitempty"`
}

// Offered is a function that workers have.
type Offered struct {
	Function string `json:"function"`
	Workers  int    `json:"workers"`
	// CPU is how many processors they offer.
	CPU float64 `json:"cpu"`
}

// GroupStatus tells of the tasks of one function with the same demand.
type GroupStatus struct {
	Function string `json:"function"`
	Demand   string `json:"demand"`
	Ready    int    `json:"ready"`
	Running  int    `json:"running"`
	// PaceUS is how long a task takes, in microseconds: a moving average. 0: none has ended.
	PaceUS int64 `json:"pace_us"`
	// Why says why the ready ones do not run.
	Why string `json:"why,omitempty"`
}

// WorkerStatus tells of a worker.
type WorkerStatus struct {
	ID      uint64 `json:"id"`
	Rank    int    `json:"rank"`
	Name    string `json:"name"`
	Host    string `json:"host"`
	Offers  string `json:"offers"`
	Running int    `json:"running"`
	Ahead   int    `json:"ahead"`
	Done    int    `json:"done"`
	Leaving bool   `json:"leaving,omitempty"`
	// Waits is how many of the running ones wait for other tasks, and have lent their processors.
	Waits int `json:"waits,omitempty"`
	// Trains: it has a place in a world, and runs no tasks meanwhile.
	Trains bool `json:"trains,omitempty"`
	// Stopped are attempts of tasks that were cancelled, or whose time is up, and whose functions
	// have not ended. They keep what they take of the worker until then.
	Stopped []StoppedStatus `json:"stopped,omitempty"`
}

// StoppedStatus tells of an attempt that was told to stop and has not ended.
type StoppedStatus struct {
	Function string `json:"function"`
	N        uint64 `json:"n"`
	// Why it was told so: it was cancelled, its time is up, or it runs again elsewhere.
	Why string `json:"why,omitempty"`
	// ForMS is how long ago it was told, in milliseconds.
	ForMS int64 `json:"for_ms"`
}

// String says why the attempt was told to stop, and how long ago.
func (s StoppedStatus) String() string {
	return fmt.Sprintf("%s, has not ended for %v", s.Why, (time.Duration(s.ForMS) * time.Millisecond).Round(time.Second))
}

// mostListed bounds the functions of a status, maxWhy the text of why tasks of one do not run, in
// bytes. listedFor is how long a function is listed of which no tasks are known any more.
const (
	mostListed = 2000
	listedFor  = 15 * time.Minute
	maxWhy     = 4 << 10
)

// Lasting says, a line each, what has not ended that was told to.
func (s Status) Lasting() (all []string) {
	for _, w := range s.Workers {
		for _, t := range w.Stopped {
			all = append(all, fmt.Sprintf("worker %s: task %d of %s, %v", w.Name, t.N, t.Function, t))
		}
	}
	return all
}

// Status returns what people want to see.
func (q *Queue) Status(now time.Time) Status {
	s := Status{Waiting: q.counts[Waiting], Ready: q.counts[Ready], Running: q.counts[Sent], Retried: q.retried, Suspended: q.suspended}
	for _, g := range q.order {
		if len(s.Functions) >= mostListed {
			break
		}
		of := GroupStatus{Function: g.Name(), Demand: g.Demand.String(), Ready: g.waiting, PaceUS: g.pace.Microseconds()}
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
		s.Workers = append(s.Workers, WorkerStatus{
			ID: w.ID, Rank: w.Rank, Name: w.Name, Host: w.Host, Offers: MakeDemand(w.Offers).String(), Running: w.running, Ahead: len(w.sent) - w.running,
			Done: w.done, Leaving: w.leaving, Trains: w.trains, Waits: w.waiting(), Stopped: w.stoppedStatus(now),
		})
	}
	s.Offered = q.offered()
	return s
}

// offered returns the functions that workers have, in the order of their names.
func (q *Queue) offered() []Offered {
	of := map[string]*Offered{}
	for _, w := range q.list {
		for key := range w.Functions {
			name, _, _ := strings.Cut(key, "@")
			o := of[name]
			if o == nil {
				o = &Offered{Function: name}
				of[name] = o
			}
			if o.Workers++; !w.leaving {
				o.CPU += float64(w.Offers[CPU]) / Unit
			}
		}
	}
	all := make([]Offered, 0, len(of))
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

// explain says why tasks of a group are ready and do not run.
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

// Unserved says why no worker that is there can run tasks of a group which are ready: none has what
// they need, or all that those run waits for tasks. "": one can, or none is ready.
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
	case !g.Demand.fits(w.Offers, 1):
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

// plural returns what many workers do, of what one does.
func plural(does string) string {
	verb, rest, _ := strings.Cut(does, " ")
	if many := map[string]string{"has": "have", "is": "are"}[verb]; many != "" {
		verb = many
	} else {
		verb = strings.TrimSuffix(verb, "s")
	}
	return strings.TrimSpace(verb + " " + rest)
}
