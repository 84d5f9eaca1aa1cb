package elastic

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// still is the meeting of a world that does not change.
type still struct {
	solo
	world  line.World
	group  *collective.Group
	update notify.Update
}

func (m *still) join(ctx context.Context, j line.Joining) (line.World, error) {
	if j.After >= m.world.Generation {
		return line.World{}, line.ErrFinished
	}
	return m.world, nil
}

func (m *still) connect(context.Context, line.World) (*collective.Group, error) {
	return m.group, nil
}

func (m *still) Connected(context.Context) bool { return true }
func (m *still) Latest() notify.Update          { return m.update }

// stillWorld returns the workers of a world of n that does not change, with the given root.
func stillWorld(t *testing.T, n, root int) []*Worker {
	t.Helper()
	slots := make([]plan.Slot, n)
	for r := range slots {
		slots[r] = plan.Slot{SlotID: plan.SlotID{Host: "a", Index: r}, Rank: r, LocalRank: r, LocalSize: n, CrossSize: 1}
	}
	workers := make([]*Worker, n)
	for r, g := range collective.Local(n) {
		world := line.World{World: plan.World{Generation: 3, Slots: slots}, Rank: r, SyncRoot: root, Seq: 5}
		w, err := newWorker(t.Context(), &still{world: world, group: g}).arrive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		workers[r] = w
	}
	t.Cleanup(func() {
		onAll(t, n, func(r int) error { return workers[r].Close() })
	})
	return workers
}

// onAll calls f for every rank concurrently and fails the test if a call fails.
func onAll(t *testing.T, n int, f func(rank int) error) {
	t.Helper()
	for r, err := range errorsOf(n, f) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

func errorsOf(n int, f func(rank int) error) []error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for r := range n {
		all.Go(func() { errs[r] = f(r) })
	}
	all.Wait()
	return errs
}

func TestWorkerTellsItsPlace(t *testing.T) {
	w := stillWorld(t, 3, 0)[2]
	if w.Rank() != 2 || w.Size() != 3 || w.LocalRank() != 2 || w.LocalSize() != 3 || w.CrossRank() != 0 ||
		w.CrossSize() != 1 || w.Slot() != 2 || w.Host() != "a" || w.Generation() != 3 || w.Group().Rank() != 2 {
		t.Errorf("%+v", *w.member.Load())
	}
}

// model is a state like that of the upstream cases STA-01 to STA-03.
type model struct {
	weights, bias []float32
	batch, epoch  int
	tags          map[string][]int
	state         *State
}

func newModel(w *Worker, at float32) *model {
	m := &model{
		weights: []float32{at, at, at, at}, bias: []float32{at},
		batch: 20 + w.Rank(), epoch: 10 + w.Rank(), tags: map[string][]int{"rank": {w.Rank()}},
	}
	m.state = NewState(w, Tensor("weights", m.weights), Tensor("bias", m.bias),
		Value("batch", &m.batch), Value("epoch", &m.epoch), Value("tags", &m.tags))
	return m
}

func (m *model) change() {
	copy(m.weights, []float32{1, 2, 3, 4})
	m.bias[0] = 0
	m.batch, m.epoch = 21, 11
	m.tags["new"] = nil
	if len(m.tags["rank"]) > 0 {
		m.tags["rank"][0] = -1
	}
}

func (m *model) check(t *testing.T, weights []float32, bias float32, batch, epoch int, tags map[string][]int) {
	t.Helper()
	if !slices.Equal(m.weights, weights) || m.bias[0] != bias || m.batch != batch || m.epoch != epoch ||
		!maps.EqualFunc(m.tags, tags, slices.Equal) {
		t.Errorf("%v %v %d %d %v; want %v %v %d %d %v",
			m.weights, m.bias[0], m.batch, m.epoch, m.tags, weights, bias, batch, epoch, tags)
	}
}

