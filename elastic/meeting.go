package elastic

import (
	"context"
	"os"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// meeting is how a worker comes to be in a world: the driver's, or one of its own. Its methods are
// called by one goroutine at a time, except report, reachable, latest and loss.
type meeting interface {
	// join blocks until there is a world newer than j.After with this worker in it. The addresses
	// of j are the meeting's to fill in. It fails with rendezvous.ErrRemoved or ErrFinished where
	// there will be none.
	join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error)
	// connect connects to the ranks of a world that join returned. The caller closes the group.
	connect(ctx context.Context, w rendezvous.World) (*collective.Group, error)
	// report tells the driver something that it could only guess otherwise.
	report(ctx context.Context, r rendezvous.Report, generation, commits uint64) error
	// reachable tells whether the driver is connected; it does not block.
	reachable() bool
	// latest returns the newest notification; it does not block.
	latest() notify.Update
	// loss returns which world the driver knows to be lost, and a channel that is closed when it
	// says more; it does not block.
	loss() (notify.Loss, <-chan struct{})
	// close ends everything that the meeting started, and waits for it.
	close() error
}

// solo is the meeting of a worker that no driver started: every world has one rank.
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

func (solo) report(context.Context, rendezvous.Report, uint64, uint64) error { return nil }
func (solo) reachable() bool                                                 { return true }
func (solo) latest() notify.Update                                           { return notify.Update{} }
func (solo) loss() (notify.Loss, <-chan struct{})                            { return notify.Loss{}, nil }
func (solo) close() error                                                    { return nil }
