package elastic

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/line"
)

var (
	errLeft       = errors.New("elastic: the training function did not return")
	errLeftBefore = errors.New("elastic: an earlier Run has failed")
)

// Run trains through all worlds of the job and blocks until training ends. It synchronises the
// state with the sync root, calls train, and repeats both in the next world whenever train returns
//
//   - a *HostsUpdatedError: training continues with the live state;
//   - an error that is collective.ErrAborted: every rank restores its last commit first.
//
// After a Commit has returned a *HostsUpdatedError, the program must not write to tensors until
// train returns: Run assumes that they still hold the commit, and the sync does not send them to
// ranks that made the same commit. OnReset functions may write to tensors; having any makes Run
// compare the whole state with the last save.
//
// If [Checkpoint] is among the parts, Run returns after the last commit is on disk. If it could not
// be written, the error is also a *CheckpointError; see [Checkpoints].
//
// If the state has [Steps], a new worker calls train before it is in a world: see [Steps.Step].
//
// Wrapped errors are recognised. If entering a new world fails, Run retries with the next one. Run
// returns nil when train has returned nil on all ranks and the job is done. Otherwise it returns
// ErrRemoved, ErrFinished, ctx's error if ctx has ended, an error of the driver (for example that
// it is unreachable), or, unchanged, any other error of train or of an OnReset function; to its
// peers this rank has then failed.
//
// While Run trains under a driver, the first SIGTERM of the process is a request to leave: Run
// reports it to the driver and returns ErrRemoved after a step on which all ranks have agreed.
// SIGTERMs that arrive more than a second later have their previous effect. If the worker stays
// because no other has the state, the next SIGTERM is a request to leave again. After Run has
// returned ErrRemoved or ErrFinished, this handling lasts until a second after Close. A program's
// own signal.Notify still receives the signals.
//
// After a failure at the very end, when train has already returned nil on this rank, Run can call
// train once more with the state of the last commit. A worker has one Run at a time, and none after
// a Run that returned nil.
func Run(ctx context.Context, s *State, train func(context.Context) error) (err error) {
	if s.err != nil {
		return s.err
	}
	if err := s.worker.begin(); err != nil {
		return err
	}
	defer s.worker.end()
	s.worker.doing.trained.Store(false)
	s.ctx = ctx
	defer func() {
		s.audits.running.Wait()
		s.ctx = context.Background()
	}()
	term := s.worker.handleTerm()
	s.term = term
	if s.checkpoints != nil {
		s.checkpoints.hurry = term.stays
	}
	r := &runner{ctx: ctx, state: s, worker: s.worker, train: train}
	s.run = r
	defer func() { s.run = nil }()
	err = errLeft // kept if train panics, so that the peers do not wait for this rank
	defer func() {
		if errors.Is(err, ErrRemoved) || errors.Is(err, ErrFinished) {
			s.worker.run.term = term // the worker is leaving already
		} else {
			term.end()
		}
	}()
	defer s.worker.doing.enter(line.Outside)
	defer func() { err = s.finish(err) }() // before term.end: SIGTERM must not end the process during a write
	defer func() {
		if err != nil {
			r.worker.run.outside = true
			r.worker.group().Abort(err)
			r.failed(err)
		}
		s.saved.Abandon() // wakes those that wait for another commit, because none follows
		s.withdraw()
		s.watch.end()
	}()
	err = r.run()
	return err
}

// runner is one Run.
type runner struct {
	ctx    context.Context
	state  *State
	worker *Worker
	train  func(context.Context) error
}

// failed reports the error of the program that ends Run to the driver, for its log. It blocks for
// at most two seconds.
func (r *runner) failed(err error) {
	d, driven := r.worker.meeting.(interface {
		ReportFailure(ctx context.Context, text string) error
	})
	if !driven || r.ctx.Err() != nil || errors.Is(err, ErrRemoved) || errors.Is(err, ErrFinished) {
		return
	}
	text := err.Error()
	if err == errLeft {
		text = whyLeft()
	}
	ctx, cancel := context.WithTimeout(r.ctx, closeGrace)
	defer cancel()
	_ = d.ReportFailure(ctx, text) // on failure, the driver still sees that the process ends
}

