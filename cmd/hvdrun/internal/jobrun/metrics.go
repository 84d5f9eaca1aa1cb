package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/measure"
)

// serveMetrics serves the driver's metrics, if the settings request it.
func serveMetrics(_ context.Context, r *run) (stop func(), err error) {
	event, stop, err := measure.Job(r.settings, &r.cfg, r.resumed, r.log)
	if event != nil {
		r.events = append(r.events, event)
	}
	return stop, err
}
