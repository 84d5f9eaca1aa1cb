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

// folderHook keeps the job's folder, if it has one: the journal, the socket for commands, and the
// secrets. The folder of a job that has ended keeps the description of the job. The hook does not
// change the folder of a job that another driver runs. While a new job starts, the hook removes
// what is left of old ones, which may be many.
type folderHook struct {
	unguard func()
	pruning sync.WaitGroup
}

func (h *folderHook) start(_ context.Context, r *run) error {
	if !r.resumed {
		h.pruning.Go(func() { jobdir.Prune(r.program.Env, time.Now()) })
	}
	if r.dir == nil {
		return nil
	}
	r.cfg.Journal, r.cfg.Control, r.cfg.Stop = r.dir.Journal(), r.dir.ControlPath(), r.program.Stop
	h.unguard = r.dir.Guard(jobdir.SecretPlaces(r.program.Env), r.log)
	return nil
}

func (h *folderHook) stop(r *run) {
	h.pruning.Wait()
	if r.dir == nil {
		return
	}
	h.unguard()
	_, damaged := errors.AsType[*journal.CorruptError](r.result)
	if !damaged && !errors.Is(r.result, job.ErrDriven) && !errors.Is(r.result, journal.ErrBehind) {
		r.dir.End(r.result, r.log)
	}
}
