package jobrun

import (
	"context"
	"os"

	"github.com/hvdrun/hvdrun/audit"
)

// auditHook keeps the record of who asks for what. It begins with the wish to run the job.
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
