package operation

import (
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

func TestAlgorithmOver(t *testing.T) {
	for _, c := range []struct {
		a        Algorithm
		n, bytes int
		want     Algorithm
	}{
		{Auto, 1, 1 << 30, Doubling}, {Auto, 2, 0, Doubling}, {Auto, 2, Thresholds.doublingPair, Doubling}, {Auto, 2, 1 << 30, Ring},
		{Auto, 4, Thresholds.doublingMore, Doubling}, {Auto, 4, Thresholds.doublingMore + 1, Rabenseifner}, {Auto, 4, Thresholds.ringFrom, Ring},
		{Auto, 3, Thresholds.doublingMore, Doubling}, {Auto, 3, Thresholds.doublingMore + 1, Ring}, {Auto, 5, 1 << 30, Ring},
		{Strict, 2, 0, Direct}, {Strict, 7, 1 << 30, Direct}, {Direct, 3, 4, Direct},
		{Doubling, 3, 1 << 30, Doubling},
		{Ring, 4, 31, Doubling}, {Ring, 4, 32, Ring}, {Ring, 1, 8, Doubling},
		{Rabenseifner, 4, 32, Rabenseifner}, {Rabenseifner, 6, 47, Doubling}, {Rabenseifner, 6, 48, Ring},
	} {
		if got := c.a.Over(c.n, c.bytes); got != c.want {
			t.Errorf("%v over %d ranks with %d bytes is %v, want %v", c.a, c.n, c.bytes, got, c.want)
		}
	}
}

func TestSegmentFor(t *testing.T) {
	for _, part := range []int{0, 1, smallSegment, smallSegment*perPart + 9, 100_001, 1 << 20, 1 << 30} {
		if s := SegmentFor(part); s%Widest != 0 || s < smallSegment || s > Segment || s > frame.MaxPayload {
			t.Errorf("segments of %d for parts of %d", s, part)
		}
	}
}
