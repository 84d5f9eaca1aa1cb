package shm

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
)

func TestBroadcast(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		members := gathering(t, n, small(n))
		for k, size := range sizes(n) {
			root := k % n
			eachMust(t, members, func(m *Member) error {
				random := rand.New(rand.NewPCG(uint64(size), uint64(m.index)))
				data, want := make([]byte, size), pattern(size, root)
				if m.index == root {
					copy(data, want)
				}
				dawdle(random)
				if err := m.Broadcast(background, Desc{uint64(size)}, data, root); err != nil {
					return err
				}
				if !bytes.Equal(data, want) {
					return fmt.Errorf("%d bytes from %d differ", size, root)
				}
				return nil
			})
		}
		leave(t, members)
	}
}

func pattern(size int, salt ...int) []byte {
	seed := uint64(0)
	for _, s := range salt {
		seed = seed*1000 + uint64(s) + 1
	}
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	b := make([]byte, size)
	r.Read(b)
	return b
}

func buffersFor(lengths []int) ([][]byte, error) {
	var b [][]byte
	for _, n := range lengths {
		b = append(b, make([]byte, n))
	}
	return b, nil
}

func TestAllGather(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		members := gathering(t, n, small(n))
		random := rand.New(rand.NewPCG(1, uint64(n)))
		for turn := range 200 {
			lengths := lengthsFor(random, n)
			eachMust(t, members, func(m *Member) error {
				var got [][]byte
				err := m.AllGather(background, Desc{}, pattern(lengths[m.index], turn, m.index), func(told []int) ([][]byte, error) {
					if !slices.Equal(told, lengths) {
						return nil, fmt.Errorf("told of lengths %v, not %v", told, lengths)
					}
					got, _ = buffersFor(told)
					return got, nil
				})
				for i := range got {
					if i != m.index && !bytes.Equal(got[i], pattern(lengths[i], turn, i)) {
						return fmt.Errorf("%d bytes of %d differ; lengths %v", lengths[i], i, lengths)
					}
				}
				return err
			})
		}
		leave(t, members)
	}
}

// lengthsFor returns lengths that are sometimes all small.
func lengthsFor(random *rand.Rand, n int) []int {
	most := []int{1, 33, 129, 2000}[random.IntN(4)]
	list := make([]int, n)
	for i := range list {
		list[i] = random.IntN(most)
		if random.IntN(5) == 0 {
			list[i] = []int{0, 32, 33, 128, 129, 192, 193}[random.IntN(7)]
		}
	}
	return list
}

func TestAllToAll(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		members := gathering(t, n, small(n))
		random := rand.New(rand.NewPCG(1, uint64(n)))
		for turn := range 200 {
			lengths := make([][]int, n)
			for i := range lengths {
				lengths[i] = lengthsFor(random, n)
			}
			eachMust(t, members, func(m *Member) error { return allToAll(m, lengths, turn) })
		}
		leave(t, members)
	}
}

func allToAll(m *Member, lengths [][]int, turn int) error {
	var parts, got [][]byte
	for i, n := range lengths[m.index] {
		parts = append(parts, pattern(n, turn, m.index, i))
	}
	err := m.AllToAll(background, Desc{}, parts, func(told []int) ([][]byte, error) {
		for i, n := range told {
			if i != m.index && n != lengths[i][m.index] {
				return nil, fmt.Errorf("told of %d bytes from %d, not %d", n, i, lengths[i][m.index])
			}
		}
		got, _ = buffersFor(told)
		return got, nil
	})
	for i := range got {
		if i != m.index && !bytes.Equal(got[i], pattern(lengths[i][m.index], turn, i, m.index)) {
			return fmt.Errorf("%d bytes from %d differ; lengths %v", lengths[i][m.index], i, lengths)
		}
	}
	return err
}

// TestPlaceFails: the error of a member's place function is returned to it, and the abort releases
// the others.
func TestPlaceFails(t *testing.T) {
	full := errors.New("no memory")
	for _, length := range []int{10, 4000} {
		members := gathering(t, 3, small(3))
		errs := each(members, func(m *Member) error {
			err := m.AllGather(background, Desc{}, make([]byte, length), func(lengths []int) ([][]byte, error) {
				if m.index == 1 {
					return nil, full
				}
				return buffersFor(lengths)
			})
			if m.index == 1 {
				m.Abort()
			}
			return err
		})
		wantErr(t, errs[1], full)
		if length > 128 {
			wantErr(t, errs[0], ErrAborted)
		}
		for _, wrong := range [][][]byte{nil, make([][]byte, 3)} {
			_, err := members[0].placed(func([]int) ([][]byte, error) { return wrong, nil })
			if err == nil {
				t.Error("wrong buffers are taken")
			}
		}
		leave(t, members)
	}
}

// TestManyMembers: more members than can watch each other, with the usual layout, with all small
// sizes and one that uses the slots.
func TestManyMembers(t *testing.T) {
	const n = 130
	members := gathering(t, n, nil)
	defer leave(t, members)
	for _, floats := range []int{1, 1000, 8192} {
		eachMust(t, members, func(m *Member) error {
			data := aligned(4 * floats)
			f := unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(data))), floats)
			for i := range f {
				f[i] = float32(m.index)
			}
			if err := m.AllReduce(background, Desc{1}, data, &sumOfFloats); err != nil {
				return err
			}
			for i, got := range f {
				if got != n*(n-1)/2 {
					return fmt.Errorf("element %d is %v", i, got)
				}
			}
			return m.Broadcast(background, Desc{2}, data, n-1)
		})
	}
}
