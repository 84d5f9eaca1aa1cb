package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/measure"
)

// metricsHook serves the driver's metrics, if the settings request it.
type metricsHook struct{ close func() }

func (h *metricsHook) start(_ context.Context, r *run) error {
	m, err := measure.Job(r.settings, r.resumed, r.log)
	if err != nil {
		return err
	}
	if h.close, r.cfg.Meter = m.Stop, m.Meter; m.Event != nil {
		r.events = append(r.events, m.Event)
	}
	return nil
}

func (h *metricsHook) stop(*run) { h.close() }
