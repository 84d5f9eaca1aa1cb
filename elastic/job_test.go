package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// job is a driver and its workers in one process. A worker is a goroutine; it dies by a panic that
// package elastic does not recover, after which the peers' group aborts.
type job struct {
	epochs, n, every int  // total epochs, samples, and steps between commits
	setEpoch         bool // whether it calls SetEpoch
	async            bool // whether it uses CommitAsync
	lives            []int
	replicas         int // of Local pieces
	respawn, flaky   []bool
	acts             []act
	comesLate        bool // whether a worker is added when the first is done

	procs sync.WaitGroup

	mu       sync.Mutex
	spawned  int
	start    int        // workers of the first world
	order    []*process // wanted workers that have joined, oldest first
	waiting  map[*process]seatWait
	world    plan.World
	groups   map[*process]*collective.Group // of the newest world
	commits  uint64                         // of the newest world's root
	update   notify.Update
	finished bool
	origin   uint64            // of the initial state that the job has, after the first sync
	ledger   map[uint64]uint64 // origin of the state by record.H
	best     uint64            // highest number of a Done report
	errs     []string
	ends     map[string]int
	deaths   int
	removals int
	census   *census // of the newest world
	counted  *census // the last complete one
}

// act is a change of the hosts after a number of steps.
type act struct {
	step int
	what string // add, remove or flap
	who  int
}

type seatWait struct {
	joining line.Joining
	answer  chan<- seatAnswer
}

type seatAnswer struct {
	world line.World
	err   error
}

// process is a worker process.
type process struct {
	job  *job
	id   int
	life int // number of remaining places where it survives; negative: it never dies

	listed, synced, removed bool

	state   *State
	worker  *Worker
	sampler *Sampler
	counts  []int32   // how often each index was delivered in this epoch
	weights []float64 // computed from the record, to detect a mix of two states
	record  record
	shard   shard

	seen      shard // at the beginning of its current world
	seenSteps int
}

type record struct {
	H       uint64 // digest of all previous steps
	Epoch   int
	Steps   int
	Commits uint64
	Last    int // size of the world of the last step
	Trail   map[string]int
}

type killed struct{}

func (j *job) errorf(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.errs = append(j.errs, fmt.Sprintf(format, args...))
}

// run runs the job to its end.
func (j *job) run(t rapid.TB) {
	j.waiting, j.ledger, j.ends = make(map[*process]seatWait), make(map[uint64]uint64), make(map[string]int)
	j.mu.Lock()
	for range j.start {
		j.spawn()
	}
	j.mu.Unlock()
	j.procs.Wait()
	for _, err := range j.errs {
		t.Error(err)
	}
	if j.ends["done"] == 0 {
		t.Errorf("nobody finished: %v", j.ends)
	}
}

// spawn starts a worker. The caller holds mu.
func (j *job) spawn() {
	p := &process{job: j, id: j.spawned, life: -1, counts: make([]int32, j.n), weights: make([]float64, 3000)}
	if p.id < len(j.lives) {
		p.life = j.lives[p.id]
	}
	j.spawned++
	p.record = record{H: mix(uint64(p.id)+1, 0), Trail: map[string]int{}}
	p.derive()
	j.ledger[p.record.H] = p.record.H
	p.shard = shard{Place: p.id}
	p.seen = p.shard
	j.procs.Go(p.main)
}

func (p *process) main() {
	defer func() {
		if r := recover(); r != nil && r != (killed{}) {
			panic(r)
		}
	}()
	w, err := newWorker(context.Background(), &seat{p: p}).arrive(context.Background())
	if err != nil {
		p.ended(err)
		return
	}
	p.worker = w
	w.replicas, w.log = p.job.replicas, quiet()
	p.sampler = NewSampler(p.job.n, SamplerOptions{Shuffle: true, Seed: 3, Batch: 2})
	p.state = NewState(w, &mortal{p}, Tensor("counts", p.counts), p.sampler, Value("record", &p.record), Local("shard", &p.shard),
		&mortal{p}, Tensor("weights", p.weights), &mortal{p})
	p.state.OnReset(func() error { p.mayDie(); return nil })
	p.ended(Run(context.Background(), p.state, p.train))
	if err := w.Close(); err != nil {
		p.job.errorf("worker %d: close: %v", p.id, err)
	}
}

