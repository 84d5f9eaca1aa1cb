package elastictest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

var (
	schedules = flag.Int("schedules", 12, "random jobs of TestAnySchedule")
	firstSeed = flag.Uint64("first-seed", 1, "of the random jobs")
)

// Under any schedule, the state of every rank is one that the steps of some rank have reached. It
// is never a mix of two states, and it is the same on all ranks of a world. No step is lost after
// its commit has returned on any rank. Every index of every epoch is delivered once.
func TestAnySchedule(t *testing.T) {
	total := make(map[string]int)
	for i := range *schedules {
		seed := *firstSeed + uint64(i)
		s := newSchedule(seed)
		inTime(t, func(*testing.T) { s.run() })
		for _, wrong := range s.wrong {
			t.Errorf("seed %d: %s", seed, wrong)
		}
		if t.Failed() {
			t.Fatalf("%+v", newSchedule(seed).plan)
		}
		for what, n := range s.happened {
			total[what] += n
		}
	}
	t.Log(total)
	// Every schedule contains these moments. Whether a worker is removed before its job ends is a
	// race: see TestHosts.
	if *schedules >= 12 && min(total["died"], total["add"], total["drain"]+total["remove"]) == 0 {
		t.Errorf("%d schedules have no death, no newcomer or no departure: %v", *schedules, total)
	}
}

// schedule is a random job and the test's record of it.
type schedule struct {
	seed uint64
	plan struct {
		epochs, n, batch, every int
		async, setEpoch         bool
		hosts                   []plan.Host
		deaths                  []death
		acts                    []act
	}
	job *elastictest.Job

	mu        sync.Mutex
	moments   map[string]int       // number of moments of each kind
	hosts     map[string]bool      // present and not drained
	holders   map[plan.SlotID]bool // workers on such hosts that have the state
	ledger    map[uint64]int       // number of steps that lead to a state
	entered   map[uint64]entry     // the state at the beginning of a world
	committed map[uint64]uint64    // by generation: the last commit that has returned
	wrong     []string
	happened  map[string]int
}

// death is the death of a worker at the moment of a kind with the given number. If no other worker
// has the state then, it is postponed to a later moment of that kind.
type death struct {
	where string
	after int
}

// places are the kinds of moments at which workers die. At most four times the value moments of the
// kind pass before a death is due: moments within steps are frequent.
var places = map[string]int{"joining": 1, "connecting": 1, "connected": 1, "resetting": 1, "mid-reset": 1, "syncing": 1, "mid-sync": 1, "synced": 1,
	"mid-restore": 1, "training": 1, "between": 30, "saving": 30, "mid-save": 30, "saved": 30, "committed": 30, "leaving": 1, "fetching": 1}

// act changes the hosts at the first commit whose number is at least at.
type act struct {
	at   uint64
	what string
	host int
}

type entry struct{ H, commits uint64 }

func newSchedule(seed uint64) *schedule {
	dice := rand.New(rand.NewPCG(seed, 7))
	s := &schedule{seed: seed, moments: make(map[string]int), hosts: make(map[string]bool), holders: make(map[plan.SlotID]bool), ledger: map[uint64]int{1: 0},
		entered: make(map[uint64]entry), committed: make(map[uint64]uint64), happened: make(map[string]int)}
	p := &s.plan
	p.epochs, p.n, p.batch, p.every = 1+dice.IntN(3), 40+dice.IntN(160), 1+dice.IntN(2), 1+dice.IntN(3)
	p.async, p.setEpoch = dice.IntN(2) == 0, dice.IntN(2) == 0
	for i := range 1 + dice.IntN(3) {
		p.hosts = append(p.hosts, plan.Host{Name: hostName(i), Slots: 1 + dice.IntN(2)})
		s.hosts[hostName(i)] = true
	}
	all := slices.Sorted(maps.Keys(places))
	for range dice.IntN(9) {
		where := all[dice.IntN(len(all))]
		p.deaths = append(p.deaths, death{where, dice.IntN(4 * places[where])})
	}
	for range dice.IntN(6) {
		p.acts = append(p.acts, act{uint64(1 + dice.IntN(30)), []string{"add", "remove", "drain"}[dice.IntN(3)], dice.IntN(4)})
	}
	slices.SortStableFunc(p.acts, func(a, b act) int { return int(a.at) - int(b.at) })
	return s
}

func hostName(i int) string { return string(rune('a' + i)) }

func (s *schedule) errorf(format string, args ...any) {
	s.wrong = append(s.wrong, fmt.Sprintf(format, args...))
}

