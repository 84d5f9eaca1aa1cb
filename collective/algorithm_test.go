package collective

import (
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

func TestParseAlgorithm(t *testing.T) {
	for a := range algorithms {
		if back, err := ParseAlgorithm(a.String()); back != a || err != nil {
			t.Errorf("%v is read as %v, %v", a, back, err)
		}
	}
	if a, err := ParseAlgorithm(""); a != Auto || err != nil {
		t.Errorf("nothing is read as %v, %v", a, err)
	}
	if a, err := ParseAlgorithm("Ring"); a != Ring || err != nil {
		t.Errorf("Ring is read as %v, %v", a, err)
	}
	if _, err := ParseAlgorithm("rong"); err == nil || !strings.Contains(err.Error(), `"rong"`) ||
		!strings.Contains(err.Error(), "rabenseifner") {
		t.Errorf("rong: %v", err)
	}
}

func TestAlgorithmOver(t *testing.T) {
	for _, c := range []struct {
		a        Algorithm
		n, bytes int
		want     Algorithm
	}{
		{Auto, 1, 1 << 30, Doubling}, {Auto, 2, 0, Doubling}, {Auto, 2, thresholds.doublingPair, Doubling}, {Auto, 2, 1 << 30, Ring},
		{Auto, 4, thresholds.doublingMore, Doubling}, {Auto, 4, thresholds.doublingMore + 1, Rabenseifner}, {Auto, 4, thresholds.ringFrom, Ring},
		{Auto, 3, thresholds.doublingMore, Doubling}, {Auto, 3, thresholds.doublingMore + 1, Ring}, {Auto, 5, 1 << 30, Ring},
		{Strict, 2, 0, Direct}, {Strict, 7, 1 << 30, Direct}, {Direct, 3, 4, Direct},
		{Doubling, 3, 1 << 30, Doubling},
		{Ring, 4, 31, Doubling}, {Ring, 4, 32, Ring}, {Ring, 1, 8, Doubling},
		{Rabenseifner, 4, 32, Rabenseifner}, {Rabenseifner, 6, 47, Doubling}, {Rabenseifner, 6, 48, Ring},
	} {
		if got := c.a.over(c.n, c.bytes); got != c.want {
			t.Errorf("%v over %d ranks with %d bytes is %v, want %v", c.a, c.n, c.bytes, got, c.want)
		}
	}
}

func TestSegmentFor(t *testing.T) {
	for _, part := range []int{0, 1, smallSegment, smallSegment*perPart + 9, 100_001, 1 << 20, 1 << 30} {
		if s := segmentFor(part); s%widest != 0 || s < smallSegment || s > segment || s > frame.MaxPayload {
			t.Errorf("segments of %d for parts of %d", s, part)
		}
	}
}
