package elastic

import (
	"context"
	"os"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// meeting brings a worker into worlds: those of a driver, or one of its own. Its methods are called
// by one goroutine at a time, except Report, Connected, Latest and Loss.
type meeting interface {
	// join blocks until a world newer than j.After includes this worker. The meeting sets the
	// addresses of j. It returns rendezvous.ErrRemoved or ErrFinished if no such world follows.
	join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error)
	// connect connects to the ranks of a world that join returned. The caller closes the group.
	connect(ctx context.Context, w rendezvous.World) (*collective.Group, error)
	// Report tells the driver about this worker.
	Report(ctx context.Context, r rendezvous.Report, generation, commits uint64) error
	// Connected reports whether the driver is connected. It does not block.
	Connected() bool
	// Latest returns the newest notification; it does not block.
	Latest() notify.Update
	// Loss returns the ranks that the driver reports as lost, and a channel that is closed at its
	// next report. It does not block.
	Loss() (notify.Loss, <-chan struct{})
	// close ends everything that the meeting has started and waits for it.
	close() error
}

// solo is the meeting of a worker without a driver: every world has one rank.
type solo struct{}

func (solo) join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error) {
	if err := ctx.Err(); err != nil {
		return rendezvous.World{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	slot := plan.Slot{SlotID: plan.SlotID{Host: host}, LocalSize: 1, CrossSize: 1}
	return rendezvous.World{World: plan.World{Generation: j.After + 1, Slots: []plan.Slot{slot}}}, nil
}

func (solo) connect(context.Context, rendezvous.World) (*collective.Group, error) {
	return collective.Local(1)[0], nil
}

func (solo) Report(context.Context, rendezvous.Report, uint64, uint64) error { return nil }
func (solo) Connected() bool                                                 { return true }
func (solo) Latest() notify.Update                                           { return notify.Update{} }
func (solo) Loss() (notify.Loss, <-chan struct{})                            { return notify.Loss{}, nil }
func (solo) close() error                                                    { return nil }
