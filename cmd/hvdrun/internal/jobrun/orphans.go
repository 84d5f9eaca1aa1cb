package jobrun

import (
	"context"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// adoptOrphans makes this process the parent of processes that workers leave behind.
func adoptOrphans(_ context.Context, r *run) (stop func(), err error) {
	return cli.Inherit(r.log, cli.DriverReaps), nil
}
