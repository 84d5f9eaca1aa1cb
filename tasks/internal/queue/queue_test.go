package queue

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var seeds = flag.Int("seeds", 300, "how many random schedules TestAgainstModel runs")

// sim is a queue with workers that act at random.
type sim struct {
	t       *testing.T
	r       *rand.Rand
	q       *Queue
	now     time.Time
	workers map[uint64]*simWorker
	stored  map[string]map[Object]bool // by host
	tasks   map[ID]*simTask
	unsure  map[Held]bool // attempts to be confirmed that are not confirmed yet
	ids     []ID
	last    uint64
	calm    bool // no more losses and refusals
}

type simWorker struct {
	id   uint64
	host string
	has  []simAttempt
	down bool // its connection is broken
}

type simAttempt struct {
	Held
	group   *Group
	stopped bool
}

// simTask is the model's state of a task.
type simTask struct {
	id                  ID
	options             *Options
	big                 bool // its result is stored
	cancelled, released bool
	begun               int // attempts that were running when their workers were lost
	told                int
	final               Result
}

func newSim(t *testing.T, seed uint64) *sim {
	return &sim{
		t: t, r: rand.New(rand.NewPCG(seed, 20)), q: New(Config{Rebuilds: 100}), now: time.Unix(1000, 0),
		workers: map[uint64]*simWorker{}, stored: map[string]map[Object]bool{}, tasks: map[ID]*simTask{},
		unsure: map[Held]bool{},
	}
}

func (s *sim) value(id ID) []byte { return fmt.Appendf(nil, "value of %d", id.N) }

func (s *sim) object(id ID) Object { return sha256.Sum256(s.value(id)) }

func (s *sim) join() {
	s.last++
	w := &simWorker{id: s.last, host: fmt.Sprint("h", s.r.IntN(3))}
	s.workers[w.id] = w
	if s.stored[w.host] == nil {
		s.stored[w.host] = map[Object]bool{}
	}
	s.q.Join(s.now, s.asWorker(w), nil)
}

func (s *sim) asWorker(w *simWorker) Worker {
	return Worker{
		ID: w.id, Name: fmt.Sprint("w", w.id), Host: w.host, Functions: map[string]bool{"f": true, "g": w.id%2 == 0 || s.calm},
		Offers: map[string]int64{"cpu": 2 * Unit, "gpu": Unit},
	}
}

func (s *sim) submit() {
	s.last++
	task := &simTask{id: ID{1, s.last}, big: s.r.IntN(3) == 0}
	o := &Options{Retries: s.r.IntN(5)}
	for range s.r.IntN(3) {
		if len(s.ids) > 0 {
			if id := s.ids[max(0, len(s.ids)-1-s.r.IntN(8))]; !s.tasks[id].released {
				o.Needs = append(o.Needs, id)
			}
		}
	}
	if s.r.IntN(4) == 0 {
		o.Prefer = fmt.Sprint("h", s.r.IntN(4))
	}
	task.options = o
	demand := []Demand{MakeDemand(map[string]int64{"cpu": Unit}), MakeDemand(map[string]int64{"cpu": 500, "gpu": Unit})}[s.r.IntN(2)]
	s.tasks[task.id] = task
	s.ids = append(s.ids, task.id)
	s.q.Submit(s.now, Task{ID: task.id, Group: s.q.Group([]string{"f", "g"}[s.r.IntN(2)], demand), Priority: int32(s.r.IntN(3)), Options: o})
}

// act performs the actions of the queue.
func (s *sim) act() {
	for len(s.q.Out) > 0 {
		out := s.q.Out
		s.q.Out = nil
		for _, a := range out {
			w := s.workers[a.Worker]
			if a.Confirm {
				s.unsure[Held{a.Task, a.Attempt}] = true
			}
			if w != nil && w.down {
				continue // the action never reaches it
			}
			switch a.What {
			case Push:
				w.has = append(w.has, simAttempt{Held: Held{a.Task, a.Attempt}, group: a.Group})
			case Ask:
				s.answer(w, a)
			case TakeBack:
				s.giveBack(w, Held{a.Task, a.Attempt})
			case Stop:
				for i := range w.has {
					if w.has[i].Held == (Held{a.Task, a.Attempt}) {
						w.has[i].stopped = true
					}
				}
			case Tell:
				s.told(a.Task)
			case Drop:
				delete(s.stored[a.Host], a.Object)
			}
		}
	}
}

func (s *sim) answer(w *simWorker, a Action) {
	switch n := s.r.IntN(8); {
	case s.calm || n < 5:
		s.q.Granted(s.now, w.id, a.Group)
	case n == 5:
		s.q.Refused(s.now, w.id, a.Group, "no")
	}
}

