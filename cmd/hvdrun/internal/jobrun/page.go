package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/page"
)

// pageHook serves the job's page, if the settings request it, until the page has shown how the job
// ended.
type pageHook struct{ close func() }

func (h *pageHook) start(_ context.Context, r *run) (err error) {
	h.close, err = page.Serve(r.settings, r.dir, r.resumed, r.log)
	return err
}

func (h *pageHook) stop(*run) { h.close() }
