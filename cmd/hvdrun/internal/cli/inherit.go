package cli

import (
	"context"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// AgentReaps and DriverReaps are how long an agent and a driver wait before they reap an ended
// process that something else in the program may wait for. An agent starts all its children by
// internal/proc, a driver does not.
const (
	AgentReaps  = 100 * time.Millisecond
	DriverReaps = 10 * time.Second
)

// Inherit makes this process the parent of processes that its descendants leave behind, and reaps
// them in a goroutine until release is called.
func Inherit(log logrus.FieldLogger, patience time.Duration) (release func()) {
	if err := proc.Adopt(); err != nil {
		log.Warnf("processes that workers leave behind may outlive them: %v", err)
	}
	return Background(func(ctx context.Context) { proc.Reap(ctx, patience) })
}