func (s *sim) giveBack(w *simWorker, h Held) {
	i := slices.IndexFunc(w.has, func(a simAttempt) bool { return a.Held == h })
	if i >= 2 { // the first two may have begun
		w.has = slices.Delete(w.has, i, i+1)
		s.q.Returned(s.now, w.id, []Held{h})
	} else if i >= 0 {
		s.q.Kept(w.id, h)
	}
}

func (s *sim) told(id ID) {
	task := s.tasks[id]
	r, ok := s.q.Result(id)
	if !ok {
		s.t.Fatalf("told of %v, which is not over", id)
	}
	if task.told++; task.told == 1 {
		task.final = r
	}
	switch {
	case r.State == Succeeded && (task.big && r.Object != s.object(id) || !task.big && string(r.Value) != string(s.value(id))):
		s.t.Fatalf("%v ended with %q", id, r.Value)
	case r.State == Cancelled && !task.cancelled && !task.released:
		s.t.Fatalf("%v was cancelled by nobody", id)
	case r.Failure == Poison && task.begun < 3, r.Failure == Lost && task.begun <= task.options.Retries:
		s.t.Fatalf("%v: %s after %d losses", id, r.Text, task.begun)
	case r.Failure == ByUser || r.Failure == TimedOut || r.Failure == NoMember:
		s.t.Fatalf("%v: %s", id, r.Text)
	}
}

func (s *sim) some() *simWorker {
	ids := make([]uint64, 0, len(s.workers))
	for id := range s.workers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return s.workers[ids[s.r.IntN(len(ids))]]
}

// confirm makes the worker confirm one of its first attempts.
func (s *sim) confirm(w *simWorker) {
	if len(w.has) > 0 && !w.down {
		h := w.has[s.r.IntN(min(2, len(w.has)))].Held
		delete(s.unsure, h)
		s.q.Begun(w.id, h)
	}
}

// work finishes one of the worker's first attempts.
func (s *sim) work(w *simWorker) {
	if len(w.has) == 0 || w.down {
		return
	}
	i := s.r.IntN(min(2, len(w.has)))
	a := w.has[i]
	w.has = slices.Delete(w.has, i, i+1)
	for _, id := range s.tasks[a.ID].options.Needs {
		if need := s.tasks[id]; need.big && !a.stopped && !s.anywhere(s.object(id)) {
			s.q.Done(s.now, w.id, a.Held, Result{State: Failed, Failure: Gone}, time.Millisecond)
			return
		}
	}
	r := Result{State: Succeeded, Value: s.value(a.ID)}
	if s.tasks[a.ID].big {
		r = Result{State: Succeeded, Object: s.object(a.ID), Size: 1 << 20}
		s.stored[w.host][r.Object] = true
	}
	s.q.Done(s.now, w.id, a.Held, r, time.Duration(1+s.r.IntN(5000))*time.Microsecond)
}

func (s *sim) anywhere(o Object) bool {
	for _, has := range s.stored {
		if has[o] {
			return true
		}
	}
	return false
}

// end makes a worker die or leave.
func (s *sim) end(w *simWorker, left bool) {
	if real := s.q.workers[w.id]; real != nil && !left {
		for _, t := range real.sent[:real.running] {
			if !t.stopped && !s.unsure[Held{t.ID, t.number}] {
				s.tasks[t.ID].begun++
			}
		}
	}
	delete(s.workers, w.id)
	others := 0
	for _, o := range s.workers {
		if o.host == w.host {
			others++
		}
	}
	if others == 0 {
		s.stored[w.host] = map[Object]bool{}
	}
	if left {
		s.q.Left(s.now, w.id)
	} else {
		s.q.Lose(s.now, w.id)
	}
}

func (s *sim) step() {
	switch n := s.r.IntN(100); {
	case n < 30:
		s.submit()
	case n < 75:
		s.work(s.some())
	case n < 78 && len(s.workers) > 1:
		s.end(s.some(), s.r.IntN(3) == 0)
	case n < 82 && len(s.workers) < 6:
		s.join()
	case n < 84:
		w := s.some()
		w.down = true
	case n < 88:
		s.rejoin(s.some())
	case n < 90 && len(s.ids) > 0:
		id := s.ids[s.r.IntN(len(s.ids))]
		s.tasks[id].cancelled = true
		s.q.Cancel(s.now, id)
	case n < 94 && len(s.ids) > 0:
		id := s.ids[s.r.IntN(len(s.ids))]
		s.tasks[id].released = true
		s.q.Release(s.now, id)
	case n < 97:
		s.confirm(s.some())
	default:
		s.now = s.now.Add(time.Duration(s.r.IntN(1500)) * time.Millisecond)
		s.q.Tick(s.now)
	}
	s.act()
	s.check()
}

