package jobrun

import (
	"context"
	"os"

	"github.com/hvdrun/hvdrun/audit"
)

// keepAudit keeps the audit record of who requests what. The first record is the request to run the
// job.
func keepAudit(_ context.Context, r *run) (stop func(), err error) {
	r.settings.Trail = audit.NewTrail()
	r.cfg.Audit = r.settings.Trail
	wish := audit.Record{What: "run", Program: r.Command[0], Outcome: audit.Done}
	if r.resumed {
		wish.What = "resume"
	}
	if dir, err := os.Getwd(); err == nil {
		wish.Dir = dir
	}
	r.settings.Record(wish)
	return nil, nil
}
