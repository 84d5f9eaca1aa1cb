package tasks

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

// ServeConfig describes what a worker offers. The zero value is for a worker of a job.
type ServeConfig struct {
	// Dial returns a new connection to the scheduler. Nil: Serve uses the scheduler of this
	// process's job.
	Dial func(ctx context.Context) (net.Conn, error)
	// Host is the name of this host, which Prefer uses. Empty: its name in the job, or else the
	// machine's.
	Host string
	// Name is the name of the worker for users. Empty: its host and process id.
	Name string
	// Offers are the resources of this worker: "cpu", "gpu" and any other names. If "cpu" is
	// missing, it is the number of processors divided by the number of the job's workers on this
	// host.
	Offers map[string]float64
	// Admit, if not nil, is called before tasks of a function are sent to this worker. An error
	// refuses them; Admit is called again after a second. It must not block.
	Admit func(function string) error
	// Grace is how long running tasks may continue when ctx ends. 0: 10 s. Tasks that have not
	// begun are returned at once.
	Grace time.Duration
	// Beside lets the worker run tasks while it is a member of a world, which slows training down.
	// Otherwise it gets no tasks then, and tasks that are running when it enters a world run again
	// elsewhere.
	Beside bool
	// StoreBytes bounds the stored values of this host, of all its workers together, in bytes. 0:
	// 30 % of the machine's memory.
	StoreBytes int64
	// Log takes messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger

	run         string                // identifies the store; set if Dial is nil
	credentials *identity.Credentials // nil: no values are exchanged with other workers
	root        string                // folder of the store, in tests
	without     map[string]bool       // functions not to offer, in tests
}

// errVanished ends the context of a worker in tests as if its process were killed.
var errVanished = errors.New("tasks: the process is gone")

const (
	defaultGrace = 10 * time.Second
	// deafTime is how long Serve waits, after the end of its context, for a function to return.
	deafTime = time.Second
	// aliveEvery is the longest pause between two messages of a worker.
	aliveEvery = 5 * time.Second
	// mostUnheard is the largest number of results that a worker repeats to the next scheduler if a
	// scheduler cannot record them for a long time. Tasks with older results run again there.
	mostUnheard = link.MaxHeld / 10
)

// Serve runs tasks of the functions that this program has registered, until ctx ends. If the
// connection to the scheduler breaks, it reconnects; tasks continue to run meanwhile. When ctx
// ends, it returns the tasks that have not begun, waits for running ones for up to Grace, and
// returns nil. Functions that ignore their contexts continue to run. Serve returns an error if it
// cannot reach the scheduler within the first minute, or if the scheduler refuses it.
func Serve(ctx context.Context, cfg ServeConfig) error {
	w, err := newWorker(cfg)
	if err != nil {
		return err
	}
	w.hostStore = openHostStore(ctx, &w.cfg)
	defer w.hostStore.close()
	first, err := reach(ctx, defaultPatience, w.cfg.Log, true, w.hello)
	switch {
	case ctx.Err() != nil:
		if err == nil {
			w.link.Close()
		}
		return nil
	case err != nil:
		return err
	}
	return w.serve(ctx, first)
}