func (s *sim) rejoin(w *simWorker) {
	if !w.down {
		return
	}
	w.down = false
	var held []Held
	for _, a := range w.has {
		held = append(held, a.Held)
		delete(s.unsure, a.Held)
	}
	s.q.Join(s.now, s.asWorker(w), held)
}

// check compares the queue's counts with its tasks.
func (s *sim) check() {
	var counts [Cancelled + 1]int
	for _, t := range s.q.tasks {
		counts[t.state]++
	}
	if counts != s.q.counts {
		s.t.Fatalf("counts %v, there are %v", s.q.counts, counts)
	}
	for _, w := range s.q.list {
		free := map[string]int64{"cpu": 2 * Unit, "gpu": Unit}
		for i, t := range w.sent {
			if t.worker != w || t.state != Sent {
				s.t.Fatalf("%v is with the worker %d", t.ID, w.ID)
			}
			if i < w.running {
				t.Group.Demand.take(free, 1)
			}
		}
		if fmt.Sprint(free) != fmt.Sprint(w.free) {
			s.t.Fatalf("worker %d has %v free, and counts %v", w.ID, free, w.free)
		}
	}
}

// TestAgainstModel makes workers and clients act at random, and checks that each task ends in one
// of the ways that are possible.
func TestAgainstModel(t *testing.T) {
	n := *seeds
	if testing.Short() {
		n /= 5
	}
	for seed := range n {
		s := newSim(t, uint64(seed))
		s.join()
		for range 1500 {
			s.step()
		}
		s.calm = true
		for _, w := range s.workers {
			w.down = true
			s.rejoin(w)
		}
		s.act()
		for range 200_000 {
			if s.q.counts[Waiting]+s.q.counts[Ready]+s.q.counts[Sent] == 0 {
				break
			}
			s.work(s.some())
			s.now = s.now.Add(20 * time.Millisecond)
			s.q.Tick(s.now)
			s.act()
			s.check()
		}
		for id, task := range s.tasks {
			if task.told == 0 && !task.released {
				real := s.q.tasks[id]
				t.Fatalf("seed %d: nobody was told of %v: %+v", seed, id, real)
			}
			s.q.Release(s.now, id)
		}
		s.act()
		if len(s.q.tasks) > 0 || len(s.q.objects) > 0 {
			t.Fatalf("seed %d: %d tasks and %d stored values are left", seed, len(s.q.tasks), len(s.q.objects))
		}
		for host, has := range s.stored {
			if len(has) > 0 {
				t.Fatalf("seed %d: %d stored values are left on %s", seed, len(has), host)
			}
		}
	}
}

// TestWantUnwritten: the result of a restored task does not count as lost as long as the task may
// still compute it.
func TestWantUnwritten(t *testing.T) {
	now := time.Unix(0, 0)
	q := New(Config{})
	g := q.Group("f@00", MakeDemand(map[string]int64{"cpu": Unit}))
	first, second := ID{Client: 1, N: 1}, ID{Client: 1, N: 2}
	told, other := Object{1}, Object{2}
	q.Restore(Task{ID: first, Group: g})
	q.Restore(Task{ID: second, Group: g})
	q.RestoreOver(now, second, Result{State: Succeeded, Object: other, Size: 200_000})
	if !q.Want(now, told) {
		t.Error("a value that a restored task may make is given up")
	}
	q.Resume(now)
	q.RestoreOver(now, first, Result{}) // Result{}: the journal has no end of the task
	if !q.Want(now, told) {
		t.Error("a value is given up whose task runs")
	}
	q.Cancel(now, first)
	if q.Want(now, told) {
		t.Error("a value is awaited that no task may make")
	}
}

