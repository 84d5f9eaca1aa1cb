package jobrun

import (
	"context"
	"os"

	"github.com/hvdrun/hvdrun/audit"
)

// auditHook keeps the audit record of who requests what. The first record is the request to run the
// job.
type auditHook struct{ startOnly }

func (*auditHook) start(_ context.Context, r *run) error {
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
	return nil
}
