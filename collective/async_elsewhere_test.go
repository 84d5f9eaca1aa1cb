package collective_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// far is a vector that only its own methods can access.
type far struct {
	data    []int32
	op      collective.Op
	fail    error
	hang    bool
	buckets *[]int // the sizes of the buckets so far
	ended   []error
}

func (f *far) Reduce(ctx context.Context, lane *collective.Group, bucket []collective.Work) error {
	if f.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if f.fail != nil {
		return f.fail
	}
	*f.buckets = append(*f.buckets, len(bucket))
	var all []int32
	for _, w := range bucket {
		all = append(all, w.(*far).data...)
	}
	if err := collective.AllReduce(ctx, lane, all, f.op); err != nil {
		return err
	}
	for _, w := range bucket {
		all = all[copy(w.(*far).data, all):]
	}
	return nil
}

func (f *far) Ended(err error) { f.ended = append(f.ended, err) }

func (f *far) as(name string) collective.Elsewhere {
	return collective.Elsewhere{Name: name, Type: kernel.Int32, Count: len(f.data), Work: f}
}

// TestElsewhere: vectors outside of main memory are submitted in different orders on the ranks,
// beside vectors in memory. All ranks reduce them in the same buckets, and small ones share a
// bucket.
func TestElsewhere(t *testing.T) {
	for _, hosts := range []string{"aaaa", ""} {
		w := newWorkers(t, collective.Config{FusionThreshold: 1000}, 4)
		w.hosts = hosts
		groups := w.connect(t, 4)
		buckets := make([][]int, 4)
		for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			for range 5 {
				var fars []*far
				var handles []*collective.Handle
				near := make([][]int32, 20)
				for i := range near {
					near[i] = []int32{int32(i)}
					fars = append(fars, &far{data: slices.Repeat([]int32{int32(g.Rank() + i)}, 10*i), op: collective.Sum, buckets: &buckets[g.Rank()]})
				}
				for _, i := range rand.Perm(len(near)) {
					handles = append(handles, collective.AllReduceElsewhere(ctx, g, collective.Sum, fars[i].as(fmt.Sprint("far ", i)))...)
					handles = append(handles, collective.AllReduceAsync(ctx, g, fmt.Sprint("near ", i), near[i], collective.Sum))
				}
				for _, h := range handles {
					if err := h.Wait(); err != nil {
						return err
					}
				}
				for i := range near {
					if near[i][0] != int32(4*i) || !slices.Equal(fars[i].data, slices.Repeat([]int32{int32(6 + 4*i)}, 10*i)) ||
						!slices.Equal(fars[i].ended, []error{nil}) {
						return fmt.Errorf("%d: %v, %v", i, near[i], fars[i])
					}
				}
			}
			a, b := &far{data: []int32{1}, op: collective.Max, buckets: &buckets[g.Rank()]}, &far{data: []int32{1, 2}, op: collective.Max, buckets: &buckets[g.Rank()]}
			for _, h := range collective.AllReduceElsewhere(ctx, g, collective.Max, a.as("a"), b.as("b")) {
				if err := h.Wait(); err != nil {
					return err
				}
			}
			return nil
		}) {
			if err != nil || !slices.Equal(buckets[rank], buckets[0]) {
				t.Errorf("rank %d: %v in buckets of %v, %v", rank, err, buckets[rank], buckets[0])
			}
		}
		if last := buckets[0][len(buckets[0])-1]; last != 2 || slices.Max(buckets[0]) < 3 {
			t.Errorf("buckets of %v", buckets[0])
		}
	}
}

// TestElsewhereFails: whatever ends such an operation on one rank ends it on all ranks. The rank on
// which it began returns its own error.
func TestElsewhereFails(t *testing.T) {
	broken := errors.New("broken")
	for what, f := range map[string]func(ctx context.Context, g *collective.Group, v *far) error{
		"work": func(ctx context.Context, g *collective.Group, v *far) error {
			if g.Rank() == 1 {
				v.fail = broken
			}
			return collective.AllReduceElsewhere(ctx, g, collective.Sum, v.as("v"))[0].Wait()
		},
		"a place": func(ctx context.Context, g *collective.Group, v *far) error {
			if g.Rank() == 1 {
				return collective.AllReduceAsync(ctx, g, "v", v.data, collective.Sum).Wait()
			}
			return collective.AllReduceElsewhere(ctx, g, collective.Sum, v.as("v"))[0].Wait()
		},
		"joined": func(ctx context.Context, g *collective.Group, v *far) error {
			if g.Rank() == 1 {
				_, err := collective.Join(ctx, g)
				return err
			}
			return collective.AllReduceElsewhere(ctx, g, collective.Sum, v.as("v"))[0].Wait()
		},
		"context": func(ctx context.Context, g *collective.Group, v *far) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			v.hang = true
			h := collective.AllReduceElsewhere(ctx, g, collective.Sum, v.as("v"))[0]
			if g.Rank() == 1 {
				cancel()
			}
			return h.Wait()
		},
		"close": func(ctx context.Context, g *collective.Group, v *far) error {
			v.hang = true
			h := collective.AllReduceElsewhere(ctx, g, collective.Sum, v.as("v"))[0]
			if g.Rank() == 1 {
				g.Close()
			}
			return h.Wait()
		},
		"refused": func(ctx context.Context, g *collective.Group, v *far) error {
			return collective.AllReduceElsewhere(ctx, g, collective.Adasum, v.as("v"))[0].Wait()
		},
	} {
		t.Run(what, func(t *testing.T) {
			groups := newWorkers(t, collective.Config{}, 3).connect(t, 3)
			vectors := make([]far, 3)
			for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				vectors[g.Rank()] = far{data: []int32{1, 2, 3}, op: collective.Sum, buckets: new([]int)}
				return f(ctx, g, &vectors[g.Rank()])
			}) {
				var mismatch *collective.MismatchError
				switch {
				case err == nil,
					what == "work" && errors.Is(err, broken) != (rank == 1), what == "work" && errors.Is(err, collective.ErrAborted) == (rank == 1),
					what == "a place" && (!errors.As(err, &mismatch) || !strings.Contains(err.Error(), "not in memory")),
					what == "context" && errors.Is(err, context.Canceled) != (rank == 1),
					what == "close" && rank != 1 && !errors.Is(err, collective.ErrAborted):
					t.Errorf("rank %d: %v", rank, err)
				}
				if v := &vectors[rank]; len(v.ended) > 1 || len(v.ended) == 1 && v.ended[0] != err {
					t.Errorf("rank %d: %v, but ended with %v", rank, err, v.ended)
				}
			}
			for _, g := range groups {
				g.Abort(nil)
			}
		})
	}
}