// TestTakenOver: a worker holds a task that succeeds. A task that it needs has no recorded end and
// runs again. The first task is over when the second is, and succeeds only if the second does.
func TestTakenOver(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		for _, late := range []bool{false, true} { // whether the worker reports its task after the other is over
			s := newShop(t, 0)
			first, second, third := ID{1, 1}, ID{1, 2}, ID{1, 3}
			s.q.Restore(Task{ID: first, Group: s.g})
			s.q.Restore(Task{ID: second, Group: s.g, Options: &Options{Needs: []ID{first}}})
			s.q.Restore(Task{ID: third, Group: s.g, Options: &Options{Needs: []ID{second}}})
			w := Worker{ID: 7, Name: "w", Host: "h", Functions: map[string]bool{"f": true}, Offers: map[string]int64{"cpu": 3 * Unit}}
			held := Held{ID: third, Attempt: 5}
			s.q.Join(s.now, w, []Held{held})
			done := func() { s.q.Done(s.now, 7, held, Result{State: Succeeded, Value: []byte("3")}, time.Millisecond) }
			if !late {
				done()
			}
			if told := s.out(Tell); len(told) > 0 {
				t.Fatalf("before the others are over the client is told %v", told)
			}
			if cancelled {
				s.q.Cancel(s.now, first)
			}
			s.q.Resume(s.now)
			for range 2 { // the first and the second task, if they run
				s.q.Granted(s.now, 7, s.g)
				for _, a := range s.out(Push) {
					s.q.Done(s.now, 7, Held{a.Task, a.Attempt}, Result{State: Succeeded}, time.Millisecond)
				}
			}
			if late {
				done()
			}
			want := Succeeded
			if cancelled {
				want = Failed
			}
			r, over := s.q.Result(third)
			if !over || r.State != want || cancelled && r.Failure != Dependency || !cancelled && string(r.Value) != "3" {
				t.Errorf("cancelled %v, late %v: over %v, %+v", cancelled, late, over, r)
			}
			if second, _ := s.q.Result(second); second.State != want {
				t.Errorf("cancelled %v, late %v: the second: %+v", cancelled, late, second)
			}
			if got := s.q.Status(s.now); got.Running+got.Ready+got.Waiting != 0 {
				t.Errorf("cancelled %v, late %v: tasks are left: %+v", cancelled, late, got)
			}
		}
	}
}

// TestEnded: the end of a task that a client knows from an earlier queue becomes the task's end
// wherever the task is now, even while a worker runs it, and has its effect on the tasks that need
// it.
func TestEnded(t *testing.T) {
	failed := Result{State: Failed, Failure: ByUser, Text: "as it did"}
	for _, known := range []Result{failed, {State: Cancelled}, {State: Succeeded, Value: []byte("before")}} {
		for where, place := range map[string]func(s *shop, at ID){
			"ready":   func(*shop, ID) {},
			"running": func(s *shop, _ ID) { s.q.Granted(s.now, 1, s.g) },
			"suspended": func(s *shop, at ID) {
				s.q = New(Config{})
				s.g = s.q.Group("f", s.g.Demand)
				s.q.Restore(Task{ID: at, Group: s.g})
			},
			"waiting": func(s *shop, at ID) {
				s.q = New(Config{})
				s.g = s.q.Group("f", s.g.Demand)
				s.submit(7)
				s.q.Submit(s.now, Task{ID: at, Group: s.g, Options: &Options{Needs: []ID{{1, 7}}}})
			},
		} {
			s := newShop(t, 1)
			first, next := ID{1, 1}, ID{1, 2}
			s.submit(1)
			place(s, first)
			s.q.Submit(s.now, Task{ID: next, Group: s.g, Options: &Options{Needs: []ID{first}}})
			pushed := s.out(Push)
			s.q.Ended(s.now, first, known)
			if stops := len(s.q.Out) > 0 && s.q.Out[0].What == Stop; stops != (where == "running") {
				t.Errorf("%s: its worker is told to stop: %v", where, stops)
			}
			for _, a := range pushed { // the worker's own result does not count
				s.q.Done(s.now, a.Worker, Held{a.Task, a.Attempt}, Result{State: Succeeded, Value: []byte("again")}, 0)
			}
			if r, over := s.q.Result(first); !over || r.State != known.State || string(r.Value) != string(known.Value) {
				t.Errorf("%s: over %v, %+v, want %+v", where, over, r, known)
			}
			r, over := s.q.Result(next)
			if known.State == Succeeded && over || known.State != Succeeded && r.Failure != Dependency {
				t.Errorf("%s, %v: what needs it: over %v, %+v", where, known.State, over, r)
			}
			s.q.Ended(s.now, first, Result{State: Failed, Failure: Lost})
			if r, _ := s.q.Result(first); r.State != known.State {
				t.Errorf("%s: what was over has become %+v", where, r)
			}
		}
	}
	s := newShop(t, 0)
	s.submit(1)
	s.q.Ended(s.now, ID{1, 1}, Result{State: Succeeded, Size: 9})
	if _, over := s.q.Result(ID{1, 1}); over {
		t.Error("a stored result is taken for there on a client's word")
	}
	s.q.SubmitEnded(s.now, Task{ID: ID{1, 3}, Group: s.g, Options: &Options{Needs: []ID{{1, 2}}}}, Result{State: Succeeded, Value: []byte("3")})
	s.q.Submit(s.now, Task{ID: ID{1, 4}, Group: s.g, Options: &Options{Needs: []ID{{1, 3}}}})
	if r, _ := s.q.Result(ID{1, 3}); r.State != Succeeded || s.q.Status(s.now).Ready != 2 {
		t.Errorf("of one that is over and needs what is unknown: %+v, and %+v", r, s.q.Status(s.now))
	}
}
