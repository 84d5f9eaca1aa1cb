package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/examples/digits/network"
	"github.com/hvdrun/hvdrun/plan"
)

// TestTrainUnderFailure trains while rank 0 dies in a commit, another worker in a sync, a host is
// added and one is drained. The network at the end is that of an undisturbed worker, bit by bit.
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
	o := options{epochs: 8, micro: 4, batch: 8, hidden: 24, rate: 0.03, seed: 1}

	err = elastictest.Undisturbed(elastictest.Config{
		Hosts: []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}},
		Deaths: []elastictest.Moment{
			{Rank: 0, Phase: elastictest.Saved, Commit: 10},
			{Rank: 1, Phase: elastictest.Syncing, Generation: 3},
		},
	}, func(ctx context.Context) (uint64, error) {
		w, err := elastic.Init(ctx)
		if err != nil {
			return 0, err
		}
		defer w.Close()
		m := network.New(o.hidden, uint64(o.seed))
		if err := train(ctx, w, m, set, o, newDisplay(out, o.epochs, set.Len())); err != nil {
			return 0, err
		}
		if got := m.Accuracy(heldOut); got < 0.92 {
			t.Errorf("held-out accuracy %.4f, want at least 0.92", got)
		}
		return m.Digest(), nil
	}, func(job *elastictest.Job) error {
		for _, next := range []func(){
			func() { job.AddHost("c", 1) },
			func() { job.DrainHost("b") },
		} {
			var seen uint64
			if err := job.Await(func(s elastictest.Status) bool { seen = s.LastCommit; return s.Commits > 0 }); err != nil {
				return err
			}
			if err := job.Await(elastictest.Commit(seen + 10)); err != nil {
				return err
			}
			next()
		}
		// Another worker must survive with the state, and not be about to leave.
		err := job.Await(func(s elastictest.Status) bool {
			leaves := slices.ContainsFunc(s.World.Slots, func(slot plan.Slot) bool { return slot.Host == "b" })
			return s.Commits > 0 && s.Lost == 0 && len(s.World.Slots) > 1 && !leaves
		})
		if err == nil {
			job.Kill(0)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
