package torchrun

import (
	"context"
	"errors"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
)

// prestartAfter is when a round has lasted for so long that the interpreters of the next one start:
// at the start of a program processors and disks have enough to do.
const prestartAfter = time.Second

// warm is an interpreter that runs before its worker is due.
type warm struct {
	waiting        *prestart.Interpreter
	incarnation    string
	stdout, stderr redirect
	cancel         context.CancelFunc
	done           chan struct{} // closed when the process is gone and err is set
	err            error

	mu     sync.Mutex
	pid    int
	ended  bool
	worker *launch.Spec // of the worker that it has become; nil: it waits
}

// redirect is a writer whose target changes.
type redirect struct {
	mu sync.Mutex
	to io.Writer
}

// Write implements io.Writer.
func (r *redirect) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.to.Write(b)
}

func (r *redirect) set(to io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to = to
}

// warmUp starts an interpreter for each worker that has none.
func (a *Agent) warmUp(ctx context.Context) {
	for local := range a.cfg.Workers {
		if a.warm[local] != nil {
			continue
		}
		w, err := a.startWarm(ctx, local)
		if err != nil {
			a.cfg.Log.Warnf("torchrun: no interpreter is started in advance: %v", err)
			return
		}
		a.warm[local] = w
	}
}

func (a *Agent) startWarm(ctx context.Context, local int) (*warm, error) {
	waiting, err := prestart.New(a.program, a.cfg.Prestart)
	if err != nil {
		return nil, err
	}
	w := &warm{waiting: waiting, incarnation: newIncarnation(), done: make(chan struct{})}
	stdout, stderr := a.logs.console.Worker(nil)
	w.stdout.set(stdout)
	w.stderr.set(stderr)
	ctx, w.cancel = context.WithCancel(context.WithoutCancel(ctx)) // what ends it says so
	spec := &launch.Spec{
		Incarnation: w.incarnation,
		Slot:        plan.SlotID{Host: a.cfg.Host, Index: local},
		Command:     waiting.Command(),
		Env:         a.environment(place{}, local, paths{}, w.incarnation),
		Stdout:      &w.stdout,
		Stderr:      &w.stderr,
		Grace:       a.cfg.ShutdownTimeout,
		Signal:      w.signal,
		CoreLimit:   launch.UnlimitedCore,
		Hurry:       a.cfg.Hurry,
		Ended:       w.tell,
	}
	go func() {
		defer close(w.done)
		err := a.cfg.Launcher.Run(ctx, spec, w.started)
		w.tell(err)
		w.err = errors.Join(err, waiting.Close(), stdout.Close(), stderr.Close())
	}()
	return w, nil
}

func (w *warm) started(pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pid = pid
}

// signal is what ends the process.
func (w *warm) signal() syscall.Signal {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.worker == nil {
		return syscall.SIGKILL // it has nothing to lose
	}
	return w.worker.Signal()
}

// tell notes the end, and tells the worker of it.
func (w *warm) tell(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended && w.worker != nil {
		w.worker.Ended(err)
	}
	w.ended = true
}

// become makes the interpreter run a worker, until that ends or ctx does. used: it did; false: it
// was not fit for that, and is gone.
func (w *warm) become(ctx context.Context, spec *launch.Spec, args []string, started func(pid int)) (used bool, err error) {
	if !w.adopt(spec) {
		w.end()
		return false, errors.New("the interpreter has ended")
	}
	w.stdout.set(spec.Stdout)
	w.stderr.set(spec.Stderr)
	if err := w.waiting.Run(args, spec.Env); err != nil {
		w.mu.Lock()
		w.worker = nil
		w.mu.Unlock()
		w.end()
		return false, err
	}
	started(w.pid)
	stop := context.AfterFunc(ctx, w.cancel)
	defer stop()
	<-w.done
	return true, w.err
}

func (w *warm) adopt(spec *launch.Spec) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended || w.pid == 0 {
		return false
	}
	w.worker = spec
	return true
}

// end ends the process, and waits for that.
func (w *warm) end() {
	w.cancel()
	<-w.done
}

// endWarm ends the interpreters that have become no worker.
func (a *Agent) endWarm() {
	for local, w := range a.warm {
		if w != nil {
			w.end()
			a.warm[local] = nil
		}
	}
}
