package collective

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// exchange sends the statement of each rank to all ranks.
func (e *engine) exchange(join bool) error {
	parts, err := AllGather(context.Background(), e.lane, e.agreed.Say(join))
	if err != nil {
		return err
	}
	last, fault := e.agreed.Hear(parts)
	e.lane.call.Contributors = e.agreed.Contribute
	if fault != nil {
		return e.fail(*fault)
	}
	if e.agreed.Contribute == 0 {
		e.allJoined(last)
	}
	return nil
}

// report logs, on the first rank, the operations that have waited too long, with the missing ranks.
func (e *engine) report() error {
	now := time.Now()
	if e.warn = now.Add(e.tuning.stall); e.tuning.stall < 0 {
		e.warn = time.Time{}
	}
	all, err := AllGather(context.Background(), e.lane, e.agreed.Waiting(func(h *Handle) bool {
		return e.tuning.stall >= 0 && now.Sub(h.since) >= e.tuning.stall
	}))
	if err != nil || e.g.rank != 0 || e.tuning.log == nil {
		return err
	}
	invalid := e.agreed.Stalled(all, func(name string, missing []int) { e.tuning.log(name, missing, e.tuning.stall) })
	if invalid >= 0 {
		return e.fail(frame.Gone(frame.ErrInvalid, invalid))
	}
	return nil
}

// allJoined ends the joining of all ranks.
func (e *engine) allJoined(last int) {
	e.agreed.Restart()
	e.lane.call.Contributors = e.agreed.Contribute
	e.mu.Lock()
	h := e.joining
	e.submitted = 0 // ranks that joined early have submitted fewer
	e.mu.Unlock()
	if h != nil {
		h.request.Count = uint64(last)
		e.complete(h, nil)
	}
}
