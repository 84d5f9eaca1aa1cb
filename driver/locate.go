package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/stacks"
)

const (
	// mostLocated is the number of workers located at a time: if a thousand hang at once, a few
	// show the cause.
	mostLocated = decide.MostNamed
	// locatePause is the shortest time between two such lookups.
	locatePause = time.Second
	// probeBound and askBound are how long the agent and the worker may take to answer. A worker
	// that can answer does so within milliseconds, or on an overloaded host within seconds.
	probeBound = 5 * time.Second
	askBound   = 5 * time.Second
	// lookers is the number of workers located concurrently on request.
	lookers = 64
	// mostAnswer bounds the answer to such a request, in bytes. fewGroups bounds the groups of
	// goroutines of each worker in it, unless all are wanted.
	mostAnswer = 8 << 20
	fewGroups  = 8
	// mostStacks bounds the answer of one worker, in bytes.
	mostStacks = 256 << 10
)

// locator finds out where workers that hold up others are.
type locator struct {
	wanted chan string // incarnations; those for which the channel has no room are not located

	mu    sync.Mutex
	last  uint64              // number of the last question
	asked map[uint64]question // questions without an answer yet
}

// question is a question to a worker.
type question struct {
	incarnation string
	answer      chan []byte // of capacity 1
}

func newLocator() *locator {
	return &locator{wanted: make(chan string, mostLocated), asked: make(map[uint64]question)}
}

// ask asks a worker where its goroutines are, by a message that it passes to tell. The answer is
// within the bounds of package stacks. ask blocks until the worker answers or ctx ends.
func (f *locator) ask(ctx context.Context, incarnation string, tell func(text []byte)) (stacks.Worker, error) {
	q := question{incarnation, make(chan []byte, 1)}
	f.mu.Lock()
	f.last++
	id := f.last
	f.asked[id] = q
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.asked, id)
	}()
	tell(line.Down("stacks", struct {
		ID        uint64 `json:"id"`
		MostBytes int    `json:"most_bytes"`
	}{id, mostStacks}))
	select {
	case text := <-q.answer:
		w, err := stacks.Parse(text)
		w.Processes = nil // the agent reports these
		return w, err
	case <-ctx.Done():
		return stacks.Worker{}, errors.New("the worker does not report its stacks")
	}
}

// Located is called by the rendezvous with a worker's answer.
func (l *loop) Located(from identity.Subject, s line.StacksLine) {
	l.locate.mu.Lock()
	defer l.locate.mu.Unlock()
	if q, ok := l.locate.asked[s.ID]; ok && q.incarnation == from.Incarnation {
		delete(l.locate.asked, s.ID)
		q.answer <- s.Worker
	}
}

// everybody, in place of an incarnation, stands for some workers of a world in which all wait.
const everybody = ""

// report requests that the worker of a finding be located, if it is a finding that needs this. It
// does not block.
func (f *locator) report(in decide.Input) {
	id := everybody
	switch in := in.(type) {
	case decide.WorkerStalled:
		id = in.ID
	case decide.WorldJammed:
	default:
		return
	}
	select {
	case f.wanted <- id:
	default: // enough are waiting already
	}
}