// Cases STA-01, STA-02 and STA-03, with a root that need not be rank 0.
func TestStateSyncRestoreCommit(t *testing.T) {
	for _, size := range []int{1, 2, 3} {
		for root := range size {
			workers := stillWorld(t, size, root)
			models := make([]*model, size)
			each := func(f func(r int, m *model) error) {
				t.Helper()
				onAll(t, size, func(r int) error { return f(r, models[r]) })
			}
			ones, two := []float32{1, 1, 1, 1}, []float32{1, 2, 3, 4}
			tags := map[string][]int{"rank": {root}}
			for r, w := range workers {
				models[r] = newModel(w, 2)
			}
			models[root] = newModel(workers[root], 1)
			models[root].state.commits = 7

			each(func(_ int, m *model) error { return m.state.Sync(t.Context()) }) // STA-01
			for _, m := range models {
				m.check(t, ones, 1, 20+root, 10+root, tags)
				m.change()
			}
			each(func(_ int, m *model) error { return m.state.Restore() }) // STA-02
			for _, m := range models {
				m.check(t, ones, 1, 20+root, 10+root, tags)
				m.change()
			}
			each(func(_ int, m *model) error { return m.state.Commit() }) // STA-03
			for _, m := range models {
				m.weights[3], m.tags = 9, nil
			}
			each(func(_ int, m *model) error { return m.state.Restore() })
			for _, m := range models {
				m.check(t, two, 0, 21, 11, map[string][]int{"rank": {-1}, "new": nil})
				if m.state.Commits() != 8 {
					t.Errorf("%d commits, want 8", m.state.Commits())
				}
			}
		}
	}
}

// A value is replaced and not merged into, so references to the old one stay unchanged.
func TestValueIsFresh(t *testing.T) {
	m := map[string]int{"a": 1}
	p := Value("m", &m)
	if err := p.Save(); err != nil {
		t.Fatal(err)
	}
	old := m
	m["b"] = 2
	if err := p.Restore(); err != nil {
		t.Fatal(err)
	}
	if len(m) != 1 || m["a"] != 1 || len(old) != 2 {
		t.Errorf("restored %v, old %v", m, old)
	}
}

// userPart is a user's part that fails on request.
type userPart struct {
	live, saved int
	fail        error
}

func (f *userPart) Save() error    { f.saved = f.live; return f.fail }
func (f *userPart) Restore() error { f.live = f.saved; return nil }
func (f *userPart) Sync(ctx context.Context, g *collective.Group, root int) error {
	b := []int64{int64(f.live)}
	err := collective.Broadcast(ctx, g, b, root)
	f.live = int(b[0])
	return err
}

func TestSaveIsAllOrNothing(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	weights, step, any := []int32{1}, 1, any(nil)
	sampler, user := NewSampler(4, SamplerOptions{}), &userPart{}
	any = 1
	s := NewState(w, Tensor("weights", weights), sampler, Value("step", &step), Value("any", &any), user)
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	move := func() {
		weights[0], step = 2, 2
		sampler.Next()
	}
	back := func(why string) {
		t.Helper()
		if err := s.Restore(); err != nil {
			t.Fatal(err)
		}
		if weights[0] != 1 || step != 1 || sampler.Position() != 0 {
			t.Errorf("%s: weights %v, step %d, position %d", why, weights, step, sampler.Position())
		}
	}
	move()
	any = func() {} // gob cannot encode it
	if err := s.Commit(); err == nil {
		t.Fatal("a function was saved")
	}
	back("a value fails")
	any = 1
	move()
	user.fail = errors.New("no room")
	if err := s.Commit(); !errors.Is(err, user.fail) {
		t.Fatal(err)
	}
	back("a userPart part fails")
	if s.Commits() != 0 {
		t.Errorf("%d commits", s.Commits())
	}
}

// wrapped is a user's part that embeds one of ours: its own methods must be called.
type wrapped struct {
	*Sampler
	saves int
}

func (w *wrapped) Save() error {
	w.saves++
	return w.Sampler.Save()
}

