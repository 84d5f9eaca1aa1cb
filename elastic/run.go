package elastic

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/rendezvous"
)

var (
	errLeft       = errors.New("elastic: the training function did not return")
	errLeftBefore = errors.New("elastic: an earlier Run has failed")
)

// Run trains from world to world. It makes the state that of the sync root, calls train, and does
// so again in the next world whenever train returns
//
//   - a *HostsUpdatedError: the live state goes on;
//   - an error that is collective.ErrAborted: every rank goes back to its last commit first.
//
// From the Commit that has returned a *HostsUpdatedError until train returns, tensors must not be
// written to: what they hold then is taken to be what was committed, and ranks that made the commit
// are not sent it. OnReset functions may write to them, which costs a look at the whole state.
//
// With [Checkpoint] among the parts, Run returns when the last commit is on the disk. Where it
// could not be written, what Run returns is also a *CheckpointError; see [Checkpoints].
//
// Wrapped errors count. What fails on the way into a new world is tried again in the next one. Run
// returns nil when train has returned nil on all ranks, and with it the job is done. Otherwise it
// returns ErrRemoved, ErrFinished, ctx's error when ctx has ended, an error of the driver's (it
// cannot be reached), or any other error of train or of an OnReset function as it is; the peers
// then see this rank gone.
//
// While Run trains for a driver, the process's first SIGTERM is a request to leave: the driver is
// told, Run returns ErrRemoved after a step at which all ranks have agreed on that, and SIGTERMs
// later than a second after it do what they did before. Where the worker stays, because it alone
// has the state, the next SIGTERM is such a request too. So it is until a second after Close where
// Run has returned ErrRemoved or ErrFinished. A program's own signal.Notify is not disturbed.
//
// A failure at the very end, when train had returned nil here already, can mean that train is
// called once more, with the state of the last commit. A worker runs once: not again after a Run
// that returned nil, and one at a time.
func Run(ctx context.Context, s *State, train func(context.Context) error) (err error) {
	if s.err != nil {
		return s.err
	}
	if err := s.worker.begin(); err != nil {
		return err
	}
	defer s.worker.end()
	s.ctx = ctx
	defer func() {
		s.auditing.Wait()
		s.ctx = context.Background()
	}()
	heeding := s.worker.heed()
	s.heeding = heeding
	if s.checkpoints != nil {
		s.checkpoints.hurry = heeding.stays
	}
	r := &runner{ctx: ctx, state: s, worker: s.worker, train: train}
	err = errLeft // stays where train panics: the peers must not wait for a rank that is unwinding
	defer func() {
		if errors.Is(err, ErrRemoved) || errors.Is(err, ErrFinished) {
			s.worker.heeding = heeding // it goes already
		} else {
			heeding.end()
		}
	}()
	defer s.worker.doing.enter(rendezvous.Outside)
	defer func() { err = s.finish(err) }() // SIGTERM does not end the process meanwhile
	defer func() {
		if err != nil {
			r.worker.outside = true
			r.worker.Group().Abort(err)
		}
		s.withdraw()
		s.endWatch()
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

	// trained: train has returned nil here, but it is not known whether on all ranks. The live
	// state is kept until then.
	trained bool
}

func (r *runner) run() error {
	err := r.begin()
	for {
		if err == nil {
			err = r.trainOnce()
		}
		switch {
		case err == nil:
			return nil
		case goesOn(err) && r.ctx.Err() != nil:
			return r.ctx.Err()
		case goesOn(err):
		case r.trained && errors.Is(err, ErrFinished):
			return nil
		default:
			return err
		}
		err = r.reset(err)
	}
}

// goesOn tells whether training goes on in another world after err.
func goesOn(err error) bool {
	var updated *HostsUpdatedError
	return errors.Is(err, collective.ErrAborted) || errors.As(err, &updated)
}

// begin keeps the initial values and makes them the root's, in the world that the worker is in.
// Where an earlier Run has left that world, it goes to another.
func (r *runner) begin() error {
	if err := r.state.Save(); err != nil {
		return err
	}
	if r.worker.driven && r.worker.verification.every >= 0 {
		r.state.sayLeftOut()
	}
	switch {
	case r.worker.late:
		if err := r.arrive(); err != nil {
			return err
		}
	case r.worker.outside:
		return r.reset(errLeftBefore)
	}
	return r.sync()
}

// sync makes the state the root's, or what it was at the last commit.
func (r *runner) sync() error {
	r.worker.doing.enter(rendezvous.Syncing)
	err := r.state.Sync(r.ctx)
	if err != nil {
		return r.rollBack(err)
	}
	return nil
}

// rollBack restores the last commit and returns err, unless that fails too: then no state is left
// to go on with.
func (r *runner) rollBack(err error) error {
	if restoreErr := r.state.Restore(); restoreErr != nil {
		return fmt.Errorf("%w (after: %v)", restoreErr, err)
	}
	r.state.clean = true
	return err
}

// trainOnce trains in the current world. It returns nil when the job is done.
func (r *runner) trainOnce() error {
	r.worker.doing.enter(rendezvous.Training)
	if err := r.train(r.ctx); err != nil {
		r.state.parted(err)
		return r.undo(err)
	}
	r.trained = true
	if err := r.state.gather(r.ctx, r.state.checkpoints != nil); err != nil {
		return err
	}
	if err := collective.Barrier(r.ctx, r.worker.Group()); err != nil {
		return err
	}
	err := r.worker.meeting.report(r.ctx, rendezvous.Done, r.worker.Generation(), r.state.commits)
	if err != nil {
		return fmt.Errorf("elastic: training is done, but the driver could not be told: %w", err)
	}
	r.worker.setOver()
	return nil
}

// reset leaves the world for the next one, where it calls the OnReset functions and synchronises.
func (r *runner) reset(cause error) error {
	if err := r.state.settled(); err != nil {
		return err
	}
	r.worker.outside = true
	var aborted error
	if errors.Is(cause, collective.ErrAborted) {
		aborted = cause
	}
	// The driver answers when all have come, and hears of this rank while it says goodbye to its
	// peers.
	left := r.worker.place.Load().leaveAside(aborted)
	defer left()
	if r.worker.deserted {
		return r.worker.goAlone(r.worker.Rank() == 0)
	}
	err := r.worker.enter(r.ctx, left, rendezvous.Joining{
		After:      r.worker.Generation(),
		Commits:    r.state.commits,
		HoldsState: r.state.holds,
		Cause:      cause.Error(),
	})
	if err != nil {
		return err
	}
	if r.trained {
		// The job goes on after all, and this rank with it, from where its peers are.
		r.trained = false
		if err := r.state.Restore(); err != nil {
			return err
		}
		r.state.clean = true
	}
	if aborted != nil {
		if err := r.state.restoreExposed(); err != nil {
			return err
		}
	}
	r.worker.doing.enter(rendezvous.Resetting)
	for _, f := range r.state.onReset {
		if err := f(); err != nil {
			return r.undo(err)
		}
	}
	if len(r.state.onReset) > 0 {
		r.state.clean = r.state.clean && r.state.isSaved((*image.Piece).Same)
	}
	return r.sync()
}

// undo rolls back where what the user's function did was cut short, and returns its error.
func (r *runner) undo(err error) error {
	if errors.Is(err, collective.ErrAborted) {
		return r.rollBack(err)
	}
	return err
}