func (s *schedule) run() {
	s.mu.Lock()
	s.job = elastictest.Start(timed(s.seed, elastictest.Config{
		Worker: s.worker, Hosts: s.plan.hosts, At: s.at,
		Driver: driver.Config{Blame: job.Blame{CooldownMin: time.Millisecond, CooldownMax: 20 * time.Millisecond}},
	}))
	s.mu.Unlock()
	err := s.job.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.errorf("the job ended with %v", err)
	}
	if s.happened["done"] == 0 {
		s.errorf("nobody has come to the end: %v", s.happened)
	}
}

// at is called at every moment of the job and reports whether the worker dies there.
func (s *schedule) at(m elastictest.Moment) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch m.Phase {
	case elastictest.Training:
		if s.hosts[m.Slot.Host] {
			s.holders[m.Slot] = true
		}
	case elastictest.Leaving:
		delete(s.holders, m.Slot)
	case elastictest.Committed:
		s.committed[m.Generation] = max(s.committed[m.Generation], m.Commit)
		for len(s.plan.acts) > 0 && s.plan.acts[0].at <= m.Commit {
			s.act(s.plan.acts[0])
			s.plan.acts = s.plan.acts[1:]
		}
	}
	return s.dies(m.Slot, m.Phase.String())
}

// dies reports whether the worker of a slot dies here, which is so if a death is due and another
// worker has the state. The caller holds mu.
func (s *schedule) dies(slot plan.SlotID, where string) bool {
	s.moments[where]++
	at := slices.IndexFunc(s.plan.deaths, func(d death) bool { return d.where == where && s.moments[where] > d.after })
	if at < 0 || !s.spare(func(o plan.SlotID) bool { return o == slot }) {
		return false
	}
	s.plan.deaths = slices.Delete(s.plan.deaths, at, at+1)
	delete(s.holders, slot)
	s.happened["died"]++
	s.happened["died: "+where]++
	return true
}

// spare reports whether the state is held by any worker for which these returns false.
func (s *schedule) spare(these func(plan.SlotID) bool) bool {
	for o := range s.holders {
		if !these(o) {
			return true
		}
	}
	return false
}

// act changes the hosts. The caller holds mu.
func (s *schedule) act(a act) {
	name := hostName(a.host)
	if a.what == "add" {
		s.hosts[name] = true
		s.happened["add"]++
		s.job.RemoveHost(name) // it can be draining
		s.job.AddHost(name, 1+int(a.at)%2)
		for o := range s.holders { // workers of the previous host of that name can be dismissed
			if o.Host == name && len(s.holders) > 1 {
				delete(s.holders, o)
			}
		}
		return
	}
	if !s.hosts[name] || !s.spare(func(o plan.SlotID) bool { return o.Host == name }) {
		return
	}
	s.happened[a.what]++
	delete(s.hosts, name)
	for o := range s.holders {
		if o.Host == name {
			delete(s.holders, o)
		}
	}
	if a.what == "drain" {
		s.job.DrainHost(name)
	} else {
		s.job.RemoveHost(name)
	}
}

// rank is one worker of the job.
type rank struct {
	*schedule
	ctx     context.Context
	w       *elastic.Worker
	state   *elastic.State
	sampler *elastic.Sampler
	counts  []int32   // how often each index was delivered in this epoch
	weights []float64 // computed from the record, to detect a mix of two states
	record  record
}

type record struct {
	H     uint64 // digest of all previous steps
	Epoch int
	Steps int
	Last  int // size of the world of the last step
}

// fuse is a part without a value during whose methods a worker can die.
type fuse struct{ *rank }

func (f fuse) Save() error                                        { f.mayDie("mid-save"); return nil }
func (f fuse) Restore() error                                     { f.mayDie("mid-restore"); return nil }
func (f fuse) Sync(context.Context, *collective.Group, int) error { f.mayDie("mid-sync"); return nil }

func (r *rank) mayDie(where string) {
	r.mu.Lock()
	dies := r.dies(plan.SlotID{Host: r.w.Host(), Index: r.w.Slot()}, where)
	r.mu.Unlock()
	if dies {
		elastictest.Die(r.ctx)
	}
}

