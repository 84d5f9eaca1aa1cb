package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// ring is a set of ranks with the same parts that enter successive worlds together.
type ring struct {
	workers []*Worker
	states  []*State
	large   [][]byte
	many    [][][]float32
	steps   []int
}

func newRing(n, chunks int) *ring {
	r := &ring{steps: make([]int, n)}
	for i := range n {
		w := &Worker{meeting: solo{}, log: quiet()}
		w.member.Store(&membership{group: collective.Local(1)[0]})
		r.workers = append(r.workers, w)
		r.renew(i, chunks)
	}
	return r
}

// renew replaces rank i with a new process.
func (r *ring) renew(i, chunks int) {
	large, many := make([]byte, chunks*snapshot.ChunkSize-7), [][]float32{make([]float32, 5000), nil, make([]float32, 9000)}
	r.workers[i].reports.committed = 1 << 40 // disables reports of commits
	parts := []Part{Tensor("large", large), Tensors("many", many), Value("step", &r.steps[i])}
	if i%2 == 1 { // must make no difference
		Watched(parts[0])
		Watched(parts[1])
	}
	s := NewState(r.workers[i], parts...)
	if i < len(r.states) {
		r.states[i], r.large[i], r.many[i] = s, large, many
	} else {
		r.states, r.large, r.many = append(r.states, s), append(r.large, large), append(r.many, many)
	}
	r.steps[i] = 0
}

func (r *ring) enter(generation uint64, root int) {
	for i, g := range collective.Local(len(r.workers)) {
		slots := make([]plan.Slot, len(r.workers))
		w := line.World{World: plan.World{Generation: generation, Slots: slots}, Rank: i, SyncRoot: root}
		r.workers[i].member.Store(&membership{world: w, group: g})
	}
	for _, w := range r.workers {
		w.reports.committed = generation
	}
}

