package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/page"
)

// servePage serves the job's page, if the settings request it, until the page has shown how the job
// ended.
func servePage(_ context.Context, r *run) (stop func(), err error) {
	return page.Serve(r.settings, r.dir, r.resumed, r.log)
}
