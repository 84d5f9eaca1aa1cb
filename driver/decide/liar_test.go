package decide

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// TestOneLiar: the workers of one slot report anything, at any time. The job does not succeed
// before the others have trained to the end, none of them is stopped or dismissed, and no state is
// accepted that none of them can have.
func TestOneLiar(t *testing.T) {
	for seed := range rounds(2000) {
		l := newLiar(t, seed)
		for range 60 {
			l.step()
		}
		l.end()
		if t.Failed() {
			t.Fatalf("seed %d:\n%s", seed, l.tail())
		}
	}
}

// liar is a job with one slot whose worker lies.
type liar struct {
	*testing.T
	rnd     *rand.Rand
	m       *Machine
	now     time.Time
	slot    plan.SlotID
	ids     int
	honest  map[string]*honestProc
	id      string // of the liar; empty: none runs
	members []string
	made    uint64 // the last commit of all honest members
	trained bool   // the honest workers have completed training
	ended   bool
	trace   []string
}

type honestProc struct {
	generation, commits uint64
	holds, joined, told bool
}

func newLiar(t *testing.T, seed uint64) *liar {
	l := &liar{T: t, rnd: rand.New(rand.NewPCG(seed, 7)), now: time.Unix(0, 0), honest: map[string]*honestProc{}}
	n := 3 + l.rnd.IntN(3)
	l.slot = plan.SlotID{Host: "a", Index: l.rnd.IntN(n)}
	cfg, err := withDefaults(Config{Size: job.Size{NP: n, Min: 1, Elastic: true}})
	if err != nil {
		t.Fatal(err)
	}
	l.m = New(cfg, func(id plan.SlotID) string {
		l.ids++
		return fmt.Sprintf("%v#%d", id, l.ids)
	})
	l.put(HostsFound{[]plan.Host{{Name: "a", Slots: n}}})
	l.join()
	l.put(WorkerJoined{l.id, Join{}})
	return l
}

func (l *liar) tail() string {
	out := ""
	for _, line := range l.trace[max(0, len(l.trace)-80):] {
		out += line + "\n"
	}
	return out
}

func (l *liar) put(in Input) {
	if l.ended {
		return
	}
	l.trace = append(l.trace, fmt.Sprintf("%v %T %+v", l.now.Unix(), in, in))
	for _, a := range l.m.Step(l.now, in) {
		l.trace = append(l.trace, fmt.Sprintf("    %T %+v", a, a))
		l.take(a)
	}
}

func (l *liar) take(a Action) {
	switch a := a.(type) {
	case StartWorker:
		if a.Slot.SlotID == l.slot {
			l.id = a.ID
		} else {
			l.honest[a.ID] = &honestProc{}
		}
	case StopWorker:
		if l.honest[a.ID] != nil {
			l.Errorf("%s is stopped", a.ID)
		}
	case DismissWorker:
		if l.honest[a.ID] != nil && !l.trained {
			l.Errorf("%s is dismissed: %v", a.ID, a.Why)
		}
	case NotifyWorkers:
		for _, w := range a.Members {
			if p := l.honest[w.id]; p != nil {
				p.told = a.Change != 0
			}
		}
	case TellLoss:
		for _, w := range a.Members {
			if p := l.honest[w.id]; p != nil {
				p.told = true
			}
		}
	case PublishWorld:
		l.published(a)
	case FinishJob:
		l.ended = true
		// Rank 0 can report that it could not write the last checkpoint: that is its duty.
		if !l.trained || a.Err != nil && !errors.Is(a.Err, job.ErrCheckpoint) {
			l.Errorf("the job ends with %v, trained: %v", a.Err, l.trained)
		}
	}
}

func (l *liar) published(a PublishWorld) {
	root := a.Members[a.Root]
	if root.join.Commits > l.made+1 || root.join.Commits < l.made {
		l.Errorf("the root has %d commits, the job %d", root.join.Commits, l.made)
	}
	l.members, l.made = nil, root.join.Commits
	for _, w := range a.Members {
		l.members = append(l.members, w.id)
		if p := l.honest[w.id]; p != nil {
			*p = honestProc{generation: a.World.Generation, commits: root.join.Commits, holds: root.Holds || p.holds}
		}
	}
}

// join makes all honest workers join that are not waiting already, in random order.
func (l *liar) join() {
	ids := slices.Sorted(func(yield func(string) bool) {
		for id, p := range l.honest {
			if !p.joined && !yield(id) {
				return
			}
		}
	})
	l.rnd.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	ahead := l.rnd.IntN(2 * len(l.honest)) // the worker has begun one more commit
	for i, id := range ids {
		p := l.honest[id]
		if p.joined {
			continue
		}
		if p.joined = true; i == ahead && p.holds && p.commits == l.made {
			p.commits++
		}
		l.put(WorkerJoined{id, Join{After: p.generation, Commits: p.commits, HoldsState: p.holds, Trained: new(l.trained)}})
	}
}

