package levels

import (
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
)

// TestWaves: data is cut into up to 16 waves of 64 KiB per rank. Larger data is cut into 16 larger
// waves of up to 2 MiB, and beyond that into waves of 2 MiB. If ranks share cores, waves are fewer
// and larger.
func TestWaves(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	for _, c := range []struct {
		ranks, bytes int
		crowded      bool
		want         int
	}{
		{4, 0, false, 1},
		{4, 256 * kib, false, 1},
		{4, 256*kib + 1, false, 2},
		{4, mib, false, 4},
		{4, 4 * mib, false, 16},
		{4, 32 * mib, false, 16},
		{4, 64 * mib, false, 32},
		{8, mib, false, 2},
		{64, mib, false, 1},
		{64, 4 * mib, false, 2},
		{4, 32 * mib, true, 1},
		{4, 64 * mib, true, 2},
	} {
		call := Call{levels: &hierarchy{crowded: c.crowded}}
		call.Size, call.Forced = c.ranks, &exchange.Forced{}
		if got := call.waves(c.bytes); got != c.want {
			t.Errorf("%d bytes of %d ranks, crowded %v: %d waves, not %d", c.bytes, c.ranks, c.crowded, got, c.want)
		}
	}
}
