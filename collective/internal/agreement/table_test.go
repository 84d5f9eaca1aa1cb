package agreement

import (
	"fmt"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// world is the tables of several ranks that run cycles together.
type world []*Table[string]

func newWorld(ranks int) world {
	w := make(world, ranks)
	for rank := range w {
		t := NewTable[string](rank, ranks)
		t.Fusion = 1 << 10
		w[rank] = &t
	}
	return w
}

// submit submits a tensor of float32s under a name on the given ranks.
func (w world) submit(name string, count uint64, ranks ...int) {
	for _, rank := range ranks {
		w[rank].Submit(name, &Request{Type: kernel.Float32, Op: operation.Sum, Count: count, Prescale: 1, Postscale: 1},
			fmt.Sprintf("%s of %d", name, rank))
	}
}

// cycle makes all ranks exchange their announcements and vote, and returns their buckets, which
// must be equal on all ranks. The ranks in joining join. The test fails if a rank finds a fault.
func (w world) cycle(t *testing.T, joining ...int) []Bucket {
	t.Helper()
	for news := true; news; joining = nil {
		votes := make([][]uint8, len(w))
		for rank, table := range w {
			votes[rank] = table.Vote(Asked{News: table.News() || slices.Contains(joining, rank)})
		}
		for i := range votes[0] {
			least := uint8(1)
			for _, v := range votes {
				least = min(least, v[i])
			}
			for _, v := range votes {
				v[i] = least
			}
		}
		parts := make([][]byte, len(w))
		for rank, table := range w {
			if news = table.Voted().News; news {
				parts[rank] = table.Say(slices.Contains(joining, rank))
			}
		}
		for rank, table := range w {
			if _, fault := table.Hear(parts); fault != nil {
				t.Fatalf("rank %d: %+v", rank, fault)
			}
		}
	}
	var all []Bucket
	for rank, table := range w {
		buckets := table.Elect(func(int) { t.Error("nothing is refused") })
		table.Observe(buckets, func(*Bucket) bool { return false })
		if rank > 0 && fmt.Sprint(buckets) != fmt.Sprint(all) {
			t.Errorf("buckets %v on rank 0, %v on rank %d", all, buckets, rank)
		}
		all = slices.Clone(buckets)
		for _, b := range buckets {
			for _, id := range b.IDs {
				table.Take(id)
			}
		}
	}
	return all
}

// TestElect: tensors that all ranks have submitted, in any order, are in the same buckets on all
// ranks. A tensor that a rank has not submitted is awaited.
func TestElect(t *testing.T) {
	w := newWorld(3)
	w.submit("a", 100, 0, 1)
	w.submit("b", 100, 0, 1, 2)
	w.submit("c", 100, 2, 1, 0)
	if got := w.cycle(t); len(got) != 1 || len(got[0].IDs) != 2 || got[0].Bytes != 800 {
		t.Errorf("buckets %+v", got)
	}
	for rank, table := range w {
		if !table.Awaited {
			t.Errorf("rank %d does not know that a is awaited", rank)
		}
	}
	w.submit("a", 100, 2)
	w.submit("c", 200, 0, 1, 2) // another size
	if got := w.cycle(t); len(got) != 2 || got[0].Bytes != 400 || got[1].Bytes != 800 {
		t.Errorf("buckets %+v, more than fit together", got)
	}
	if got := w.cycle(t); len(got) > 0 || w[0].Pending != 0 || w[0].Awaited {
		t.Errorf("buckets %+v, and %d are pending", got, w[0].Pending)
	}
}

// TestAlone: a tensor of at least Alone bytes has its own bucket. Smaller ones share a bucket, in
// their order.
func TestAlone(t *testing.T) {
	w := newWorld(2)
	for _, table := range w {
		table.Alone = 400
	}
	for i, count := range []uint64{10, 99, 100, 5, 6} {
		w.submit(fmt.Sprint(i), count, 0, 1)
	}
	var ids [][]int
	for _, b := range w.cycle(t) {
		ids = append(ids, b.IDs)
	}
	if want := [][]int{{0, 1}, {2}, {3, 4}}; !slices.EqualFunc(ids, want, slices.Equal[[]int]) {
		t.Errorf("buckets of %v, want %v", ids, want)
	}
}

// TestDiffering: ranks that submit different tensors under one name find the same fault.
func TestDiffering(t *testing.T) {
	w := newWorld(2)
	w.submit("a", 1, 0)
	w.submit("a", 2, 1)
	parts := [][]byte{w[0].Say(false), w[1].Say(false)}
	for rank, table := range w {
		if _, fault := table.Hear(parts); fault == nil || !fault.Mismatch || fault.Tensor != "a" || fault.Ranks != [2]int{0, 1} {
			t.Errorf("rank %d: %+v", rank, fault)
		}
	}
}

// TestJoined: until all ranks have joined, a rank that has joined votes for all tensors of the
// others.
func TestJoined(t *testing.T) {
	w := newWorld(2)
	w.submit("a", 1, 0)
	if got := w.cycle(t, 1); len(got) != 1 || w[0].Whole() || w[0].Contribute != 1 {
		t.Errorf("buckets %+v, of %d ranks", got, w[0].Contribute)
	}
	if w.cycle(t, 0); w[1].Contribute != 0 {
		t.Errorf("%d ranks have not joined", w[1].Contribute)
	}
	if w[1].Restart(); !w[1].Whole() {
		t.Error("a rank has joined")
	}
}

// TestExpected: after two cycles with the same single bucket the next one is expected, even by a
// rank that has not submitted it. A wrong guess ends that.
func TestExpected(t *testing.T) {
	w := newWorld(2)
	for cycle := range Surely {
		if w[0].Expects() {
			t.Errorf("expected after %d cycles", cycle)
		}
		w.submit("a", 10, 0, 1)
		w.cycle(t)
	}
	w.submit("a", 10, 0)
	for rank, table := range w {
		b, ready := table.Expected()
		if !table.Expects() || b.Bytes != 40 || ready != (rank == 0) {
			t.Errorf("rank %d: %+v, ready %t", rank, b, ready)
		}
		if table.Guessed(false); table.Expects() {
			t.Errorf("rank %d expects it after a wrong guess", rank)
		}
	}
}

// TestForgotten: the ranks that have submitted a tensor announce its name again after it is
// forgotten.
func TestForgotten(t *testing.T) {
	w := newWorld(2)
	w.submit("a", 1, 0)
	w.cycle(t)
	for _, table := range w {
		table.Forget()
	}
	w.submit("a", 1, 1)
	if got := w.cycle(t); len(got) != 1 {
		t.Errorf("buckets %+v", got)
	}
}

// TestStalled: any rank can find the tensors that have waited for too long, and the ranks that they
// wait for.
func TestStalled(t *testing.T) {
	w := newWorld(3)
	w.submit("a", 1, 0, 2)
	w.submit("b", 1, 2)
	w.cycle(t)
	all := make([][]uint8, len(w))
	for rank, table := range w {
		all[rank] = table.Waiting(func(mine string) bool { return mine == "a of 2" })
	}
	var said []string
	if invalid := w[0].Stalled(all, func(name string, missing []int) { said = append(said, fmt.Sprint(name, missing)) }); invalid >= 0 {
		t.Errorf("rank %d", invalid)
	}
	if !slices.Equal(said, []string{"a[1]"}) {
		t.Errorf("said %q", said)
	}
	if all[1] = nil; w[0].Stalled(all, func(string, []int) {}) != 1 {
		t.Error("too short an answer is taken")
	}
}