func TestForeignParts(t *testing.T) {
	workers := stillWorld(t, 2, 1)
	users := []*userPart{{live: 4}, {live: 5}}
	wraps := []*wrapped{{Sampler: NewSampler(8, SamplerOptions{})}, {Sampler: NewSampler(8, SamplerOptions{})}}
	wraps[1].Next()
	onAll(t, 2, func(r int) error { return NewState(workers[r], users[r], wraps[r]).Sync(t.Context()) })
	for r := range 2 {
		if users[r].live != 5 || users[r].saved != 5 || wraps[r].saves != 1 || wraps[r].Position() != 1 {
			t.Errorf("rank %d: %+v, %d saves, position %d", r, *users[r], wraps[r].saves, wraps[r].Position())
		}
	}
	if a, _ := wraps[0].Next(); !slices.Equal(a, []int{1}) {
		t.Errorf("rank 0 of 2 got %v", a)
	}
	if b, _ := wraps[1].Next(); !slices.Equal(b, []int{2}) {
		t.Errorf("rank 1 of 2 got %v", b)
	}
}

// A commit of a state without parts would save nothing.
func TestCommitWithoutParts(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	s := NewState(w)
	for _, err := range []error{s.Commit(), s.CommitAsync()} {
		if err == nil || !strings.Contains(err.Error(), "a state without parts") {
			t.Error(err)
		}
	}
	if err := s.CheckHostUpdates(); err != nil || s.Commits() != 0 {
		t.Errorf("%v, %d commits", err, s.Commits())
	}
}

