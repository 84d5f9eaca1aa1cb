// Package restart runs a program without hvdrun's library as a worker of an elastic job. In each
// world it starts the program again, with its place in the world in torchrun's environment
// variables, and ends it when the world ends. The program continues from its own checkpoint.
package restart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
)

const (
	// leastTick is how often the ranks of a small world exchange the states of their programs. The
	// end of a rank is noticed at once.
	leastTick = 100 * time.Millisecond
	// tickPerRank makes these exchanges less frequent in large worlds.
	tickPerRank = time.Millisecond
	// quick is how long a program must run for its failure not to count as a failure at its start.
	quick = time.Minute
	// mostQuick is the number of consecutive failures at the start that end the worker, because its
	// slot may be the cause.
	mostQuick = 3
	// lastPause is the pause before the last attempt.
	lastPause = time.Second
	// dialBound bounds the attempt to reach one address of rank 0.
	dialBound = time.Second
	// prestartAfter is how long a program must have run before the next interpreter may start: at
	// the start of a world the processors are busy.
	prestartAfter = time.Second
)

// Config configures Run.
type Config struct {
	// Command is the program and its arguments.
	Command []string
	// Env is the environment of this process, to which the program's place in the world is added.
	Env []string
	// Grace is the time between SIGTERM and SIGKILL for a program whose world ends.
	Grace time.Duration
	// Prestart, if not empty, is code that an interpreter runs in advance; see package prestart.
	// prestart.Parse must accept Command.
	Prestart string
	// Stdout and Stderr receive the program's output. Log must not be nil.
	Stdout, Stderr io.Writer
	Log            logrus.FieldLogger
}

// Run joins the job that started this process, and runs the program in each world of which this
// worker is a member. When a program fails, all ranks end theirs and start them again in the next
// world, with the same workers. When all programs have exited with status 0, the job is done. Run
// blocks until then, until the driver dismisses the worker, or until ctx ends; no process is left.
// It returns nil, elastic.ErrRemoved or elastic.ErrFinished for a worker that is no longer needed,
// a *launch.ExitError if this rank's program has failed three times in a row within a minute of its
// start, a *launch.StartError if the program cannot be started, or an error of package elastic.
func Run(ctx context.Context, cfg Config) (err error) {
	own, started, err := plan.OwnWorker()
	switch {
	case err != nil:
		return fmt.Errorf("restart: environment: %w", err)
	case !started:
		return errors.New("restart: this process was not started by hvdrun")
	}
	r := &runner{cfg: cfg, own: own}
	if cfg.Prestart != "" {
		if r.program, err = prestart.Parse(cfg.Command); err != nil {
			return fmt.Errorf("restart: --prestart: %w", err)
		}
	}
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	r.worker, r.state = w, elastic.NewState(w)
	defer func() { err = errors.Join(err, w.Close()) }()
	defer r.endAll()
	return elastic.Run(ctx, r.state, r.train)
}

// runner is one worker. It is not safe for concurrent use.
type runner struct {
	cfg      Config
	own      plan.Worker // this worker, as the driver started it
	program  prestart.Program
	worker   *elastic.Worker
	state    *elastic.State
	restarts int32 // number of restarts of the job's programs because of failures
	quick    int   // consecutive failures of this rank's program at its start
	running  *process
	spare    *process // a waiting interpreter; nil: none
}

// place is what the ranks of a world have agreed on before their programs start.
type place struct {
	groupRank, groupSize int
	masterAddr           string
	masterPort           int
}

// train runs the program in the worker's world until all are done or the world ends.
func (r *runner) train(ctx context.Context) error {
	r.running.wait()
	if err := r.rest(ctx); err != nil {
		return err
	}
	place, err := r.meet(ctx)
	if err != nil {
		return err
	}
	store, closeStore, err := r.openStore(ctx, place)
	if err != nil {
		return err
	}
	defer closeStore()
	at := store.Door.Addr()
	place.masterAddr, place.masterPort = at.IP.String(), at.Port
	if r.running, err = r.start(place); err != nil {
		return err
	}
	err = r.watch(ctx)
	r.running.end()
	return err
}