func (s *schedule) worker(ctx context.Context) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	r := &rank{schedule: s, ctx: ctx, w: w, counts: make([]int32, s.plan.n), weights: make([]float64, 9000), record: record{H: 1}}
	r.derive()
	r.sampler = elastic.NewSampler(s.plan.n, elastic.SamplerOptions{Shuffle: true, Seed: 3, Batch: s.plan.batch})
	r.state = elastic.NewState(w, elastic.Watched(elastic.Tensor("counts", r.counts)), r.sampler, fuse{r}, elastic.Value("record", &r.record),
		elastic.Tensor("weights", r.weights))
	r.state.OnReset(func() error { r.mayDie("mid-reset"); return nil })
	err = elastic.Run(ctx, r.state, r.train)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil:
		s.happened["done"]++
		if r.record.Epoch != s.plan.epochs {
			s.errorf("a worker is done in epoch %d of %d", r.record.Epoch, s.plan.epochs)
		}
	case errors.Is(err, elastic.ErrRemoved):
		s.happened["removed"]++
	case errors.Is(err, elastic.ErrFinished):
		s.happened["late"]++
	}
	return err
}

func blend(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 ^ b
	return (h ^ h>>29) * 0xbf58476d1ce4e5b9
}

func (r *rank) weight(i int) float64 {
	return [3]float64{float64(r.record.H >> 40), float64(r.record.Steps), float64(r.record.Epoch)}[i%3]
}

func (r *rank) derive() {
	for i := range r.weights {
		r.weights[i] = r.weight(i)
	}
}

// check verifies the state at the beginning of training in a world.
func (r *rank) check() {
	r.mu.Lock()
	defer r.mu.Unlock()
	who := fmt.Sprintf("generation %d, rank %d", r.w.Generation(), r.w.Rank())
	for i, x := range r.weights {
		if x != r.weight(i) {
			r.errorf("%s: a mix of states: weight %d is %v, and the record %+v", who, i, x, r.record)
			break
		}
	}
	sum := 0
	for _, c := range r.counts {
		sum += int(c)
	}
	if at := r.sampler.Position(); sum < at || sum > at && at != r.plan.n {
		r.errorf("%s: a mix of states: %d indices were delivered, and the position is %d", who, sum, at)
	}
	if steps, ok := r.ledger[r.record.H]; !ok || steps != r.record.Steps {
		r.errorf("%s: a state that nobody has reached: %+v", who, r.record)
	}
	mine := entry{r.record.H, r.state.Commits()}
	if first, ok := r.entered[r.w.Generation()]; ok && first != mine {
		r.errorf("%s: begins with %v, another with %v", who, mine, first)
	}
	r.entered[r.w.Generation()] = mine
	for g, commit := range r.committed {
		if g < r.w.Generation() && commit > mine.commits {
			r.errorf("%s: begins with commit %d, though commit %d had been made in generation %d", who, mine.commits, commit, g)
		}
	}
}

func (r *rank) train(ctx context.Context) error {
	r.check()
	for r.record.Epoch < r.plan.epochs {
		if r.plan.setEpoch {
			r.sampler.SetEpoch(r.record.Epoch)
		}
		for batch, ok := r.sampler.Next(); ok; batch, ok = r.sampler.Next() {
			if err := r.step(ctx, batch); err != nil {
				return err
			}
		}
		r.endEpoch()
	}
	return nil
}

func (r *rank) step(ctx context.Context, batch []int) error {
	g := r.w.Group()
	delta := make([]int32, r.plan.n)
	for _, i := range batch {
		delta[i]++
	}
	if err := collective.AllReduce(ctx, g, delta, collective.Sum); err != nil {
		return err
	}
	r.state.Settle()
	for i, d := range delta {
		r.counts[i] += d
		r.record.H = blend(r.record.H, uint64(i)<<8|uint64(d))
	}
	r.record.Last = g.Size()
	r.record.Steps++
	r.derive()
	r.mu.Lock()
	r.ledger[r.record.H] = r.record.Steps
	r.mu.Unlock()
	r.mayDie("between")
	if r.record.Steps%r.plan.every != 0 {
		return r.state.CheckHostUpdates()
	}
	if r.plan.async {
		return r.state.CommitAsync()
	}
	return r.state.Commit()
}

// endEpoch checks that every index has been delivered once, except those that fill the last round.
func (r *rank) endEpoch() {
	r.mu.Lock()
	defer r.mu.Unlock()
	sum := 0
	var missing []string
	for i, c := range r.counts {
		if c == 0 {
			missing = append(missing, fmt.Sprint(i))
		}
		sum += int(c)
	}
	if more := sum - r.plan.n; len(missing) > 0 || more >= r.record.Last {
		r.errorf("epoch %d, last world of %d: %d indices too many, not delivered: %s", r.record.Epoch, r.record.Last, more, strings.Join(missing, " "))
	}
	r.state.Settle()
	clear(r.counts)
	r.record.Epoch++
	r.derive()
	if r.plan.setEpoch {
		r.sampler.SetEpoch(r.record.Epoch)
	}
}