func (p *process) ended(err error) {
	j := p.job
	j.mu.Lock()
	defer j.mu.Unlock()
	how := "done"
	switch {
	case err == nil && (p.record.Epoch != j.epochs || p.state.Commits() < j.best && !p.removed):
		j.errs = append(j.errs, fmt.Sprintf("worker %d is done in epoch %d with %d commits",
			p.id, p.record.Epoch, p.state.Commits()))
	case errors.Is(err, ErrRemoved):
		if how = "removed"; !p.removed {
			j.errs = append(j.errs, fmt.Sprintf("worker %d was removed by nobody", p.id))
		}
	case errors.Is(err, ErrFinished):
		how = "late"
	case err != nil:
		j.errs = append(j.errs, fmt.Sprintf("worker %d: %v", p.id, err))
	}
	j.ends[how]++
}

func mix(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 ^ b
	return (h ^ h>>29) * 0xbf58476d1ce4e5b9
}

func (p *process) derive() {
	for i := range p.weights {
		p.weights[i] = p.weight(i)
	}
}

func (p *process) weight(i int) float64 {
	return [3]float64{float64(p.record.H >> 40), float64(p.record.Steps), float64(p.record.Epoch)}[i%3]
}

// whole checks, when training begins, that the state is consistent and belongs to the job.
func (p *process) whole() {
	r, j, sum := p.record, p.job, 0
	for _, c := range p.counts {
		sum += int(c)
	}
	at := p.sampler.Position()
	mixed := false
	for i, w := range p.weights {
		mixed = mixed || w != p.weight(i)
	}
	if mixed || r.Trail["steps"] != r.Steps || sum < at || sum > at && at != j.n {
		j.errorf("worker %d: a mix of states: %+v, weights %v, position %d, counts %v", p.id, r, p.weights[:3], at, p.counts)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if p.state.Commits() != j.commits || r.Commits != j.commits {
		j.errs = append(j.errs, fmt.Sprintf("worker %d: commit %d (live %d), root %d",
			p.id, p.state.Commits(), r.Commits, j.commits))
	}
	origin, ok := j.ledger[r.H]
	if j.origin == 0 {
		j.origin = origin
	}
	if !ok || origin != j.origin {
		j.errs = append(j.errs, fmt.Sprintf("worker %d: a state from elsewhere: %+v", p.id, r))
	}
	p.synced = true
	p.enrol()
}

func (p *process) train(ctx context.Context) error {
	p.whole()
	for p.record.Epoch < p.job.epochs {
		if p.job.setEpoch {
			p.sampler.SetEpoch(p.record.Epoch)
		}
		for batch, ok := p.sampler.Next(); ok; batch, ok = p.sampler.Next() {
			if err := p.step(ctx, batch); err != nil {
				return fmt.Errorf("step %d: %w", p.record.Steps, err)
			}
		}
		p.endEpoch()
	}
	p.mayDie()
	return nil
}

func (p *process) step(ctx context.Context, batch []int) error {
	p.mayDie()
	g := p.worker.Group()
	delta := make([]int32, p.job.n)
	for _, i := range batch {
		delta[i]++
	}
	if err := collective.AllReduce(ctx, g, delta, collective.Sum); err != nil {
		return err
	}
	same := []uint64{p.record.H, ^p.record.H}
	if err := collective.AllReduce(ctx, g, same, collective.Max); err != nil {
		return err
	}
	if same[0] != ^same[1] {
		p.job.errorf("worker %d: the ranks' states differ in step %d", p.id, p.record.Steps)
	}
	p.state.Settle()
	before := p.record.H
	for i, d := range delta {
		p.counts[i] += d
		p.record.H = mix(p.record.H, uint64(i)<<8|uint64(d))
	}
	p.record.Last = g.Size()
	p.record.Steps++
	p.record.Trail["steps"] = p.record.Steps
	p.shard.H = mix(p.record.H, uint64(p.shard.Place))
	p.derive()
	p.job.stepped(p, before)
	p.mayDie()
	if p.record.Steps%p.job.every != 0 {
		return p.state.CheckHostUpdates()
	}
	p.record.Commits++
	if p.job.async {
		return p.state.CommitAsync()
	}
	return p.state.Commit()
}

// endEpoch checks that every index has been delivered once.
func (p *process) endEpoch() {
	sum := 0
	for i, c := range p.counts {
		if c == 0 {
			p.job.errorf("worker %d: index %d was not delivered in epoch %d", p.id, i, p.record.Epoch)
		}
		sum += int(c)
	}
	if more := sum - p.job.n; more >= p.record.Last {
		p.job.errorf("worker %d: %d indices too many in epoch %d in a world of %d", p.id, more, p.record.Epoch, p.record.Last)
	}
	p.state.Settle()
	clear(p.counts)
	p.record.Epoch++
	p.derive()
	if !p.job.setEpoch {
		return
	}
	p.sampler.SetEpoch(p.record.Epoch)
}

// stepped records a step, and applies the host changes that are due.
func (j *job) stepped(p *process, before uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ledger[p.record.H] = j.ledger[before]
	for len(j.acts) > 0 && j.acts[0].step <= p.record.Steps {
		a := j.acts[0]
		j.acts = j.acts[1:]
		switch a.what {
		case "add":
			j.spawn()
		case "remove":
			if victim := j.order[a.who%len(j.order)]; j.canSpare(victim) {
				victim.removed = true
				j.removals++
				j.leave(victim)
				j.push(plan.Removed)
			}
		case "flap":
			j.push(plan.Added)
			j.push(0)
		}
	}
}

func (j *job) push(c plan.Change) {
	j.update = notify.Update{Seq: j.update.Seq + 1, Change: c, Generation: j.world.Generation}
}

// canSpare reports whether other workers have the state.
func (j *job) canSpare(p *process) bool {
	return slices.ContainsFunc(j.order, func(o *process) bool { return o != p && (o.synced || j.origin == 0) })
}

func (j *job) leave(p *process) {
	j.order = slices.DeleteFunc(j.order, func(o *process) bool { return o == p })
}

// mayDie is called at every place where a worker can die.
func (p *process) mayDie() {
	j := p.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if p.life > 0 {
		p.life--
	}
	if p.life != 0 || !j.canSpare(p) {
		return
	}
	j.ends["killed"]++
	j.deaths++
	j.leave(p)
	if g := j.groups[p]; g != nil {
		g.Abort(errors.New("killed"))
	}
	if len(j.respawn) > 0 {
		if j.respawn[0] {
			j.spawn()
		}
		j.respawn = j.respawn[1:]
	}
	j.publish()
	panic(killed{})
}

// publish publishes a world when all wanted workers have joined. The caller holds mu.
func (j *job) publish() {
	if j.finished || len(j.order) == 0 || j.world.Generation == 0 && len(j.order) < j.start {
		return
	}
	root := -1
	for i, p := range j.order {
		wait, here := j.waiting[p]
		if !here {
			return
		}
		// Among equal candidates the youngest is the root, because every one of them must work.
		if wait.joining.HoldsState && (root < 0 || wait.joining.Commits >= j.waiting[j.order[root]].joining.Commits) {
			root = i
		}
	}
	if root < 0 {
		if j.origin != 0 {
			j.errs = append(j.errs, "the state is lost")
		}
		root = 0
	}
	j.commits = j.waiting[j.order[root]].joining.Commits
	j.world = plan.World{Generation: j.world.Generation + 1, Slots: make([]plan.Slot, len(j.order))}
	j.groups = make(map[*process]*collective.Group)
	for i, g := range collective.Local(len(j.order)) {
		j.world.Slots[i].Rank, j.world.Slots[i].Host = i, string(rune('a'+j.order[i].id%3))
		j.groups[j.order[i]] = g
	}
	for i, p := range j.order {
		w := line.World{World: j.world, Rank: i, SyncRoot: root, Seq: j.update.Seq}
		j.waiting[p].answer <- seatAnswer{world: w}
		delete(j.waiting, p)
	}
}

// seat is the meeting of a process.
type seat struct {
	p     *process
	calls int
}

func (s *seat) join(_ context.Context, joining line.Joining) (line.World, error) {
	j, answer := s.p.job, make(chan seatAnswer, 1)
	j.mu.Lock()
	switch {
	case s.p.removed: // also if the others are done before it joins
		answer <- seatAnswer{err: line.ErrRemoved}
	case j.finished:
		answer <- seatAnswer{err: line.ErrFinished}
	default:
		if !s.p.listed {
			s.p.listed = true
			j.order = append(j.order, s.p)
			j.push(plan.Added)
		}
		j.waiting[s.p] = seatWait{joining, answer}
		j.publish()
	}
	j.mu.Unlock()
	a := <-answer
	return a.world, a.err
}

func (s *seat) connect(_ context.Context, w line.World) (*collective.Group, error) {
	s.p.mayDie()
	j := s.p.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.flaky) > 0 {
		fail := j.flaky[0]
		if j.flaky = j.flaky[1:]; fail {
			err := errors.New("no route")
			j.groups[s.p].Abort(err)
			return nil, err
		}
	}
	return j.groups[s.p], nil
}

