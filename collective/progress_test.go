package collective_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/hvdrun/hvdrun/collective"
)

// progressWays returns functions that connect the ranks of the tests below.
func progressWays(t *testing.T) map[string]func(n int) []*collective.Group {
	shared := newWorkers(t, collective.Config{}, 4)
	shared.hosts = "aaaa"
	sockets := newWorkers(t, collective.Config{}, 4)
	return map[string]func(int) []*collective.Group{
		"local":   collective.Local,
		"shared":  func(n int) []*collective.Group { return shared.connect(t, n) },
		"sockets": func(n int) []*collective.Group { return sockets.connect(t, n) },
	}
}

// TestProgress: a rank that has entered an operation has a higher number than one that has not, and
// the number stays the same while a rank is missing.
func TestProgress(t *testing.T) {
	for name, connect := range progressWays(t) {
		t.Run(name, func(t *testing.T) {
			groups := connect(3)
			before := groups[0].Progress()[0].Operation // connecting may count as one
			each(t, groups, func(g *collective.Group) error { return collective.Barrier(context.Background(), g) })
			for r, g := range groups {
				if p := g.Progress(); len(p) != 1 || p[0] != (collective.Progress{Operation: before + 1, What: "Barrier"}) {
					t.Fatalf("rank %d after a barrier: %+v", r, p)
				}
			}
			var waiting sync.WaitGroup
			for _, g := range groups[:2] {
				waiting.Go(func() {
					if err := collective.AllReduce(context.Background(), g, []float32{1}, collective.Sum); err != nil {
						t.Error(err)
					}
				})
			}
			in := collective.Progress{Operation: before + 2, Waiting: true, What: "AllReduce"}
			for _, g := range groups[:2] {
				for g.Progress()[0] != in {
				}
			}
			if p := groups[2].Progress()[0]; p.Operation != before+1 || p.Waiting {
				t.Errorf("the rank that is missing: %+v", p)
			}
			if err := collective.AllReduce(context.Background(), groups[2], []float32{1}, collective.Sum); err != nil {
				t.Error(err)
			}
			waiting.Wait()
			in.Waiting = false
			for r, g := range groups {
				if p := g.Progress()[0]; p != in {
					t.Errorf("rank %d at the end: %+v", r, p)
				}
			}
			each(t, groups, func(g *collective.Group) error { return g.Close() })
			for r, g := range groups {
				if p := g.Progress()[0]; p.Waiting {
					t.Errorf("rank %d, closed: %+v", r, p)
				}
			}
		})
	}
}

// TestProgressOfSubsets: the progress of a subset is comparable among its members only.
func TestProgressOfSubsets(t *testing.T) {
	for name, connect := range progressWays(t) {
		t.Run(name, func(t *testing.T) {
			groups := connect(3)
			subs := make([]*collective.Group, 3)
			each(t, groups, func(g *collective.Group) (err error) {
				subs[g.Rank()], err = g.Subset(context.Background(), []int{2, 0})
				return err
			})
			begun := subs[0].Progress()[1].Operation
			each(t, []*collective.Group{subs[0], subs[2]}, func(g *collective.Group) error {
				return collective.Barrier(context.Background(), g)
			})
			a, b, none := groups[0].Progress(), subs[2].Progress(), groups[1].Progress()
			if !slices.Equal(a, b) || len(a) != 2 || a[0].What != "Subset" || a[1].What != "Barrier" || a[1].Operation != begun+1 {
				t.Errorf("members: %+v and %+v", a, b)
			}
			if len(none) != 1 || none[0] != a[0] {
				t.Errorf("the rank outside: %+v", none)
			}
			each(t, groups, func(g *collective.Group) error { return g.Close() })
		})
	}
}

// TestProgressOfTensors: submitted tensors count as operations, which wait for the ranks that have
// not submitted them.
func TestProgressOfTensors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		groups := collective.Local(2)
		submit := func(rank, n int) (handles []*collective.Handle) {
			for i := range n {
				handles = append(handles, collective.AllReduceAsync(context.Background(), groups[rank], fmt.Sprint("t", i), []float32{1}, collective.Sum))
			}
			return handles
		}
		tensors := func(rank int) (found collective.Progress) {
			for _, p := range groups[rank].Progress() {
				if p.Lane != 0 && p.What != "AllReduceAsync" {
					found = p
				}
			}
			return found
		}
		early := submit(0, 3)
		synctest.Wait()
		if p := tensors(0); p.Operation != 3 || !p.Waiting || p.What != "t0" {
			t.Errorf("the early rank: %+v", p)
		}
		if p := tensors(1); p.Operation != 0 || p.Waiting || p.Lane != tensors(0).Lane {
			t.Errorf("the late rank: %+v", p)
		}
		for _, p := range groups[0].Progress() {
			if p.What == "AllReduceAsync" && p.Waiting {
				t.Errorf("the engines are idle: %+v", p)
			}
		}
		for _, h := range append(submit(1, 3), early...) {
			if err := h.Wait(); err != nil {
				t.Error(err)
			}
		}
		if p := tensors(0); p.Operation != 3 || p.Waiting {
			t.Errorf("the early rank at the end: %+v", p)
		}
		// A rank that joins has submitted fewer tensors, but is not behind.
		more := submit(0, 2)
		each(t, groups, func(g *collective.Group) error {
			_, err := collective.Join(context.Background(), g)
			return err
		})
		for _, h := range more {
			if err := h.Wait(); err != nil {
				t.Error(err)
			}
		}
		if a, b := tensors(0), tensors(1); a != b || a.Operation != 0 || a.Waiting {
			t.Errorf("after all have joined: %+v and %+v", a, b)
		}
		each(t, groups, func(g *collective.Group) error { return g.Close() })
	})
}

func TestProgressOfNothing(t *testing.T) {
	var none *collective.Group
	if p := none.Progress(); p != nil {
		t.Error(p)
	}
	if p := collective.Local(1)[0].Progress(); len(p) != 1 || p[0] != (collective.Progress{}) {
		t.Error(p)
	}
}

// each calls do for all groups concurrently.
func each(t *testing.T, groups []*collective.Group, do func(*collective.Group) error) {
	t.Helper()
	var all sync.WaitGroup
	for _, g := range groups {
		all.Go(func() {
			if err := do(g); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}
