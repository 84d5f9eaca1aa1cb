package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// TestTrainAlone runs the complete training in a world of one.
func TestTrainAlone(t *testing.T) {
	set, heldOut, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	o := options{epochs: 10, batch: 8, hidden: 24, commitEvery: 3, rate: 0.01, seed: 1}

	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	m := newModel(o.hidden, uint64(o.seed))
	if err := train(t.Context(), w, m, set, o, newDisplay(out, o.epochs, set.Len())); err != nil {
		t.Fatal(err)
	}
	if got := m.accuracy(heldOut); got < 0.93 {
		t.Errorf("held-out accuracy %.4f, want at least 0.93", got)
	}
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(string(text)), "\n"); len(lines) != o.epochs ||
		!strings.HasPrefix(lines[0], "epoch 1  loss ") || !strings.Contains(lines[9], "epoch 10  loss 0.") {
		t.Errorf("printed:\n%s", text)
	}
}

// member is a worker of one world.
type member struct{ group *collective.Group }

func (m member) Group() *collective.Group { return m.group }

// TestStepTogether makes the same steps with three ranks and with one, whose batches are the union
// of the three.
func TestStepTogether(t *testing.T) {
	set, _, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	const ranks, batch, steps = 3, 4, 20
	train := func(g *collective.Group, images int) *optimizer {
		o := newOptimizer(member{g}, newModel(8, 1))
		for step := range steps {
			var mine []int
			for i := range images {
				mine = append(mine, step*ranks*batch+g.Rank()*images+i)
			}
			if _, err := o.step(t.Context(), set, mine, 0.05); err != nil {
				t.Errorf("rank %d, step %d: %v", g.Rank(), step, err)
			}
		}
		return o
	}
	var together [ranks]*optimizer
	var running sync.WaitGroup
	for r, g := range collective.Local(ranks) {
		running.Go(func() {
			defer g.Close()
			together[r] = train(g, batch)
		})
	}
	running.Wait()
	alone := train(collective.Local(1)[0], ranks*batch)

	for r, o := range together {
		if got, want := o.model.digest(), together[0].model.digest(); got != want {
			t.Errorf("weights of rank %d and rank 0 differ: %x and %x", r, got, want)
		}
	}
	for i, p := range alone.model.params {
		if d := math.Abs(float64(p - together[0].model.params[i])); d > 1e-4 {
			t.Fatalf("parameter %d of three ranks differs by %v from one rank with all their images", i, d)
		}
	}
}

func TestStepThatAbortsChangesNothing(t *testing.T) {
	set, _, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	groups := collective.Local(2)
	if err := groups[1].Close(); err != nil { // simulates a failed peer
		t.Fatal(err)
	}
	defer groups[0].Close()
	o := newOptimizer(member{groups[0]}, newModel(4, 1))
	before := o.model.digest()
	if _, err := o.step(t.Context(), set, []int{1, 2}, 1); err == nil {
		t.Fatal("a step with a peer that is gone succeeded")
	}
	if o.model.digest() != before {
		t.Error("the parameters have changed")
	}
}