// locateStalled locates the workers that the method report has queued, and posts where they are,
// until ctx ends.
func (l *loop) locateStalled(ctx context.Context) {
	for {
		var ids []string
		select {
		case id := <-l.locate.wanted:
			ids = append(ids, id)
		case <-ctx.Done():
			return
		}
		pause := time.NewTimer(locatePause)
		for more := true; more; {
			select {
			case id := <-l.locate.wanted:
				ids = append(ids, id)
			default:
				more = false
			}
		}
		members, err := l.members(ctx)
		if err == nil {
			l.tell(l.seek(ctx, chosen(members, ids)))
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
	}
}

// located is a member of the world with its location.
type located struct {
	subject identity.Subject
	rank    int
	pid     int
	stacks.Worker
}

// chosen returns the members to locate.
func chosen(members []located, ids []string) []located {
	all := slices.Contains(ids, everybody)
	members = slices.DeleteFunc(members, func(m located) bool {
		return !all && !slices.Contains(ids, m.subject.Incarnation)
	})
	return members[:min(len(members), mostLocated)]
}

// members returns the members of the current world, which the loop provides between two events.
func (l *loop) members(ctx context.Context) (all []located, err error) {
	err = l.ask(ctx, func() {
		for _, w := range l.m.Members() {
			if p := l.procs[w.ID()]; p != nil {
				_, pid, rank := w.Place()
				all = append(all, located{subject: p.subject, rank: rank, pid: pid})
			}
		}
	})
	return all, err
}

// seek locates each of the members.
func (l *loop) seek(ctx context.Context, members []located) []located {
	var looking sync.WaitGroup
	room := make(chan struct{}, lookers)
	for i := range members {
		room <- struct{}{}
		looking.Go(func() {
			defer func() { <-room }()
			members[i].Worker = l.whereIs(ctx, &members[i])
		})
	}
	looking.Wait()
	return members
}

// whereIs locates one worker. It asks the agent about its processes, then the worker about its
// goroutines. The worker is not asked if the question would do harm: if one of its threads waits in
// the kernel uninterruptibly and outside of a system call, as for a page of a file, stopping the
// world would stop all other threads until that wait ends.
func (l *loop) whereIs(ctx context.Context, m *located) (w stacks.Worker) {
	var unprobed, unasked error
	if prober, is := l.cfg.Launcher.(launch.Prober); is {
		bounded, cancel := context.WithTimeout(ctx, probeBound)
		w, unprobed = prober.Probe(bounded, m.subject.Host, m.subject.Incarnation)
		cancel()
	}
	if w.Asks() {
		bounded, cancel := context.WithTimeout(ctx, askBound)
		defer cancel()
		var own stacks.Worker
		own, unasked = l.locate.ask(bounded, m.subject.Incarnation, func(text []byte) { l.say([]string{m.subject.Incarnation}, nil, text, nil) })
		if unasked == nil {
			w.Goroutines, w.Error = own.Goroutines, own.Error
			return w
		}
	}
	if err := errors.Join(unprobed, unasked); err != nil {
		w.Error = err.Error()
		w.Clean()
	}
	return w
}

// tell posts where workers are, with one finding for all that are at the same place.
func (l *loop) tell(found []located) {
	for len(found) > 0 {
		first := found[0]
		same := func(m located) bool { return m.Key() == first.Key() }
		var there []int
		for _, m := range found {
			if same(m) {
				there = append(there, m.rank)
			}
		}
		where := first.Text()
		for _, m := range found {
			if same(m) {
				l.stalls.locate(m.subject.Incarnation, where)
			}
		}
		generation, what := l.stalls.locate(first.subject.Incarnation, where)
		found = slices.DeleteFunc(found, same)
		if where == "" {
			l.cfg.Log.Debugf("the stacks of rank %d are not known: %s", first.rank, first.Error)
			continue
		}
		if more := there[1:]; len(more) > 0 {
			where += fmt.Sprintf("; there too: %s", ranks(more))
		}
		l.post(decide.WorkerLocated{ID: first.subject.Incarnation, Generation: generation, What: what, Where: where})
	}
}

// Stacks locates the workers of the given ranks, or all workers if of is empty.
func (l *controlled) Stacks(ctx context.Context, of []int, all bool) ([]byte, error) {
	members, err := (*loop)(l).members(ctx)
	if err != nil {
		return nil, err
	}
	if len(members) == 0 {
		return nil, &job.RefusedError{Reason: "the job has no world now"}
	}
	for _, rank := range of {
		if !slices.ContainsFunc(members, func(m located) bool { return m.rank == rank }) {
			return nil, &job.RefusedError{Reason: fmt.Sprintf("there is no rank %d now", rank)}
		}
	}
	if len(of) > 0 {
		members = slices.DeleteFunc(members, func(m located) bool { return !slices.Contains(of, m.rank) })
	}
	members = (*loop)(l).seek(ctx, members)
	answer := make([]control.Stacks, len(members))
	for i, m := range members {
		s := m.subject
		answer[i] = control.Stacks{Rank: m.rank, Host: s.Host, Slot: s.Index, PID: m.pid, Where: m.Text(), Worker: m.Worker}
		if !all {
			few(&answer[i].Worker)
		}
	}
	text, err := json.Marshal(answer)
	for most := stacks.MaxGroups / 2; err == nil && len(text) > mostAnswer && most > 0; most /= 2 {
		for i := range answer {
			cut(&answer[i].Worker, most)
		}
		text, err = json.Marshal(answer)
	}
	return text, err
}

// few keeps only the goroutines that run the user's code and, of processes that have goroutines,
// only the first thread.
func few(w *stacks.Worker) {
	user := func(g stacks.Goroutines) bool { return g.Training || len(stacks.UserFrames(g.Frames)) > 0 }
	goes := slices.ContainsFunc(w.Goroutines, user)
	w.Goroutines = slices.DeleteFunc(w.Goroutines, func(g stacks.Goroutines) bool { return goes && !user(g) })
	cut(w, fewGroups)
	for i := range w.Processes {
		p := &w.Processes[i]
		if n := len(p.Threads); goes && n > 1 {
			p.Threads, p.More = p.Threads[:1], p.More+n-1
		}
	}
}

// cut keeps at most the given number of groups of goroutines, and of threads.
func cut(w *stacks.Worker, most int) {
	if n := len(w.Goroutines); n > most {
		w.Goroutines = w.Goroutines[:most]
		w.Error = fmt.Sprintf("%d more groups of goroutines are left out", n-most)
	}
	for i := range w.Processes {
		p := &w.Processes[i]
		if n := len(p.Threads); n > most {
			p.Threads, p.More = p.Threads[:most], p.More+n-most
		}
	}
}