// whyLeft describes, when called by a deferred function, where the surrounding function has
// panicked.
func whyLeft() string {
	pcs := make([]uintptr, 64)
	frames, panics := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)]), false
	for f, more := frames.Next(); more; f, more = frames.Next() {
		switch {
		case f.Function == "runtime.gopanic":
			panics = true
		case panics && !strings.HasPrefix(f.Function, "runtime."):
			return fmt.Sprintf("panic (%s:%d)", filepath.Base(f.File), f.Line)
		}
	}
	return errLeft.Error()
}

// trained reports whether train has returned nil on this rank, though perhaps not on all ranks. The
// live state is kept until that is known.
func (r *runner) trained() bool { return r.worker.doing.trained.Load() }

func (r *runner) run() error {
	err := r.begin()
	for {
		if err == nil {
			err = r.trainOnce()
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errRejoined): // Step has entered the next world and synchronised
			err = nil
			continue
		case goesOn(err) && r.ctx.Err() != nil:
			return r.ctx.Err()
		case goesOn(err):
		case r.trained() && errors.Is(err, ErrFinished):
			return nil
		default:
			return explained(err)
		}
		err = r.reset(err)
	}
}

// explained rewrites an error about ranks that called different operations: it names Commit or
// CheckHostUpdates in place of the collective operation by which these agree, because the program
// did not call that operation itself.
func explained(err error) error {
	m, is := errors.AsType[*collective.MismatchError](err)
	if !is {
		return err
	}
	named := *m
	returned := false
	for i, call := range m.Calls {
		if call == "AllReduce of 3 uint64 (max)" {
			named.Calls[i], returned = "nothing, as its training function has returned", true
		}
		// The agreement is one word or, during an audit of the state, all of State.word.
		if call == "AllReduce of 1 uint64 (max)" || call == "AllReduce of 4 uint64 (max)" {
			named.Calls[i] = "Commit or CheckHostUpdates"
		}
	}
	if named.Calls == m.Calls || !strings.Contains(err.Error(), m.Error()) {
		return err
	}
	text := strings.Replace(err.Error(), m.Error(), named.Error(), 1)
	if !returned {
		text += ": all ranks must call these equally often"
	}
	return &explainedError{text, err}
}

// explainedError is an error with a different text.
type explainedError struct {
	text string
	err  error
}

func (e *explainedError) Error() string { return e.text }

func (e *explainedError) Unwrap() error { return e.err }

// goesOn reports whether training continues in another world after err.
func goesOn(err error) bool {
	var updated *HostsUpdatedError
	return errors.Is(err, collective.ErrAborted) || errors.As(err, &updated)
}

// begin saves the initial values and synchronises them with the root in the worker's current world,
// or in the next one if an earlier Run has left the current one.
func (r *runner) begin() error {
	if err := r.state.Save(); err != nil {
		return err
	}
	if r.worker.driven && r.worker.verification.every >= 0 {
		r.state.logLeftOut()
	}
	if r.state.steps != nil {
		r.state.steps.prepare()
	}
	switch {
	case r.worker.group() == nil:
		if synced, err := r.arrive(); synced || err != nil {
			return err
		}
	case r.worker.run.outside:
		return r.reset(errLeftBefore)
	}
	return r.sync()
}

// sync synchronises the state with the root, or restores the last commit if that fails.
func (r *runner) sync() error {
	r.worker.doing.enter(line.Syncing)
	err := r.state.Sync(r.ctx)
	if err != nil {
		return r.rollBack(err)
	}
	return nil
}

// rollBack restores the last commit and returns err, or the error of the restore: training cannot
// continue without a valid state.
func (r *runner) rollBack(err error) error {
	if s := r.state; s.steps != nil && s.saved.Last() == nil { // the next sync sends all of it
		s.saved.Abandon()
		s.holds, s.saved.mark = false, snapshotID{}
		return err
	}
	if restoreErr := r.state.Restore(); restoreErr != nil {
		return fmt.Errorf("%w (after: %v)", restoreErr, err)
	}
	r.state.saved.clean = true
	return err
}

