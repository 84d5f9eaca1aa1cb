package shm

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestStream: a copy that bypasses the caches copies exactly what copy does, at any alignment of
// the slices.
func TestStream(t *testing.T) {
	for _, n := range []int{0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 100_001} {
		for _, from := range []int{0, 1, 8, 63} {
			for _, to := range []int{0, 1, 16, 63, 64} {
				src, dst := pattern(n+from+1, n), pattern(n+to+1+line, n, 1)
				want := bytes.Clone(dst)
				copied := copy(want[to:to+n], src[from:])
				if got := stream(dst[to:to+n], src[from:]); got != copied || !bytes.Equal(dst, want) {
					t.Errorf("%d bytes from %d to %d: %d of them, equal %v", n, from, to, got, bytes.Equal(dst, want))
				}
				if n > 0 {
					if got := stream(dst[to:to+n+1], src[from:from+n-1]); got != n-1 {
						t.Errorf("%d bytes, not the %d that there are", got, n-1)
					}
				}
			}
		}
	}
}

// TestLargeCopies broadcasts and gathers more than the caches hold, in the members' own memory and
// in memory that all can read.
func TestLargeCopies(t *testing.T) {
	for _, n := range []int{2, 3} {
		members := gathering(t, n, nil)
		for _, size := range []int{newLayout(n).out - 1, newLayout(n).out, 1<<20 + 3, streamLeast/n + 4099} {
			for _, alloc := range []bool{false, true} {
				for root := range n {
					eachMust(t, members, func(m *Member) error { return m.copyLarge(size, root, alloc) })
				}
			}
		}
		leave(t, members)
	}
}

func (m *Member) copyLarge(size, root int, alloc bool) error {
	data := make([]byte, size)
	if alloc {
		var err error
		if data, err = Alloc(size); err != nil {
			return err
		}
		defer Free(data)
	}
	want := pattern(size, root)
	if m.index == root {
		copy(data, want)
	}
	dawdle(rand.New(rand.NewPCG(uint64(size), uint64(m.index))))
	if err := m.Broadcast(background, Desc{1, uint64(size)}, data, root); err != nil {
		return err
	}
	if !bytes.Equal(data, want) {
		return fmt.Errorf("a broadcast of %d bytes from %d differs", size, root)
	}
	want = pattern(size, root, 1)
	clear(data)
	m.split(m.src, data, 1, m.members)
	mine := m.src[m.index]
	at := 0
	for _, part := range m.src[:m.index] {
		at += len(part)
	}
	clear(m.src)
	copy(mine, want[at:])
	if err := m.Gather(background, Desc{2, uint64(size)}, data, 1, m.members); err != nil {
		return err
	}
	if !bytes.Equal(data, want) {
		return fmt.Errorf("a gather of %d bytes differs", size)
	}
	return nil
}
