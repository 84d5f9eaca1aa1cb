package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// TestReductions runs every reduction at every threshold, with several operations in immediate
// succession.
func TestReductions(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			members := gathering(t, n, small(n))
			defer leave(t, members)
			list := reductions(n)
			if n > 3 { // the paths are the same for all
				list = append(list[:1], list[len(list)-1])
			}
			for _, r := range list {
				for k, size := range sizes(n) {
					seed := uint64(size)<<16 | uint64(n)
					count := size / r.Size
					var inputs [][]byte
					for i := range n {
						inputs = append(inputs, random(rand.New(rand.NewPCG(seed, uint64(i))), r.t, count))
					}
					want := expected(inputs, &r.Reduction)
					owners := 1 + k%n
					what := fmt.Sprintf("%s of %d bytes", r.name, size)
					eachMust(t, members, func(m *Member) error {
						return allReductions(m, rand.New(rand.NewPCG(seed, uint64(m.index+n))), what, inputs[m.index], want, owners, &r.Reduction)
					})
				}
			}
		})
	}
}

func allReductions(m *Member, random *rand.Rand, what string, input, want []byte, owners int, r *Reduction) error {
	d := Desc{uint64(len(input)), uint64(owners)}
	count := len(input) / r.Size
	part := func(owners, i int) (int, int) {
		if i >= owners {
			return 0, 0
		}
		lo, hi := kernel.Split(count, owners, i)
		return lo * r.Size, hi * r.Size
	}

	data := clone(input)
	dawdle(random)
	if err := m.AllReduce(background, d, data, r); err != nil {
		return err
	}
	if !bytes.Equal(data, want) {
		return fmt.Errorf("AllReduce, %s differs", what)
	}

	tensor, err := Alloc(len(input) + 64)
	if err != nil {
		return err
	}
	defer Free(tensor)
	tensor = tensor[64*(len(input)%2):][:len(input)] // not only at the beginning of a page
	copy(tensor, input)
	dawdle(random)
	if err := m.AllReduce(background, d, tensor, r); err != nil {
		return err
	}
	if !bytes.Equal(tensor, want) {
		return fmt.Errorf("AllReduce in the arena, %s differs", what)
	}
	for _, where := range [][]byte{data, tensor} {
		for _, owners := range []int{owners, m.members} {
			copy(where, input)
			if err := m.checkHalves(d, where, want, r, owners, part, random); err != nil {
				return fmt.Errorf("%s, %d owners: %w", what, owners, err)
			}
		}
	}
	copy(data, input)
	lo, hi := part(m.members, m.index)
	result := aligned(hi - lo)
	dawdle(random)
	parts := make([][]byte, m.members)
	for i := range parts {
		lo, hi := part(m.members, i)
		parts[i] = data[lo:hi]
	}
	if err := m.ReduceScatter(background, d, parts, result, r); err != nil {
		return err
	}
	if !bytes.Equal(result, want[lo:hi]) || !bytes.Equal(data, input) {
		return fmt.Errorf("ReduceScatter, %s differs", what)
	}
	return m.Barrier(background, d)
}

// checkHalves checks Reduce and Gather of data.
func (m *Member) checkHalves(d Desc, data, want []byte, r *Reduction, owners int, part func(owners, i int) (int, int), random *rand.Rand) error {
	dawdle(random)
	if err := m.Reduce(background, d, data, owners, r); err != nil {
		return err
	}
	lo, hi := part(owners, m.index)
	if !bytes.Equal(data[lo:hi], want[lo:hi]) {
		return errors.New("Reduce differs")
	}
	dawdle(random)
	if err := m.Gather(background, d, data, r.Size, owners); err != nil {
		return err
	}
	if !bytes.Equal(data, want) {
		return errors.New("Gather differs")
	}
	return nil
}

// TestUsualLayout tests sizes around the thresholds of the usual layout.
func TestUsualLayout(t *testing.T) {
	r := reductions(3)[0]
	for _, n := range []int{2, 3} {
		members := gathering(t, n, nil)
		for _, size := range []int{16 << 10, 16<<10 + 4, 1 << 20, 5<<20 + 12} {
			var inputs [][]byte
			for i := range n {
				inputs = append(inputs, random(rand.New(rand.NewPCG(uint64(size), uint64(i))), r.t, size/4))
			}
			want := expected(inputs, &r.Reduction)
			eachMust(t, members, func(m *Member) error {
				return allReductions(m, rand.New(rand.NewPCG(1, 2)), fmt.Sprint(size), inputs[m.index], want, n-1, &r.Reduction)
			})
		}
		leave(t, members)
	}
}

