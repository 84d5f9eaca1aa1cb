package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// orphansHook makes this process the parent of processes that workers leave behind.
type orphansHook struct{ release func() }

func (h *orphansHook) start(_ context.Context, r *run) error {
	h.release = cli.Inherit(r.log, cli.DriverReaps)
	return nil
}

func (h *orphansHook) stop(*run) { h.release() }