func TestUnusableStates(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	var none *int
	one := 1
	for name, s := range map[string]*State{
		"worker is nil":                  NewState(nil),
		`tensor "x" of the state is nil`: NewState(w, Tensor[float32]("x", nil)),
		`tensor "y" of the state is nil`: NewState(w, Tensors[float32]("y", nil)),
		"part 1 of the state":            NewState(w, &userPart{}, nil),
		`named "x"`:                      NewState(w, Tensor("x", []int8{1}), Value("x", &one)),
		`value "p": its pointer i`:       NewState(w, Value("p", none)),
	} {
		train := func(context.Context) error { t.Errorf("%s: trained", name); return nil }
		for what, err := range map[string]error{
			"Run": Run(t.Context(), s, train), "Sync": s.Sync(t.Context()), "Commit": s.Commit(), "Save": s.Save(),
		} {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
	}
	s := NewState(w, Value("one", &one), Tensor("x", []int8{1}), NewSampler(1, SamplerOptions{}))
	if err := s.Restore(); !errors.Is(err, errNothingSaved) {
		t.Errorf("Restore before any Save: %v", err)
	}
}

// Both ranks detect incompatible states before anything is overwritten.
func TestSyncOfStatesThatDoNotFit(t *testing.T) {
	here, there := 1, 1
	for name, parts := range map[string][2][]Part{
		"1 parts on this rank and 2":                  {{Value("a", &here)}, {Value("a", &there), Value("b", &there)}},
		`value "b": int on this rank and a value "a"`: {{Value("b", &here)}, {Value("a", &there)}},
		"of 2 on this rank and a tensor":              {{Tensor("t", []int8{1, 2})}, {Tensor("t", []int8{1})}},
		"[]int16 of 1 on this rank":                   {{Tensor("t", []int16{1})}, {Tensor("t", []int8{1})}},
		"sampler of 3 indices":                        {{NewSampler(3, SamplerOptions{})}, {NewSampler(4, SamplerOptions{})}},
	} {
		workers := stillWorld(t, 2, 1)
		errs := errorsOf(2, func(r int) error {
			err := Run(t.Context(), NewState(workers[r], parts[r]...), func(ctx context.Context) error {
				return collective.Barrier(ctx, workers[r].Group())
			})
			return err
		})
		if errs[0] == nil || !strings.Contains(errs[0].Error(), name) {
			t.Errorf("%s: rank 0: %v", name, errs[0])
		}
		// The root only learns that this rank has failed, and still has no other world to join.
		if !errors.Is(errs[1], ErrFinished) {
			t.Errorf("%s: rank 1: %v", name, errs[1])
		}
	}
}

func TestCheckHostUpdates(t *testing.T) {
	for name, test := range map[string]struct {
		updates [3]notify.Update
		want    plan.Change // 0: continue
	}{
		"nobody has heard":          {},
		"one rank has heard":        {[3]notify.Update{1: {Seq: 6, Change: plan.Added}}, plan.Added},
		"the newest counts":         {[3]notify.Update{{Seq: 6, Change: 3}, {Seq: 7, Change: plan.Removed}, {}}, plan.Removed},
		"overtaken":                 {[3]notify.Update{{Seq: 6, Change: 3}, {Seq: 7}, {}}, 0},
		"of before this world":      {[3]notify.Update{{Seq: 5, Change: plan.Added}, {Seq: 4, Change: 3}, {}}, 0},
		"again after being undone":  {[3]notify.Update{{Seq: 8, Change: plan.Added}, {Seq: 7}, {}}, plan.Added},
		"the same seen by everyone": {[3]notify.Update{{Seq: 6, Change: 3}, {Seq: 6, Change: 3}, {Seq: 6, Change: 3}}, 3},
	} {
		workers := stillWorld(t, 3, 0)
		for r, err := range errorsOf(3, func(r int) error {
			workers[r].meeting.(*still).update = test.updates[r]
			return NewState(workers[r], Tensor("x", []int8{1})).Commit()
		}) {
			var updated *HostsUpdatedError
			if errors.As(err, &updated) != (test.want != 0) || updated != nil && updated.Change != test.want {
				t.Errorf("%s: rank %d: %v, want %v", name, r, err, test.want)
			}
		}
	}
}

// Cases SMP-01 to SMP-05.
func TestStateWithSampler(t *testing.T) {
	for _, size := range []int{1, 2, 4} {
		workers := stillWorld(t, size, 0)
		samplers, states := make([]*Sampler, size), make([]*State, size)
		for r, w := range workers {
			samplers[r] = NewSampler(8*size, SamplerOptions{Shuffle: true, Seed: 1, Batch: 2})
			states[r] = NewState(w, samplers[r])
		}
		all := func(f func(s *State) error) {
			t.Helper()
			onAll(t, size, func(r int) error { return f(states[r]) })
		}
		epoch := func() (indices []int, rounds int) {
			for {
				got, ok := round(t, samplers)
				if !ok {
					return indices, rounds
				}
				indices, rounds = append(indices, got...), rounds+1
				if p := samplers[0].Position(); p != 2*size*rounds {
					t.Errorf("size %d: position %d after round %d", size, p, rounds)
				}
			}
		}
		setEpoch := func(e int) {
			for _, s := range samplers {
				s.SetEpoch(e)
			}
		}
		all(func(s *State) error { return s.Sync(t.Context()) })
		for e := range 2 { // SMP-01
			setEpoch(e)
			if left := samplers[0].Len(); left != 8 {
				t.Errorf("size %d: %d indices for a rank, want 8", size, left)
			}
			indices, rounds := epoch()
			if once(t, indices, 8*size, 1); rounds != 4 {
				t.Errorf("size %d: %d rounds, want 4", size, rounds)
			}
		}
		if _, rounds := epoch(); rounds != 4 || samplers[0].Position() != 8*size { // SMP-02
			t.Errorf("size %d: %d rounds and position %d", size, rounds, samplers[0].Position())
		}
		setEpoch(2) // SMP-03
		round(t, samplers)
		round(t, samplers)
		all((*State).Commit)
		round(t, samplers)
		round(t, samplers)
		all((*State).Restore)
		if p := samplers[0].Position(); p != 2*2*size {
			t.Errorf("size %d: position %d restored", size, p)
		}
		round(t, samplers) // SMP-04
		all((*State).Commit)
		all(func(s *State) error { return s.Sync(t.Context()) })
		if p, left := samplers[0].Position(), samplers[0].Len(); p != 3*2*size || left != 2 {
			t.Errorf("size %d: position %d, %d left", size, p, left)
		}
		setEpoch(3) // SMP-05
		if _, rounds := epoch(); rounds != 4 {
			t.Errorf("size %d: %d rounds in the next epoch", size, rounds)
		}
	}
}
