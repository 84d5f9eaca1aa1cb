package line

import (
	"context"
	"time"
)

const (
	prepareEvery = time.Second
	// PrepareBound is how long Prepare reports: as long as the others wait for slots.
	PrepareBound = 10 * time.Minute
)

// Prepare calls report at once and then every second, until ctx ends or PrepareBound has passed.
// report says that a worker prepares (Fetching), which extends its start timeout: nobody else sees
// whether a worker that is in no world is alive.
func Prepare(ctx context.Context, report func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, PrepareBound)
	defer cancel()
	tick := time.NewTicker(prepareEvery)
	defer tick.Stop()
	for {
		report(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