// failedError makes all ranks of a world enter the next one.
type failedError struct{ ranks int32 }

func (e failedError) Error() string {
	if e.ranks == 1 {
		return "the program of a worker has failed"
	}
	return fmt.Sprintf("the programs of %d workers have failed", e.ranks)
}

// Is makes package elastic enter the next world.
func (failedError) Is(target error) bool { return target == collective.ErrAborted }

// watch returns nil once the programs of all ranks have exited with 0, or an error when the world
// ends.
func (r *runner) watch(ctx context.Context) error {
	group := r.worker.Group()
	ticker := time.NewTicker(max(leastTick, time.Duration(r.worker.Size())*tickPerRank))
	defer ticker.Stop()
	began, told := time.Now(), false
	ended := r.running.ended
	for {
		select {
		case <-ended:
			ended = nil // the next exchange informs the others
		case <-ticker.C:
		case <-group.Failed():
		case <-ctx.Done():
			return ctx.Err()
		}
		if r.program.Args != nil && r.spare == nil && ended != nil && time.Since(began) > prestartAfter {
			r.prestart()
		}
		var tally [2]int32 // number of programs that are done, and that have failed
		if r.running.hasEnded() {
			if tally[1] = 1; r.running.err == nil {
				tally = [2]int32{1, 0}
			} else if !told {
				told = true
				if err := r.failed(time.Since(began)); err != nil {
					return err
				}
			}
		}
		if err := collective.AllReduce(ctx, group, tally[:], collective.Sum); err != nil {
			return err
		}
		switch {
		case tally[1] > 0:
			r.restarts++
			return failedError{tally[1]}
		case tally[0] == int32(r.worker.Size()):
			return nil
		}
		if err := r.state.CheckHostUpdates(); err != nil {
			return err
		}
	}
}

// rest pauses before the last attempt to run a program that fails at its start, because the cause
// may be temporary.
func (r *runner) rest(ctx context.Context) error {
	if r.quick < mostQuick-1 {
		return nil
	}
	if retry.Pause(ctx, lastPause) != nil {
		return ctx.Err()
	}
	return nil
}

// failed logs the failure of this rank's program. It returns an error if this worker does not start
// the program again.
func (r *runner) failed(after time.Duration) error {
	var exit *launch.ExitError
	if !errors.As(r.running.err, &exit) {
		return r.running.err // it cannot be started on this host
	}
	if after >= quick {
		r.quick = 0
	}
	if r.quick++; r.quick >= mostQuick {
		return fmt.Errorf("restart: %s has failed %d times in a row, each within %v of its start: it %w",
			r.cfg.Command[0], r.quick, quick, exit)
	}
	r.cfg.Log.Warnf("rank %d: %s %v: all workers start their programs again (restart %d)",
		r.worker.Rank(), r.cfg.Command[0], exit, r.restarts+1)
	return nil
}

// meet exchanges what the ranks of the world need before their programs start.
func (r *runner) meet(ctx context.Context) (p place, err error) {
	agreed := []int32{r.restarts}
	if err := collective.AllReduce(ctx, r.worker.Group(), agreed, collective.Max); err != nil {
		return p, err
	}
	r.restarts = agreed[0]
	locals, err := collective.AllGather(ctx, r.worker.Group(), []int32{int32(r.worker.LocalRank())})
	if err != nil {
		return p, err
	}
	for rank, local := range locals {
		if local[0] != 0 {
			continue
		}
		p.groupSize++
		if rank <= r.worker.Rank() {
			p.groupRank = p.groupSize - 1
		}
	}
	p.masterAddr = r.masterAddr(ctx, p.groupRank)
	return p, nil
}

// loopback is the address of this machine for itself.
const loopback = "127.0.0.1"

