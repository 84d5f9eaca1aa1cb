package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/micro"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// TestVerdict: the outcome of an interrupted step depends on what each member of the next world
// has.
func TestVerdict(t *testing.T) {
	node := func(i int) []collective.Node { return []collective.Node{{Index: i}} }
	newcomer := standing{}
	at := func(applied uint64) standing {
		return standing{State: true, Within: true, Applied: applied, Nodes: node(int(applied))}
	}
	sealed := func(s standing) standing { s.Sealed = true; return s }
	outside := func(s standing) standing { s.Within = false; return s }
	keeps := func(s standing) standing { s.Keeps = true; return s }
	feeds := func(s standing) standing { s.Feed = 7; return s }
	follower := func(applied uint64) standing { return standing{Replays: true, Applied: applied, Feed: 7} }
	for name, c := range map[string]struct {
		all  []standing
		root int
		want verdict
	}{
		"a new job":         {[]standing{newcomer, newcomer}, 1, verdict{root: 1, source: -1}},
		"in one step":       {[]standing{at(4), at(4)}, 1, verdict{reached: 4, root: 1, source: -1, held: [][]collective.Node{node(4), node(4)}}},
		"with a newcomer":   {[]standing{at(4), newcomer}, 0, verdict{reached: 4, source: -1, held: [][]collective.Node{node(4), nil}}},
		"all have averages": {[]standing{sealed(at(4)), sealed(at(4))}, 0, verdict{reached: 5, source: 0}},
		"one has averages":  {[]standing{newcomer, at(4), sealed(at(4)), at(4)}, 1, verdict{reached: 5, root: 1, source: 2, lacking: true}},
		"one has applied":   {[]standing{sealed(at(4)), at(5)}, 1, verdict{reached: 5, root: 1, source: 0, held: [][]collective.Node{nil, node(5)}}},
		"one is behind":     {[]standing{at(3), at(5)}, 1, verdict{reached: 5, root: 1, source: -1, held: [][]collective.Node{nil, node(5)}}},
		"the root is behind": {[]standing{outside(at(4)), sealed(at(4)), at(4)}, 0,
			verdict{reached: 5, root: 1, source: 1, lacking: true}},
		"the root has applied less": {[]standing{at(4), at(5)}, 0, verdict{reached: 5, root: 1, source: -1, held: [][]collective.Node{nil, node(5)}}},
		"a follower is level":       {[]standing{at(4), follower(4)}, 0, verdict{reached: 4, source: -1, held: [][]collective.Node{node(4), nil}}},
		"a follower is ahead":       {[]standing{at(4), follower(5)}, 0, verdict{reached: 4, source: -1, held: [][]collective.Node{node(4), nil}}},
		"a follower needs one":      {[]standing{sealed(at(4)), follower(4)}, 0, verdict{reached: 5, source: 0, lacking: true, replayed: true}},
		"a follower needs one, kept": {[]standing{at(5), keeps(at(5)), follower(4)}, 0,
			verdict{reached: 5, source: 1, kept: true, lacking: true, replayed: true, held: [][]collective.Node{node(5), node(5), nil}}},
		"a follower needs one, kept by none": {[]standing{at(5), keeps(at(4)), follower(4)}, 0,
			verdict{reached: 5, source: -1, held: [][]collective.Node{node(5), nil, nil}}},
		"a follower needs two, one kept": {[]standing{keeps(at(5)), follower(3)}, 0,
			verdict{reached: 5, source: -1, held: [][]collective.Node{node(5), nil}}},
		"it gets it by its feed": {[]standing{keeps(feeds(at(5))), follower(4)}, 0,
			verdict{reached: 5, source: -1, held: [][]collective.Node{node(5), nil}}},
		"a follower needs two": {[]standing{sealed(at(4)), follower(3)}, 0, verdict{reached: 5, source: 0}},
		"the root is behind a follower": {[]standing{outside(at(4)), follower(4), sealed(at(4))}, 0,
			verdict{reached: 5, root: 2, source: 2, lacking: true, replayed: true}},
	} {
		if c.want.held == nil {
			c.want.held = make([][]collective.Node, len(c.all))
		}
		if got := verdictOf(c.all, c.root); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// TestAwaits: the others wait for a follower that lacks only the averages of the last step, if the
// member it follows is one of them and has applied that step.
func TestAwaits(t *testing.T) {
	member := func(applied, feed uint64) standing {
		return standing{State: true, Within: true, Applied: applied, Feed: feed}
	}
	sealed := func(s standing) standing { s.Sealed = true; return s }
	follower := func(applied, feed uint64) standing { return standing{Replays: true, Applied: applied, Feed: feed} }
	for name, c := range map[string]struct {
		all  []standing
		want bool
	}{
		"it lacks one":            {[]standing{follower(4, 7), member(5, 7)}, true},
		"it lacks one of one":     {[]standing{follower(4, 7), member(5, 0), member(5, 7)}, true},
		"it lacks two":            {[]standing{follower(3, 7), member(5, 7)}, false},
		"it lacks two, one given": {[]standing{follower(3, 7), sealed(member(4, 7))}, false},
		"it is given one":         {[]standing{follower(4, 7), sealed(member(4, 7))}, false},
		"it lacks none":           {[]standing{follower(5, 7), member(5, 7)}, false},
		"it follows a dead one":   {[]standing{follower(4, 7), member(5, 8)}, false},
		"it follows a newcomer":   {[]standing{follower(4, 7), {Feed: 7, Applied: 5}, member(5, 0)}, false},
		"it follows one behind":   {[]standing{follower(4, 7), member(4, 7), member(5, 0)}, false},
		"it follows nobody":       {[]standing{follower(4, 0), member(5, 0)}, false},
		"it has another state":    {[]standing{{Applied: 4, Feed: 7}, member(5, 7)}, false},
		"it is a member, and old": {[]standing{member(4, 7), member(5, 7)}, false},
	} {
		if got := c.all[0].awaits(c.all, verdictOf(c.all, len(c.all)-1)); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestTell: each rank gets the standings of all ranks.
func TestTell(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	groups := collective.Local(3)
	for range 100 {
		want := make([]standing, len(groups))
		for i := range want {
			s := standing{State: r.IntN(2) > 0, Within: r.IntN(2) > 0, Sealed: r.IntN(2) > 0, Replays: r.IntN(2) > 0, Keeps: r.IntN(2) > 0,
				Applied: r.Uint64(), Feed: r.Uint64()}
			for range r.IntN(20) {
				s.Nodes = append(s.Nodes, collective.Node{Level: r.IntN(17), Index: r.IntN(1 << 16)})
			}
			want[i] = s
		}
		var ranks sync.WaitGroup
		for i, g := range groups {
			ranks.Go(func() {
				if got, err := tell(t.Context(), g, want[i]); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("rank %d got %+v, %v, want %+v", i, got, err, want)
				}
			})
		}
		ranks.Wait()
	}
}

// FuzzStanding: of the nodes in a standing that is accepted, only those of the tree count.
func FuzzStanding(f *testing.F) {
	f.Add([]byte(`{"State":true,"Applied":7,"Nodes":[{"Level":3,"Index":1},{"Level":1,"Index":2}]}`), uint8(20))
	f.Add([]byte(`{"State":true,"Nodes":[{"Level":-1,"Index":-5},{"Level":900,"Index":9}]}`), uint8(8))
	f.Fuzz(func(t *testing.T, b []byte, leaves uint8) {
		var s standing
		if json.Unmarshal(b, &s) != nil || leaves == 0 {
			return
		}
		n := int(leaves)
		v := verdictOf([]standing{s, {State: true, Applied: s.Applied}}, 1)
		kept, missing := micro.Accept(n, v.held)
		for _, nodes := range kept {
			for _, node := range nodes {
				if node.Level < 0 || node.Index < 0 || node.End(n) > n || node.First() >= node.End(n) {
					t.Fatalf("%s: %+v counts in a tree of %d leaves", b, node, n)
				}
				missing = append(missing, make([]int, node.End(n)-node.First())...)
			}
		}
		if len(missing) != n {
			t.Errorf("%s: %d leaves of %d", b, len(missing), n)
		}
	})
}

func FuzzStepsPosition(f *testing.F) {
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(_ *testing.T, b []byte) {
		_ = NewSteps[float32](new(Worker), StepsOptions{Microbatches: 2}).decode(b)
	})
}

// TestStepsRefused: Step and Commit return an error that names what is wrong with the Steps.
func TestStepsRefused(t *testing.T) {
	w, err := Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	step := func(s *Steps[float32]) error {
		return s.Step(t.Context(), func(Micro[float32]) error { return nil }, func([][]float32) error { return nil })
	}
	for want, s := range map[string]*Steps[float32]{
		"worker is nil":         NewSteps[float32](nil, StepsOptions{Microbatches: 1}, 1),
		"Microbatches is 0":     NewSteps[float32](w, StepsOptions{}, 1),
		"Microbatches is 65537": NewSteps[float32](w, StepsOptions{Microbatches: 65537}, 1),
		"-1 elements":           NewSteps[float32](w, StepsOptions{Microbatches: 1}, -1),
	} {
		if err := step(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Step: %v, want %q", err, want)
		}
		if err := NewState(w, s).Commit(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Commit: %v, want %q", err, want)
		}
	}
	good := NewSteps[float32](w, StepsOptions{Microbatches: 2}, 1)
	if err := step(good); err == nil || !strings.Contains(err.Error(), "give it to NewState") {
		t.Errorf("Step of steps without a state: %v", err)
	}
	NewState(w, good)
	if err := step(good); err == nil || !strings.Contains(err.Error(), "outside of Run") {
		t.Errorf("Step outside Run: %v", err)
	}
	if err := NewState(w, good).Commit(); err == nil || !strings.Contains(err.Error(), "two states") {
		t.Errorf("steps in two states: %v", err)
	}
	if err := NewState(w, NewSteps[float32](w, StepsOptions{Name: "a", Microbatches: 2}), NewSteps[float32](w, StepsOptions{Name: "b", Microbatches: 2})).Commit(); err == nil {
		t.Error("two Steps in one state")
	}
}

// TestStepsAlone: the microbatches in a world of one, with the short step at the end of an epoch,
// and errors of the program's functions.
func TestStepsAlone(t *testing.T) {
	w, err := Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	steps := NewSteps[float64](w, StepsOptions{Microbatches: 4, Batches: NewBatches(11, SamplerOptions{Batch: 2})}, 0, 3)
	state := NewState(w, steps)
	var seen []int
	var counts []int
	random := map[float64]bool{}
	errBackward, errApply := errors.New("backward"), errors.New("apply")
	err = Run(t.Context(), state, func(ctx context.Context) error {
		for steps.Epoch() < 2 {
			n := 0
			backward := func(m Micro[float64]) error {
				n++
				if m.Index != n-1 || m.Step != steps.Applied() || m.Epoch != steps.Epoch() || m.Number != steps.Position()+m.Index {
					t.Errorf("microbatch %+v, number %d of step %d", m, n-1, steps.Applied())
				}
				if !slices.Equal(m.Gradient[1], []float64{0, 0, 0}) || len(m.Gradient[0]) != 0 {
					t.Errorf("gradients %v before backward", m.Gradient)
				}
				random[m.Rand().Float64()] = true
				seen = append(seen, m.Samples...)
				m.Gradient[1][2] = float64(m.Index)
				return nil
			}
			if err := steps.Step(ctx, func(Micro[float64]) error { return errBackward }, func([][]float64) error { return nil }); !errors.Is(err, errBackward) {
				t.Errorf("the error is %v", err)
			}
			if err := steps.Step(ctx, backward, nil); err == nil || !strings.Contains(err.Error(), "needs two functions") {
				t.Errorf("Step without apply: %v", err)
			}
			applied := steps.Applied()
			if err := steps.Step(ctx, backward, func([][]float64) error { return errApply }); !errors.Is(err, errApply) || steps.Applied() != applied {
				t.Errorf("the error is %v", err)
			}
			if n == 0 {
				t.Error("no microbatch")
			}
			err := steps.Step(ctx, backward, func(mean [][]float64) error {
				if want := float64(n-1) / 2; mean[1][2] != want {
					t.Errorf("mean %v of %d microbatches, want %v", mean[1][2], n, want)
				}
				counts = append(counts, n)
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(counts, []int{4, 2, 4, 2}) || steps.Position() != 0 || steps.Applied() != 4 {
		t.Errorf("steps of %v microbatches; %d applied, position %d", counts, steps.Applied(), steps.Position())
	}
	want := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	if !slices.Equal(seen, append(want, want...)) {
		t.Errorf("samples %v", seen)
	}
	if len(random) != 12 {
		t.Errorf("%d random numbers of 12 microbatches", len(random))
	}
}

// TestAppliedStepIsNotSent: if one rank has committed a step and another applies it in the next
// world, both have the same state, and the sync sends nothing of it.
func TestAppliedStepIsNotSent(t *testing.T) {
	const hidden = snapshot.ChunkSize + 100 // not among the bytes that are compared
	r := newRing(2, 2)
	var steps []*Steps[float32]
	for i, w := range r.workers {
		s := NewSteps[float32](w, StepsOptions{Microbatches: 2}, 1)
		r.states[i] = NewState(w, Tensor("large", r.large[i]), s)
		w.verification.every = -1
		steps = append(steps, s)
	}
	r.enter(1, 0)
	r.sync(t)
	for i, s := range steps {
		s.prepare()
		s.within, s.sealed = true, true
		s.apply = func([][]float32) error {
			r.large[i][3]++
			r.large[i][hidden] = byte(i) // equal on all ranks in a correct program
			return nil
		}
	}
	if err := steps[1].applySealed(); err != nil {
		t.Fatal(err)
	}
	p, err := r.states[1].beginCommit()
	if err != nil {
		t.Fatal(err)
	}
	p.Copy()
	r.states[1].seal(p)
	r.states[1].commits++
	for generation := uint64(2); generation < 4; generation++ {
		for _, s := range r.states {
			s.saved.clean = true
		}
		r.enter(generation, 1)
		r.sync(t)
		for i, s := range r.states {
			if s.commits != r.states[1].commits || steps[i].Applied() != 1 || r.large[i][3] != 1 {
				t.Errorf("generation %d: rank %d is at commit %d, step %d", generation, i, s.commits, steps[i].Applied())
			}
			if r.large[i][hidden] != byte(i) {
				t.Errorf("generation %d: rank %d was sent what it has", generation, i)
			}
		}
	}
	for _, s := range steps {
		s.close()
	}
}

// TestStepsOfRanksDiffer: if the options of ranks differ, an error names the difference before
// anything is computed.
func TestStepsOfRanksDiffer(t *testing.T) {
	for what, options := range map[string][2]StepsOptions{
		"of 4 microbatches": {{Microbatches: 4}, {Microbatches: 8}},
		"seed 5":            {{Microbatches: 4, Seed: 5}, {Microbatches: 4, Seed: 6}},
		"no samples":        {{Microbatches: 4}, {Microbatches: 4, Batches: NewBatches(8, SamplerOptions{Batch: 2})}},
	} {
		r := newRing(2, 1)
		var all []*Steps[float32]
		for i, w := range r.workers {
			s := NewSteps[float32](w, options[i], 1)
			r.states[i] = NewState(w, Tensor("large", r.large[i]), s)
			all = append(all, s)
		}
		r.enter(1, 0)
		var errs [2]error
		var syncing sync.WaitGroup
		for i, s := range r.states {
			syncing.Go(func() {
				if errs[i] = s.Sync(t.Context()); errs[i] != nil {
					r.workers[i].group().Abort(errs[i]) // as Run does
				}
			})
		}
		syncing.Wait()
		if errs[1] == nil || !strings.Contains(errs[1].Error(), what) || !strings.Contains(errs[1].Error(), "on the root") {
			t.Errorf("%q: rank 1 is told %v", what, errs[1])
		}
		for _, s := range all {
			s.close()
		}
	}
}

// TestStepsPanic: a panic in one of the program's functions passes through Step and Run unchanged.
func TestStepsPanic(t *testing.T) {
	w, err := Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	steps := NewSteps[float32](w, StepsOptions{Microbatches: 1}, 1)
	state := NewState(w, steps)
	run := func(backward func(Micro[float32]) error, apply func([][]float32) error) (panicked any) {
		defer func() { panicked = recover() }()
		_ = Run(t.Context(), state, func(ctx context.Context) error { return steps.Step(ctx, backward, apply) })
		return nil
	}
	fine := func(Micro[float32]) error { return nil }
	if got := run(func(Micro[float32]) error { panic("backward") }, func([][]float32) error { return nil }); got != "backward" {
		t.Errorf("the panic of backward is %v", got)
	}
	if got := run(fine, func([][]float32) error { panic("apply") }); got != "apply" {
		t.Errorf("the panic of apply is %v", got)
	}
	if steps.within || steps.Applied() != 0 {
		t.Errorf("within a step: %v, %d applied", steps.within, steps.Applied())
	}
}

// TestCommitsInPlace: commits of steps are made in place once apply has made no collective calls
// for some steps. They are copied if apply makes such calls, if the program asks the kernel to
// watch the tensors, and before others write to the tensors.
func TestCommitsInPlace(t *testing.T) {
	for _, c := range []struct {
		name    string
		watched bool
		calls   int // the first step in which apply makes a collective call; 0: none
		from    int // the first commit in place; 0: none
		until   int // the first one after it that is copied; 0: none
	}{
		{"calm", false, 0, 2, 0},
		{"watched", true, 0, 0, 0},
		{"calls", false, 1, 0, 0},
		{"late call", false, 4, 2, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, err := Init(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			weights := make([]float32, 8192)
			steps := NewSteps[float32](w, StepsOptions{Microbatches: 1}, 1)
			tensor := Tensor("weights", weights)
			if c.watched {
				tensor = Watched(tensor)
			}
			state := NewState(w, tensor, steps)
			err = Run(t.Context(), state, func(ctx context.Context) error {
				for n := 1; n <= 6; n++ {
					err := steps.Step(ctx, func(Micro[float32]) error { return nil }, func([][]float32) error {
						weights[n]++
						if n == c.calls {
							return collective.Barrier(ctx, w.Group())
						}
						return nil
					})
					if err != nil {
						return err
					}
					want := c.from > 0 && n >= c.from && (c.until == 0 || n < c.until)
					if state.saved.InPlace() != want {
						t.Errorf("the commit of step %d lies in place: %v", n, !want)
					}
				}
				before := slices.Clone(weights)
				mark := state.saved.mark
				if err := state.secure(); err != nil {
					return err
				}
				weights[0]++
				if state.saved.InPlace() || state.saved.mark != mark {
					t.Error("a commit lies in place, or is another, after secure")
				}
				if err := state.Restore(); err != nil || !slices.Equal(weights, before) {
					t.Errorf("Restore after secure: %v, and the tensors are others: %v", err, !slices.Equal(weights, before))
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestSpreadAudit: an audit after a sync is spread over the steps that follow, so that the first is
// not delayed. It finds ranks whose states differ.
func TestSpreadAudit(t *testing.T) {
	r := newRing(2, 2)
	var steps []*Steps[float32]
	for i, w := range r.workers {
		s := NewSteps[float32](w, StepsOptions{Microbatches: 2}, 1)
		r.states[i] = NewState(w, Tensor("large", r.large[i]), s)
		steps = append(steps, s)
	}
	r.enter(1, 0)
	r.sync(t)
	for i, s := range r.states {
		if err := s.beginSpread(0); err != nil {
			t.Fatal(err)
		}
		r.large[i][len(r.large[i])-1] = byte(i)
		chunks := len(s.audits.due.spread.chunks)
		calls := 0
		for word := make([]uint64, 3); ; calls++ {
			if s.audits.due.fill(word); word[0] == 0 {
				break
			}
			s.auditSome()
		}
		if want := 1 + (chunks+spreadShare-1)/spreadShare; calls != want {
			t.Errorf("%d chunks are read within %d steps, want %d", chunks, calls, want)
		}
	}
	if a, b := r.states[0].audits.due.sums, r.states[1].audits.due.sums; digestOf(a) == digestOf(b) {
		t.Error("the checksums of different states are equal")
	}
	for _, s := range steps {
		s.close()
	}
}