// number returns a random number, often an extreme one or one close to the true value.
func (l *liar) number(near uint64) uint64 {
	all := []uint64{0, 1, near, near + 1, near + 2, near - 1, 1 << 63, math.MaxUint64, math.MaxInt64, l.rnd.Uint64(), l.rnd.Uint64N(100)}
	return all[l.rnd.IntN(len(all))]
}

// lie gives the machine a random input that a worker can cause.
func (l *liar) lie() {
	generation := l.m.Current.Generation
	reports := []Report{ReportDone, ReportLeaving, ReportCommitted, ReportDraining, ReportFetching, ReportWriting, ReportWritten, ReportNotWritten}
	switch l.rnd.IntN(8) {
	case 0, 1:
		j := Join{After: l.number(generation), Commits: l.number(l.made), HoldsState: l.rnd.IntN(4) > 0}
		if l.rnd.IntN(3) > 0 {
			j.Trained = new(l.rnd.IntN(2) > 0)
		}
		l.put(WorkerJoined{l.id, j})
	case 2, 3, 4:
		l.put(WorkerReported{l.id, reports[l.rnd.IntN(len(reports))], l.number(generation), l.number(l.made)})
	case 5:
		l.put(WorkerReported{l.id, ReportDone, generation, l.number(l.made)})
	case 6:
		l.put([]Input{
			WorkerFailing{l.id, "a lie"},
			BackendTold{l.id, l.number(generation), fmt.Sprint("b", l.rnd.IntN(100))},
			WorkerMoved{l.id, l.number(generation), time.Duration(l.number(5))},
			WorkerTrains{l.id, l.number(generation)},
			WorkerWrites{l.id},
		}[l.rnd.IntN(4)])
	case 7:
		if l.rnd.IntN(3) == 0 {
			l.exit()
		}
	}
}

func (l *liar) exit() {
	id := l.id
	l.id = ""
	l.put(WorkerEnded{ID: id, Exit: []job.Exit{{}, {Code: 1}, {Code: 137, Signal: 9}}[l.rnd.IntN(3)]})
}

// whole reports whether all members, which can include the liar, continue in their world.
func (l *liar) whole() bool {
	for _, id := range l.members {
		if p := l.honest[id]; p == nil && id != l.id || p != nil && (p.joined || p.told) {
			return false
		}
	}
	w := l.m.find(l.id)
	return len(l.members) > 0 && (!slices.Contains(l.members, l.id) || w != nil && w.inWorld())
}

// step makes the honest workers act, and time pass, between two lies.
func (l *liar) step() {
	if l.id != "" && l.rnd.IntN(2) == 0 {
		l.lie()
	}
	switch w := l.m.find(l.id); {
	case w != nil && w.Phase == stopping && l.rnd.IntN(3) == 0:
		l.exit()
	case l.whole() && l.rnd.IntN(3) > 0:
		for id, p := range l.honest {
			if slices.Contains(l.members, id) {
				p.commits++
				p.holds, l.made = true, p.commits
			}
		}
		for _, id := range l.members {
			if p := l.honest[id]; p != nil && l.rnd.IntN(2) == 0 {
				l.put(WorkerReported{id, ReportCommitted, p.generation, p.commits})
			}
		}
	case !l.whole():
		l.join()
	}
	l.pass(time.Duration(l.rnd.IntN(8000)) * time.Millisecond)
}

// pass lets time pass. Five seconds after a worker has reported that all are done, the members
// report that they train.
func (l *liar) pass(d time.Duration) {
	for end := l.now.Add(d); !l.ended && l.now.Before(end); {
		next := end
		if at, ok := l.m.Deadline(); ok && at.Before(next) {
			next = at
		}
		if next.After(l.now) {
			l.now = next
		}
		if since := l.m.DoneFrom; !since.IsZero() && !l.now.Before(since.Add(leastDoubt)) && !l.trained {
			for _, id := range slices.Clone(l.members) {
				if p := l.honest[id]; p != nil && !p.joined {
					l.put(WorkerTrains{id, p.generation})
				}
			}
		}
		l.put(DeadlinePassed{})
	}
}

// end lets the liar exit and the others train to the end.
func (l *liar) end() {
	for range 200 {
		if l.ended {
			return
		}
		if l.id != "" {
			l.exit()
		}
		if !l.whole() {
			l.join()
			l.pass(time.Second)
			continue
		}
		l.trained = true
		for _, id := range l.members {
			l.put(WorkerReported{id, ReportDone, l.m.Current.Generation, l.made})
		}
		for id := range l.honest {
			l.put(WorkerEnded{ID: id, Exit: job.Exit{}})
		}
		l.pass(time.Minute)
	}
	l.Error("the job does not end")
}