// masterAddr returns an address of rank 0's machine that this machine can reach.
func (r *runner) masterAddr(ctx context.Context, groupRank int) string {
	if groupRank == 0 {
		return loopback
	}
	first := ""
	for _, addr := range r.worker.Addresses(0) {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			continue
		}
		if first == "" {
			first = host
		}
		conn, err := (&net.Dialer{Timeout: dialBound}).DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = conn.Close() // nothing was sent
			return host
		}
	}
	if first == "" {
		return loopback
	}
	return first
}

// environ returns the environment of the program in the world.
func (r *runner) environ(p place) []string {
	w := r.own
	w.Credentials, w.LauncherAddr = "", "" // the program itself is not a worker of hvdrun
	w.Slot.Rank, w.Size = r.worker.Rank(), r.worker.Size()
	w.Slot.LocalRank, w.Slot.LocalSize = r.worker.LocalRank(), r.worker.LocalSize()
	w.Slot.CrossRank, w.Slot.CrossSize = r.worker.CrossRank(), r.worker.CrossSize()
	w.GroupRank, w.GroupSize = p.groupRank, p.groupSize
	w.MasterAddr, w.MasterPort = p.masterAddr, p.masterPort
	w.Restarts = int(r.restarts)
	const use = "TORCHELASTIC_USE_AGENT_STORE=True" // rank 0 need not open the store itself
	env := slices.DeleteFunc(slices.Clone(r.cfg.Env), func(entry string) bool {
		return strings.HasPrefix(entry, plan.EnvCredentials+"=")
	})
	env = append(append(env, w.Environ()...), use)
	return slices.DeleteFunc(env, func(entry string) bool { return strings.HasPrefix(entry, plan.EnvCredentials+"=") })
}

// start starts the program, in the waiting interpreter if there is one.
func (r *runner) start(p place) (*process, error) {
	env := r.environ(p)
	if warm := r.spare; warm != nil {
		r.spare = nil
		if !warm.hasEnded() {
			if err := warm.waiting.Run(r.program.Args, env); err == nil {
				return warm, nil
			} else {
				r.cfg.Log.Warnf("the interpreter that was started in advance is not used: %v", err)
			}
		}
		warm.end()
		warm.wait()
	}
	return r.fork(r.cfg.Command, env), nil
}

// prestart starts an interpreter for the next world.
func (r *runner) prestart() {
	waiting, err := prestart.New(r.program, r.cfg.Prestart)
	if err != nil {
		r.cfg.Log.Warnf("no interpreter is started in advance: %v", err)
		r.program.Args = nil // do not try again
		return
	}
	r.spare = r.fork(waiting.Command(), r.environ(place{}))
	r.spare.waiting = waiting
}

// process is a program that is running or has ended.
type process struct {
	waiting *prestart.Interpreter // nil: it was not started in advance
	end     context.CancelFunc    // requests its end
	ended   chan struct{}         // closed when it has ended
	err     error                 // how it has ended, as launch.Launcher returns it
}

// fork starts a process that ends when this one does.
func (r *runner) fork(command, env []string) *process {
	ctx, end := context.WithCancel(context.Background())
	p := &process{end: end, ended: make(chan struct{})}
	dir, _ := os.Getwd() // "" stands for the same folder
	go func() {
		defer close(p.ended)
		// Its descendants carry this worker's incarnation, so they are killed when the worker ends.
		p.err = launch.Local{}.Run(ctx, &launch.Spec{
			Slot: r.own.Slot.SlotID, Command: command, Env: env, Dir: dir,
			Stdout: r.cfg.Stdout, Stderr: r.cfg.Stderr, Grace: r.cfg.Grace, CoreLimit: launch.UnlimitedCore,
		}, nil)
	}()
	return p
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// wait blocks until the process, if there is one, has ended, and removes its files.
func (p *process) wait() {
	if p == nil {
		return
	}
	<-p.ended
	if p.waiting != nil {
		_ = p.waiting.Close() // only files in a temporary folder
	}
}

// endAll ends all running processes and waits for their end.
func (r *runner) endAll() {
	for _, p := range []*process{r.running, r.spare} {
		if p != nil {
			p.end()
			p.wait()
		}
	}
}