func (r *ring) all(t rapid.TB, f func(i int, s *State) error) {
	t.Helper()
	for i, err := range errorsOf(len(r.states), func(i int) error { return f(i, r.states[i]) }) {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
}

func (r *ring) sync(t rapid.TB) {
	t.Helper()
	r.all(t, func(_ int, s *State) error { return s.Sync(context.Background()) })
}

// touch changes byte b of a chunk.
func (r *ring) touch(i, chunk, b int) {
	r.large[i][chunk*snapshot.ChunkSize+b]++
	r.many[i][2][0]++
}

// same checks that the live state and the save of rank i equal those of the root.
func (r *ring) same(t rapid.TB, i, root int, live []byte, many [][]float32, step int) {
	t.Helper()
	check := func(what string) {
		t.Helper()
		if !bytes.Equal(r.large[i], live) || !bytes.Equal(kernel.Bytes(r.many[i][0]), kernel.Bytes(many[0])) || !bytes.Equal(kernel.Bytes(r.many[i][2]), kernel.Bytes(many[2])) || r.steps[i] != step {
			t.Fatalf("rank %d has another state than the root, %d: %s", i, root, what)
		}
	}
	check("live")
	r.large[i][3], r.steps[i] = r.large[i][3]+1, -1
	if err := r.states[i].Restore(); err != nil {
		t.Fatal(err)
	}
	check("saved")
}

// After a sync all ranks have the root's state, whatever they had before: its last commit, another
// commit or none, with later changes or without.
func TestSyncOfWhatDiffers(t *testing.T) {
	const n, chunks = 3, 2
	rapid.Check(t, func(t *rapid.T) {
		r := newRing(n, chunks)
		for i := range n {
			r.workers[i].verification.every = rapid.SampledFrom([]int{-1, -1, 0}).Draw(t, "every")
			if i > 0 {
				r.workers[i].verification = r.workers[0].verification
			}
		}
		for generation := uint64(1); generation < 3; generation++ {
			root := rapid.IntRange(0, n-1).Draw(t, "root")
			r.enter(generation, root)
			live := bytes.Clone(r.large[root])
			many, step := [][]float32{slices.Clone(r.many[root][0]), nil, slices.Clone(r.many[root][2])}, r.steps[root]
			r.sync(t)
			for i := range n {
				r.same(t, i, root, live, many, step)
			}
			for range rapid.IntRange(0, 2).Draw(t, "commits") {
				chunk, b := rapid.IntRange(0, chunks-1).Draw(t, "chunk"), rapid.SampledFrom([]int{0, 9000}).Draw(t, "byte")
				r.all(t, func(i int, s *State) error {
					r.touch(i, chunk, b)
					r.steps[i]++
					return s.Commit()
				})
			}
			last := rapid.SliceOfN(rapid.Bool(), n, n).Draw(t, "last commit") // which ranks make the last commit
			for i, s := range r.states {
				if last[i] {
					r.touch(i, 1, 77)
					p, err := s.beginCommit()
					if err != nil {
						t.Fatal(err)
					}
					p.Copy()
					p.Seal()
					s.commits++
				} else {
					s.saved.nextMark(s.worker.Generation()) // a commit that has begun and failed
				}
				switch rapid.SampledFrom([]string{"as saved", "as saved", "writes", "breaks its promise", "new"}).Draw(t, "then") {
				case "as saved":
					s.saved.clean = true
				case "writes":
					r.touch(i, 0, 5)
				case "breaks its promise":
					r.touch(i, 0, 5)
					s.saved.clean = true
				case "new":
					r.renew(i, chunks)
					r.states[i].saved.clean = rapid.Bool().Draw(t, "saved")
					if r.states[i].saved.clean {
						if err := r.states[i].Save(); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
		}
	})
}

// committed returns a ring that has made a commit after do.
func committed(t *testing.T, v verification, do func(r *ring)) *ring {
	r := newRing(3, 6)
	for _, w := range r.workers {
		w.verification = v
	}
	r.enter(1, 0)
	r.sync(t)
	do(r)
	r.all(t, func(_ int, s *State) error { return s.Commit() })
	for _, s := range r.states {
		s.saved.clean = true
	}
	return r
}

// A rank that has the root's commit is sent nothing. If its state has nevertheless become different
// during training, the first commit for which all ranks have finished the audit reports or heals
// that.
func TestNothingIsSentToWhoHasIt(t *testing.T) {
	for _, v := range []verification{{}, {heal: true}, {every: -1}} {
		r := committed(t, v, func(r *ring) { r.large[2][4*snapshot.ChunkSize+100] = 9 })
		r.enter(2, 1)
		r.sync(t)
		if r.large[2][4*snapshot.ChunkSize+100] != 9 || r.large[1][4*snapshot.ChunkSize+100] != 0 {
			t.Fatal("it was sent")
		}
		for _, s := range r.states {
			s.audits.running.Wait()
		}
		for i, err := range errorsOf(3, func(i int) error { return r.states[i].Commit() }) {
			var diverged *DivergedError
			if errors.As(err, &diverged) != (v == verification{}) || err != nil && !strings.Contains(err.Error(), `"large", chunk 4, ranks [2]`) {
				t.Errorf("%+v: rank %d: %v", v, i, err)
			}
		}
		if healed := r.large[2][4*snapshot.ChunkSize+100] == 0; healed != v.heal {
			t.Errorf("%+v: healed is %t", v, healed)
		}
		if r.states[0].audits.due != nil || len(r.states[0].word) != 4 {
			t.Error("it is compared again")
		}
	}
}

// A commit does not wait for a rank that has not finished its audit.
func TestAuditIsNotWaitedFor(t *testing.T) {
	r := committed(t, verification{}, func(*ring) {})
	r.enter(2, 1)
	r.sync(t)
	for _, s := range r.states {
		s.audits.running.Wait()
	}
	late := r.states[1].audits.due
	r.states[1].audits.due = &audit{root: late.root, done: make(chan struct{})}
	for range 2 {
		r.all(t, func(_ int, s *State) error { return s.Commit() })
	}
	if r.states[0].audits.due == nil {
		t.Error("compared without rank 1")
	}
	r.states[1].audits.due = late
	r.all(t, func(_ int, s *State) error { return s.Commit() })
	if r.states[0].audits.due != nil {
		t.Error("not compared")
	}
}

// In Run, train has returned with an unchanged state only if its error is the one that the last
// commit returned.
func TestTrainReturned(t *testing.T) {
	s, first, second := &State{}, &HostsUpdatedError{Change: plan.Added}, &HostsUpdatedError{Change: plan.Added}
	for name, test := range map[string]struct {
		promised *HostsUpdatedError
		err      error
		want     bool
	}{
		"as it is":              {first, first, true},
		"wrapped":               {first, errors.Join(first), true},
		"of an earlier one":     {second, first, false},
		"of a check":            {nil, first, false},
		"another error instead": {first, context.Canceled, false},
	} {
		s.saved.promised = test.promised
		if s.trainReturned(test.err); s.saved.clean != test.want || s.saved.promised != nil {
			t.Errorf("%s: clean is %t", name, s.saved.clean)
		}
	}
}

// BenchmarkSync measures a sync of two ranks by the size of a tensor in four cases: both have the
// root's last commit; one has the previous commit, which differs in a tenth of the tensor; one has
// no commit; and the root has changed its state since its commit.
func BenchmarkSync(b *testing.B) {
	for _, mb := range []int{1, 100, 1000} {
		for _, name := range []string{"both have it", "a tenth differs", "one is new", "not committed"} {
			b.Run(fmt.Sprintf("%d MB/%s", mb, name), func(b *testing.B) { benchSync(b, mb, name) })
		}
	}
}

func benchSync(b *testing.B, mb int, name string) {
	states, live := make([]*State, 2), make([][]byte, 2)
	r := &ring{states: states}
	for i := range states {
		live[i] = make([]byte, mb<<20)
		w := &Worker{meeting: solo{}, log: quiet()}
		w.member.Store(&membership{group: collective.Local(1)[0]})
		r.workers = append(r.workers, w)
		states[i] = NewState(w, Tensor("large", live[i]))
	}
	ctx := context.Background()
	each := func(f func(i int) error) {
		for _, err := range errorsOf(2, f) {
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	commit := func(i int) error {
		p, err := states[i].beginCommit()
		if err != nil {
			return err
		}
		p.Copy()
		p.Seal()
		states[i].saved.clean = true
		return nil
	}
	change := func(i, parts int) {
		for at := 0; at < len(live[i])/parts; at += 64 {
			live[i][at]++
		}
	}
	generation := uint64(1)
	r.enter(generation, 0)
	each(func(i int) error { return states[i].Sync(ctx) })
	for b.Loop() {
		b.StopTimer()
		each(func(i int) error {
			change(i, 10)
			return commit(i)
		})
		switch name {
		case "a tenth differs":
			change(0, 10)
			if err := commit(0); err != nil {
				b.Fatal(err)
			}
		case "one is new":
			states[1].saved.mark = snapshotID{}
		case "not committed":
			change(0, 10)
			states[0].saved.clean = false
		}
		for _, s := range states {
			s.audits.running.Wait()
		}
		generation++
		r.enter(generation, 0)
		runtime.GC()
		b.StartTimer()
		each(func(i int) error { return states[i].Sync(ctx) })
	}
}