func (r *runner) trainOnce() error {
	r.worker.beginTraining()
	r.state.loops = nil
	if err := r.train(r.ctx); err != nil {
		err = r.hidden(err)
		r.state.trainReturned(err)
		return r.undo(err)
	}
	if r.state.err != nil { // set by Count
		return r.state.err
	}
	r.worker.doing.trained.Store(true)
	if err := r.state.locals.gather(r.ctx, r.state.checkpoints != nil); err != nil {
		return err
	}
	// This is a barrier that cannot be mistaken for an operation of the program.
	if err := collective.AllReduce(r.ctx, r.worker.group(), make([]uint64, 3), collective.Max); err != nil {
		return err
	}
	err := r.worker.meeting.Report(r.ctx, line.Done, r.worker.Generation(), r.state.commits)
	if err != nil {
		return fmt.Errorf("elastic: training is done, but reporting it to the driver failed: %w", err)
	}
	r.worker.use.over.Store(true)
	return nil
}

// hidden adds to an error of train the likely cause that it hides, without which Run cannot
// continue in the next world: the program should have returned the error of a collective operation
// or of Commit.
func (r *runner) hidden(err error) error {
	if goesOn(err) || errors.Is(err, errRejoined) || r.ctx.Err() != nil {
		return err
	}
	if _, is := errors.AsType[*collective.MismatchError](err); is {
		return err
	}
	select {
	case <-r.worker.group().Failed():
		if errors.Is(r.worker.group().Err(), collective.ErrAborted) {
			return &explainedError{err.Error() + " (the world was aborted during this step: return collective's errors as they are, or wrap them with %w)", err}
		}
	default:
	}
	if r.state.saved.promised != nil {
		return &explainedError{err.Error() + " (the hosts have changed: return Commit's error as it is, or wrap it with %w)", err}
	}
	return err
}

// reset enters the next world, calls the OnReset functions and synchronises.
func (r *runner) reset(cause error) error {
	if err := r.state.settled(); err != nil {
		return err
	}
	r.worker.run.outside = true
	var aborted error
	if errors.Is(cause, collective.ErrAborted) {
		aborted = cause
	}
	// The group closes in the background. Joining must not wait for that, because the driver
	// publishes the next world only when all workers have joined.
	left := r.worker.member.Load().leaveAsync(aborted)
	defer left()
	if r.worker.run.deserted {
		return r.worker.endWithoutDriver(r.worker.Rank() == 0)
	}
	err := r.worker.enter(r.ctx, left, line.Joining{
		After:      r.worker.Generation(),
		Commits:    r.state.commits,
		HoldsState: r.state.holds,
		Cause:      cause.Error(),
		Trained:    new(r.trained()),
		Lost:       lostBy(cause),
		Undone:     r.worker.run.undone,
	})
	r.worker.run.undone = 0
	if err != nil {
		return err
	}
	if r.trained() {
		// The job continues, so this rank rejoins its peers from the last commit.
		r.worker.doing.trained.Store(false)
		if err := r.state.Restore(); err != nil {
			return err
		}
		r.state.saved.clean = true
	}
	if aborted != nil {
		if err := r.state.restoreExposed(); err != nil {
			return err
		}
	}
	r.worker.doing.enter(line.Resetting)
	for _, f := range r.state.onReset {
		if err := f(); err != nil {
			return r.undo(err)
		}
	}
	if len(r.state.onReset) > 0 {
		r.state.saved.clean = r.state.saved.clean && r.state.isSaved((*snapshot.Blob).Same)
	}
	return r.sync()
}

// undo returns err. If an abort has interrupted the user's function, it rolls back first.
func (r *runner) undo(err error) error {
	if errors.Is(err, collective.ErrAborted) {
		r.worker.run.undone += time.Since(r.worker.run.sound)
		r.worker.run.sound = time.Now()
		return r.rollBack(err)
	}
	return err
}