func (s *seat) Report(_ context.Context, r line.Report, generation, commits uint64) error {
	if r != line.Done {
		return nil
	}
	s.p.mayDie()
	j := s.p.job
	j.mu.Lock()
	defer j.mu.Unlock()
	if generation != j.world.Generation {
		return nil
	}
	if j.comesLate && !j.finished {
		j.spawn()
	}
	j.finished, j.best = true, commits
	for p, wait := range j.waiting {
		wait.answer <- seatAnswer{err: line.ErrFinished}
		delete(j.waiting, p)
	}
	return nil
}

// Connected and Latest: the driver is always connected, and ranks see its latest update in
// different steps.
func (s *seat) Connected(context.Context) bool { return true }
func (s *seat) Latest() notify.Update {
	s.p.mayDie()
	s.p.job.mu.Lock()
	defer s.p.job.mu.Unlock()
	if s.calls++; s.calls%3 != s.p.id%3 {
		return notify.Update{}
	}
	return s.p.job.update
}

func (s *seat) Loss() (notify.Loss, <-chan struct{}) { return notify.Loss{}, nil }
func (s *seat) close() error                         { return nil }

// mortal is a part during whose methods a worker can die.
type mortal struct{ p *process }

func (m *mortal) Save() error                                        { m.p.mayDie(); return nil }
func (m *mortal) Restore() error                                     { m.p.mayDie(); return nil }
func (m *mortal) Sync(context.Context, *collective.Group, int) error { m.p.mayDie(); return nil }