func TestMismatch(t *testing.T) {
	members := gathering(t, 3, nil)
	defer leave(t, members)
	errs := each(members, func(m *Member) error {
		d := Desc{1, 2}
		if m.index == 1 {
			d = Desc{1, 3}
		}
		err := m.Barrier(background, d)
		m.Abort()
		return err
	})
	for i, err := range errs {
		var mismatch *MismatchError
		if i != 1 && errors.As(err, &mismatch) && mismatch.Member == 1 && mismatch.Desc == (Desc{1, 3}) {
			continue
		}
		if i == 1 && errors.As(err, &mismatch) && mismatch.Desc == (Desc{1, 2}) {
			continue
		}
		if !errors.Is(err, ErrAborted) || errors.As(err, &mismatch) {
			t.Errorf("member %d: %v", i, err)
		}
	}
}

// TestGone: operations that a member called before it left are completed. Operations that it has
// not called fail on members that were notified.
func TestGone(t *testing.T) {
	r := reductions(3)[0]
	members := gathering(t, 3, small(3))
	left := make(chan struct{})
	errs := each(members, func(m *Member) error {
		if m.index == 2 {
			err := m.AllReduce(background, Desc{1}, make([]byte, 4000), &r.Reduction)
			m.Close()
			close(left)
			return err
		}
		if err := m.AllReduce(background, Desc{1}, make([]byte, 4000), &r.Reduction); err != nil {
			return err
		}
		if m.index == 0 { // notified before it calls Barrier; the other member is notified while it waits
			<-left
			m.Gone(2)
			defer members[1].Gone(2)
		}
		return m.Barrier(background, Desc{2})
	})
	for i, err := range errs[:2] {
		var gone *LeftError
		if !errors.As(err, &gone) || gone.Member != 2 {
			t.Errorf("member %d: %v", i, err)
		}
		members[i].Close()
	}
	if errs[2] != nil {
		t.Error(errs[2])
	}
}

// TestAbort aborts while the others wait in each of the phases.
func TestAbort(t *testing.T) {
	r := reductions(3)[0]
	for _, size := range []int{0, 4, 100, 4000} {
		for _, after := range []int{0, 1, 2} {
			within(t, func() {
				members := gathering(t, 3, small(3))
				errs := each(members, func(m *Member) error {
					for range after {
						if err := m.AllReduce(background, Desc{}, aligned(size), &r.Reduction); err != nil {
							return err
						}
					}
					if m.index == 2 {
						m.Abort()
					}
					return m.AllReduce(background, Desc{}, aligned(size), &r.Reduction)
				})
				for _, err := range errs {
					wantErr(t, err, ErrAborted)
				}
				for _, m := range members {
					wantErr(t, m.Barrier(background, Desc{}), ErrAborted)
				}
				leave(t, members)
				members[0].Abort() // after Close it does nothing
				wantErr(t, members[0].Barrier(background, Desc{}), errClosed)
			})
		}
	}
}

// TestContext: a wait ends when the context ends.
func TestContext(t *testing.T) {
	members := gathering(t, 2, nil)
	defer leave(t, members)
	ctx, cancel := context.WithCancel(background)
	done := make(chan error)
	go func() { done <- members[0].Barrier(ctx, Desc{}) }()
	cancel()
	wantErr(t, <-done, context.Canceled)
	wantErr(t, members[1].Barrier(ctx, Desc{}), context.Canceled)
}

// TestSaying: in a reduction in which members say yes or no, all learn whether all have said yes,
// and their data does not change. An AllReduce does the same if a member says no.
func TestSaying(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		members := gathering(t, n, small(n))
		r := reductions(n)[0]
		for _, size := range sizes(n) {
			var inputs [][]byte
			for i := range n {
				inputs = append(inputs, random(rand.New(rand.NewPCG(uint64(size), uint64(i))), r.t, size/r.Size))
			}
			want := expected(inputs, &r.Reduction)
			for no := -1; no < n; no++ { // the member that says no
				eachMust(t, members, func(m *Member) error {
					data := clone(inputs[m.index])
					own := kernel.Part(want, r.Size, n, m.index)
					result := make([]byte, len(own))
					all, err := m.ReduceSaying(background, Desc{uint64(size), uint64(no + 1)}, data, result, m.index != no, &r.Reduction)
					if err != nil || all != (no < 0) {
						return fmt.Errorf("%d bytes: all say yes: %v, %v", size, all, err)
					}
					if !bytes.Equal(data, inputs[m.index]) || !bytes.Equal(result, own) {
						return fmt.Errorf("%d bytes: the data has changed, or the result is wrong", size)
					}
					var given []byte
					if m.index != no {
						given = data
					}
					all, err = m.AllReduceSaying(background, Desc{uint64(size), uint64(no + 1)}, len(data), given, m.index != no, &r.Reduction)
					if err != nil || all != (no < 0) {
						return fmt.Errorf("AllReduce of %d bytes: all say yes: %v, %v", size, all, err)
					}
					if after := map[bool][]byte{true: want, false: inputs[m.index]}[all]; !bytes.Equal(data, after) {
						return fmt.Errorf("AllReduce of %d bytes: the result is wrong, or the data has changed", size)
					}
					return nil
				})
			}
		}
		leave(t, members)
	}
}
