package timeline

import (
	"context"

	"github.com/hvdrun/hvdrun/collective"
)

// probes is the number of times that the clocks are compared; the shortest exchange counts.
const probes = 8

// clockOffset returns the difference between the clock of rank 0 and this rank's clock, in
// nanoseconds. Every rank of the group calls it.
//
// It is NTP's exchange, with collectives in place of packets: rank 0 reads its clock after every
// rank has entered a barrier and before any rank has received the reading. So the reading lies
// between two readings of this rank, and half of their difference bounds the error. If an offset of
// 0 is within the error, clockOffset returns 0, since ranks of one host have the same clock.
func clockOffset(ctx context.Context, g *collective.Group, now func() int64) (int64, error) {
	best, offset := int64(-1), int64(0)
	for range probes {
		begun := now()
		if err := collective.Barrier(ctx, g); err != nil {
			return 0, err
		}
		read := []int64{now()}
		if err := collective.Broadcast(ctx, g, read, 0); err != nil {
			return 0, err
		}
		took := now() - begun
		if best >= 0 && took >= best {
			continue
		}
		best = took
		if offset = read[0] - (begun + took/2); -took/2 <= offset && offset <= took/2 {
			offset = 0
		}
	}
	if g.Rank() == 0 {
		return 0, nil
	}
	return offset, nil
}