// Under any sequence of deaths, joins, departures and failed connections, all ranks have the same
// state. It is never a mix of two states or the initial state of a new worker, it has the highest
// commit of the survivors, and it contains every batch once.
func TestWholeJob(t *testing.T) {
	ends := make(map[string]int)
	rapid.Check(t, func(t *rapid.T) {
		j := &job{
			epochs:   rapid.IntRange(1, 3).Draw(t, "epochs"),
			n:        rapid.IntRange(1, 30).Draw(t, "n"),
			every:    rapid.IntRange(1, 3).Draw(t, "every"),
			setEpoch: rapid.Bool().Draw(t, "set epoch"),
			async:    rapid.Bool().Draw(t, "async"),
			lives:    rapid.SliceOfN(rapid.IntRange(-1, 60), 0, 10).Draw(t, "lives"),
			respawn:  rapid.SliceOfN(rapid.Bool(), 0, 10).Draw(t, "respawn"),
			flaky:    rapid.SliceOfN(rapid.Bool(), 0, 12).Draw(t, "flaky"),
			start:    rapid.IntRange(1, 5).Draw(t, "start"),
			replicas: rapid.IntRange(0, 2).Draw(t, "replicas"),
			acts: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) act {
				return act{
					step: rapid.IntRange(1, 40).Draw(t, "step"),
					what: rapid.SampledFrom([]string{"add", "remove", "flap"}).Draw(t, "what"),
					who:  rapid.IntRange(0, 5).Draw(t, "who"),
				}
			}), 0, 6).Draw(t, "acts"),
		}
		slices.SortStableFunc(j.acts, func(a, b act) int { return a.step - b.step })
		j.run(t)
		for how, n := range j.ends {
			ends[how] += n
		}
	})
	t.Log(ends)
}

// For each possible end of a worker or a shard, one fixed job reaches it. The random jobs are not
// certain to.
func TestEachEnd(t *testing.T) {
	for name, test := range map[string]struct {
		job  *job
		ends []string
	}{
		"death":      {&job{lives: []int{40}}, []string{"killed", "survived deaths", "left"}},
		"removal":    {&job{acts: []act{{step: 4, what: "remove", who: 1}}}, []string{"removed", "handed over", "left"}},
		"late comer": {&job{comesLate: true}, []string{"late"}},
	} {
		t.Run(name, func(t *testing.T) {
			j := test.job
			j.epochs, j.n, j.every, j.start, j.replicas = 3, 60, 1, 3, 1
			j.run(t)
			for _, how := range test.ends {
				if j.ends[how] == 0 {
					t.Errorf("nothing was %s: %v", how, j.ends)
				}
			}
		})
	}
}
