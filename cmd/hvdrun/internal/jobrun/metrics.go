package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/measure"
)

// metricsHook serves the driver's metrics, if the settings request it.
type metricsHook struct{ close func() }

func (h *metricsHook) start(_ context.Context, r *run) error {
	event, stop, err := measure.Job(r.settings, &r.cfg, r.resumed, r.log)
	if h.close = stop; event != nil {
		r.events = append(r.events, event)
	}
	return err
}

func (h *metricsHook) stop(*run) { h.close() }
