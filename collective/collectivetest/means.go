package collectivetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// CheckMeans checks that an Average of 16-bit floats is correct, in every operation, although the
// sum or a partial sum overflows the type, or the share of one rank underflows it.
func CheckMeans(t *testing.T, groups []*collective.Group) {
	t.Helper()
	// Partial sums of these are exact, whatever ranks are on a host.
	values := []float32{49152, -49152, 1.0 / (1 << 24), 3.0 / (1 << 14)}
	lengths := []int{3, 5000, 70_001}
	if short() {
		lengths = []int{3, 9001}
	}
	for _, length := range lengths {
		halves := func() []collective.Float16 {
			return repeated(length, func(i int) collective.Float16 { return collective.ToFloat16(values[i%2]) })
		}
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			want, n := halves(), g.Size()
			data := halves()
			if err := collective.AllReduce(ctx, g, data, collective.Average); err != nil || !equal(data, want) {
				return fmt.Errorf("AllReduce of %d: %v, %w", length, data[0].Float32(), cmp.Or(err, errWrong))
			}
			part, err := collective.ReduceScatter(ctx, g, data, collective.Average)
			if err != nil || !equal(part, partOf(want, n, g.Rank())) {
				return fmt.Errorf("ReduceScatter of %d: %v, %w", length, part[:1], cmp.Or(err, errWrong))
			}
			single := repeated(length, func(i int) float32 { return values[i%2] })
			wide := repeated(length, func(i int) float32 { return values[i%2] })
			if err := collective.AllReduceCompressed(ctx, g, single, collective.Average, collective.CompressFloat16); err != nil || !equal(single, wide) {
				return fmt.Errorf("AllReduceCompressed of %d: %v, %w", length, single[0], cmp.Or(err, errWrong))
			}
			for range 4 { // the later ones may be guessed
				more := halves()
				handles := []*collective.Handle{
					collective.AllReduceAsync(ctx, g, fmt.Sprint("means ", length), data, collective.Average),
					collective.AllReduceAsync(ctx, g, fmt.Sprint("more ", length), more, collective.Average),
					collective.AllReduceAsyncWith(ctx, g, fmt.Sprint("wide ", length), single, collective.Average,
						collective.AsyncOptions{Compression: collective.CompressFloat16}),
				}
				for i, h := range handles {
					if err := h.Wait(); err != nil {
						return fmt.Errorf("asynchronous %d of %d: %w", i, length, err)
					}
				}
				if !equal(data, want) || !equal(more, want) || !equal(single, wide) {
					return fmt.Errorf("asynchronous ones of %d: %v, %v, %v", length, data[0].Float32(), more[0].Float32(), single[0])
				}
			}
			return checkMeanTree(ctx, g, want)
		}))
	}
	// A value of a single rank must appear in the mean.
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		data := repeated(3000, func(i int) collective.Float16 { return collective.ToFloat16(values[i%len(values)]) })
		want := append([]collective.Float16(nil), data...)
		if err := collective.AllReduce(ctx, g, data, collective.Average); err != nil || !equal(data[:2], want[:2]) {
			return fmt.Errorf("large ones: %v, %w", data[:2], cmp.Or(err, errWrong))
		}
		for i := range data {
			if data[i] == 0 {
				return fmt.Errorf("element %d is 0, not %v", i, want[i].Float32())
			}
		}
		return nil
	}))
}

// checkMeanTree reduces a tree with three leaves for each rank, after the ranks have combined their
// own leaves as far as possible.
func checkMeanTree(ctx context.Context, g *collective.Group, want []collective.Float16) error {
	const each = 3
	leaves, held := each*g.Size(), make([][]collective.Node, g.Size())
	for r := range held {
		held[r] = collective.Cover(each*r, each*(r+1), leaves)
	}
	p, err := collective.NewPartials(leaves, held)
	if err != nil {
		return err
	}
	var parts [][]collective.Float16
	for _, n := range held[g.Rank()] {
		part := append([]collective.Float16(nil), want...)
		for up := (collective.Node{Index: n.First()}); up != n; {
			if up = up.Parent(); up.Left().Sibling().First() < leaves {
				right := append([]collective.Float16(nil), want...) // two leaves at most
				collective.CombineNodes(part, part, right, up, leaves, collective.Average)
			}
		}
		parts = append(parts, part)
	}
	result := make([]collective.Float16, len(want))
	if err := collective.ReduceTree(ctx, g, p, parts, result, collective.Average); err != nil || !equal(result, want) {
		return fmt.Errorf("ReduceTree of %d: %v, %w", len(want), result[0].Float32(), cmp.Or(err, errWrong))
	}
	return nil
}

// partOf returns a rank's part of a vector.
func partOf[T any](all []T, ranks, rank int) []T {
	each, more := len(all)/ranks, len(all)%ranks
	lo := each*rank + min(rank, more)
	if rank < more {
		each++
	}
	return all[lo : lo+each]
}

var errWrong = errors.New("that is wrong")
