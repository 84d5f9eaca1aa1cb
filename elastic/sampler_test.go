package elastic

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// ranksOf returns one sampler per rank of a world, all at the position of s.
func ranksOf(t rapid.TB, s *Sampler, size int) []*Sampler {
	t.Helper()
	b, err := s.encode()
	if err != nil {
		t.Fatal(err)
	}
	ranks := make([]*Sampler, size)
	for r := range ranks {
		ranks[r] = NewSampler(s.n, s.opts)
		ranks[r].setRank(r, size)
		if err := ranks[r].decode(b); err != nil {
			t.Fatal(err)
		}
	}
	return ranks
}

// round calls Next on every rank and returns all indices; false at the end of the epoch.
func round(t rapid.TB, ranks []*Sampler) (indices []int, ok bool) {
	t.Helper()
	first, ok := ranks[0].Next()
	indices = slices.Clone(first)
	for r, s := range ranks[1:] {
		batch, more := s.Next()
		if more != ok || len(batch) != len(first) {
			t.Fatalf("rank %d got %d indices and %t, rank 0 %d and %t", r+1, len(batch), more, len(first), ok)
		}
		indices = append(indices, batch...)
	}
	for r, s := range ranks {
		if s.live != ranks[0].live {
			t.Fatalf("rank %d is at %+v, rank 0 at %+v", r, s.live, ranks[0].live)
		}
	}
	return indices, ok
}

func TestSamplerEveryIndexOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		opts := SamplerOptions{
			Shuffle: rapid.Bool().Draw(t, "shuffle"),
			Seed:    rapid.Int64().Draw(t, "seed"),
			Batch:   rapid.IntRange(-1, 9).Draw(t, "batch"),
		}
		sizes := rapid.IntRange(1, 7)
		size := sizes.Draw(t, "size")
		epoch := rapid.IntRange(0, 5).Draw(t, "epoch")
		ranks := ranksOf(t, NewSampler(n, opts), size)
		for _, s := range ranks {
			s.SetEpoch(epoch)
		}
		save := func() {
			for _, s := range ranks {
				if err := s.Save(); err != nil {
					t.Fatal(err)
				}
			}
		}
		save()
		var committed, pending []int
		last := size // of the world of the last round
		for over := false; !over; {
			got, ok := round(t, ranks)
			if ok {
				last = size
			}
			pending = append(pending, got...)
			over = !ok
			switch {
			case over || rapid.IntRange(0, 2).Draw(t, "commit") == 0:
				committed, pending = append(committed, pending...), nil
				save()
			case rapid.IntRange(0, 4).Draw(t, "fail") == 0:
				pending = nil
				for _, s := range ranks {
					if err := s.Restore(); err != nil {
						t.Fatal(err)
					}
				}
				size = sizes.Draw(t, "size after a failure")
				ranks = ranksOf(t, ranks[len(ranks)-1], size)
				save()
			case rapid.IntRange(0, 4).Draw(t, "resize") == 0:
				size = sizes.Draw(t, "size after a resize")
				ranks = ranksOf(t, ranks[0], size)
				committed, pending = append(committed, pending...), nil // a sync saves
				save()
			}
		}
		once(t, committed, n, last)
	})
}

// once checks that the indices are 0 to n-1, each once, and at most size-1 more.
func once(t rapid.TB, indices []int, n, size int) {
	t.Helper()
	counts := make([]int, n)
	for _, i := range indices {
		counts[i]++
	}
	if i := slices.Index(counts, 0); i >= 0 {
		t.Fatalf("index %d of %d was not delivered: %v", i, n, indices)
	}
	if more := len(indices) - n; more > size-1 {
		t.Fatalf("%d of %d indices were repeated in a world of %d: %v", more, n, size, indices)
	}
}

func TestSamplerOrder(t *testing.T) {
	all := func(opts SamplerOptions, size, epoch int) []int {
		ranks := ranksOf(t, NewSampler(24, opts), size)
		var order []int
		for _, s := range ranks {
			s.SetEpoch(epoch)
		}
		for {
			got, ok := round(t, ranks)
			if !ok {
				return order
			}
			order = append(order, got...)
		}
	}
	straight := make([]int, 24)
	for i := range straight {
		straight[i] = i
	}
	if got := all(SamplerOptions{Batch: 2}, 3, 1); !slices.Equal(got, straight) {
		t.Errorf("without shuffling: %v", got)
	}
	shuffled := SamplerOptions{Shuffle: true, Seed: 7, Batch: 2}
	first := all(shuffled, 1, 0)
	if slices.Equal(first, straight) {
		t.Error("shuffling leaves the order as it is")
	}
	if got := all(shuffled, 4, 0); !slices.Equal(got, first) {
		t.Errorf("the order depends on the size: %v, %v", got, first)
	}
	if got := all(shuffled, 1, 1); slices.Equal(got, first) {
		t.Error("two epochs have one order")
	}
	shuffled.Seed = 8
	if got := all(shuffled, 1, 0); slices.Equal(got, first) {
		t.Error("two seeds have one order")
	}
}

func TestSamplerLastRound(t *testing.T) {
	for _, test := range []struct {
		n, size, batch int
		rounds         []int // indices per rank in each round
	}{
		{8, 2, 2, []int{2, 2}},
		{7, 2, 2, []int{2, 2}},
		{5, 4, 2, []int{2}},
		{9, 4, 2, []int{2, 1}},
		{1, 4, 3, []int{1}}, // three of four get a repeated index
		{2, 7, 3, []int{1}}, // there are so few that one is repeated several times
		{0, 3, 1, nil},
	} {
		ranks := ranksOf(t, NewSampler(test.n, SamplerOptions{Batch: test.batch}), test.size)
		var rounds, all []int
		for {
			left := ranks[0].Len()
			got, ok := round(t, ranks)
			if !ok {
				break
			}
			all = append(all, got...)
			rounds = append(rounds, len(got)/test.size)
			if after := ranks[0].Len(); after != left-len(got)/test.size {
				t.Errorf("%+v: Len fell from %d to %d in a round of %d", test, left, after, len(got)/test.size)
			}
		}
		if !slices.Equal(rounds, test.rounds) {
			t.Errorf("%+v: rounds of %v", test, rounds)
		}
		once(t, all, test.n, test.size)
	}
}

// A loop that calls SetEpoch at its top neither repeats nor skips data, wherever it is resumed.
func TestSamplerSetEpoch(t *testing.T) {
	s := NewSampler(4, SamplerOptions{Batch: 2})
	next := func(want ...int) {
		t.Helper()
		if got, ok := s.Next(); ok != (want != nil) || !slices.Equal(got, want) {
			t.Fatalf("Next: %v, %t; want %v", got, ok, want)
		}
	}
	s.SetEpoch(3)
	next(0, 1)
	s.SetEpoch(3)
	next(2, 3)
	s.SetEpoch(3)
	next()
	s.SetEpoch(3) // the last commit of the epoch was made after its end
	next()
	s.SetEpoch(4)
	next(0, 1)
	if s.Epoch() != 4 || s.Position() != 2 {
		t.Errorf("epoch %d, position %d", s.Epoch(), s.Position())
	}
	next(2, 3)
	next()
	next(0, 1) // no SetEpoch: the same epoch again
}

func TestSamplerRefusesForeignPosition(t *testing.T) {
	s := NewSampler(4, SamplerOptions{})
	far := NewSampler(40, SamplerOptions{Batch: 9})
	far.Next()
	b, err := far.encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{nil, {1}, b, append(b, 0)} {
		if err := s.decode(bad); err == nil {
			t.Errorf("decode(%v) is accepted", bad)
		}
	}
}
