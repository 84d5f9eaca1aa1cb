package jobrun

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/job"
)

// keepFolder keeps the job's folder, if it has one: the journal, the socket for commands, and the
// secrets. The folder of a job that has ended keeps the description of the job. The folder of a job
// that another driver runs stays as it is. While a new job starts, keepFolder removes what is left
// of old ones, which may be many.
func keepFolder(_ context.Context, r *run) (stop func(), err error) {
	var pruning sync.WaitGroup
	if !r.resumed {
		pruning.Go(func() { jobdir.Prune(r.program.Env, time.Now()) })
	}
	if r.dir == nil {
		return pruning.Wait, nil
	}
	r.cfg.Journal, r.cfg.Control, r.cfg.Stop = r.dir.Journal(), r.dir.ControlPath(), r.program.Stop
	unguard := r.dir.Guard(jobdir.SecretPlaces(r.program.Env), r.log)
	return func() {
		pruning.Wait()
		unguard()
		_, damaged := errors.AsType[*journal.CorruptError](r.result)
		if !damaged && !errors.Is(r.result, job.ErrDriven) && !errors.Is(r.result, journal.ErrBehind) {
			r.dir.End(r.result, r.log)
		}
	}, nil
}
