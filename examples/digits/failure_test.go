package main

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/plan"
)

// TestTrainUnderFailure trains while rank 0 dies in a commit, another worker in a sync, a host is
// added and one is drained. All workers end with the same network, which is as accurate as without
// failures.
func TestTrainUnderFailure(t *testing.T) {
	set, heldOut, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	o := options{epochs: 8, batch: 8, hidden: 24, commitEvery: 3, rate: 0.01, seed: 1}
	var mu sync.Mutex
	var models []*model

	job := elastictest.Start(elastictest.Config{
		Hosts: []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}},
		Deaths: []elastictest.Moment{
			{Rank: 0, Phase: elastictest.Saved, Commit: 10},
			{Rank: 1, Phase: elastictest.Syncing, Generation: 3},
		},
		Worker: func(ctx context.Context) error {
			w, err := elastic.Init(ctx)
			if err != nil {
				return err
			}
			defer w.Close()
			m := newModel(o.hidden, uint64(o.seed))
			if err := train(ctx, w, m, set, o, newDisplay(out, o.epochs, set.Len())); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			models = append(models, m)
			return nil
		},
	})
	for _, next := range []func(){
		func() { job.AddHost("c", 1) },
		func() { job.DrainHost("b") },
		func() { job.Kill(0) },
	} {
		var seen uint64
		if err := job.Await(func(s elastictest.Status) bool { seen = s.LastCommit; return s.Commits > 0 }); err != nil {
			t.Fatal(err)
		}
		if err := job.Await(elastictest.Commit(seen + 10)); err != nil {
			t.Fatal(err)
		}
		next()
	}
	if err := job.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, m := range models {
		if m.digest() != models[0].digest() {
			t.Error("workers ended with different networks")
		}
		if got := m.accuracy(heldOut); got < 0.92 {
			t.Errorf("held-out accuracy %.4f, want at least 0.92", got)
		}
	}
	if len(models) == 0 {
		t.Error("nobody came to the end")
	}
}
