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

// prestartAfter is how long a round must have lasted before the interpreters of the next one are
// started: while a program starts, processors and disks are busy.
const prestartAfter = time.Second

// warm is an interpreter that is started before its worker is needed.
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
	worker *launch.Spec // the worker that it has become; nil: it waits
}

// redirect is a writer whose target can change.
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

// warmUp starts an interpreter for each worker that does not have one.
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
	ctx, w.cancel = context.WithCancel(context.WithoutCancel(ctx)) // only w.cancel ends it
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

// signal returns the signal that ends the process.
func (w *warm) signal() syscall.Signal {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.worker == nil {
		return syscall.SIGKILL // a waiting interpreter has nothing to lose
	}
	return w.worker.Signal()
}

// tell records the end, and reports it to the worker.
func (w *warm) tell(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended && w.worker != nil {
		w.worker.Ended(err)
	}
	w.ended = true
}

// become makes the interpreter run a worker until that worker or ctx ends. It returns used false if
// the interpreter could not run the worker; then the interpreter is gone.
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

// end ends the process and waits for its end.
func (w *warm) end() {
	w.cancel()
	<-w.done
}

// endWarm ends the interpreters that have not become workers.
func (a *Agent) endWarm() {
	for local, w := range a.warm {
		if w != nil {
			w.end()
			a.warm[local] = nil
		}
	}
}
