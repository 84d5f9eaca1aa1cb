package elastic

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// ErrRemoved is returned by Init and Run if this worker has no place in the new world. The process
// should exit with status 0.
var ErrRemoved = errors.New("elastic: this worker has no place in the new world")

// ErrFinished is returned by Init and Run if the job was done before this worker had finished its
// training, because it joined late. Its state is not the job's final state. The process should exit
// with status 0.
var ErrFinished = errors.New("elastic: the job was done before this worker's training")

var (
	errReportedLost = errors.New("reported by the driver")
	errAbandoned    = errors.New("the driver has abandoned this world: its workers waited for each other for too long (--stall-timeout)")
)

const (
	// closeGrace limits the reports that Close makes to the driver.
	closeGrace = 2 * time.Second
	// patience is the wait for a new world after which it is logged; the interval then doubles.
	patience = 5 * time.Second
)

// Worker is this process's membership in the job. Its methods may be called concurrently. They
// describe the world that Run entered last; before the first Run, that of Init.
type Worker struct {
	meeting meeting
	driven  bool   // started by a driver
	job     string // the driver's run ID; empty without a driver
	log     logrus.FieldLogger
	fake    *fakeproc.Process          // nil: the worker is a real process
	member  atomic.Pointer[membership] // never nil after Init

	verification verification // of the ranks' states
	replicas     int          // number of ranks that keep copies of each rank's Local pieces
	shared       bool         // other users may read the job's checkpoints
	doing        doing
	entering     atomic.Uint64 // generation of the world that the worker enters or has entered
	stopPulse    func()

	reports reports
	run     runState
	use     use
}

// reports are the worker's background reports to the driver.
type reports struct {
	sync.WaitGroup
	ctx       context.Context // canceled when reports must end
	stop      context.CancelFunc
	committed uint64 // last generation with a reported commit; used by Run's goroutine only
}

// runState is used by Run's goroutine only.
type runState struct {
	commit   uint64       // number of the last commit begun
	term     *termHandler // of a Run that ended while the driver may still send SIGTERM
	late     bool         // the worker has not been in a world yet; Run enters the first one
	last     bool         // no world follows, and this rank writes the last checkpoint
	deserted bool         // at the last commit all ranks were asked to leave and had no driver
	outside  bool         // the world of member has been left and no other entered
}

// use tracks the lifecycle of a worker.
type use struct {
	mu       sync.Mutex
	running  bool
	closed   bool
	over     bool // the driver expects nothing more from this worker: it is done, removed or finished
	closing  sync.Once
	closeErr error // result of closing
}

// membership is a world, this worker's slot in it and its connections.
type membership struct {
	world rendezvous.World
	slot  plan.Slot
	group *collective.Group
	// unwatch stops watching for lost ranks and waits for the watching goroutine.
	unwatch func()
}

// leave closes the group, aborting it first if why is not nil, and stops watching for losses.
func (p *membership) leave(why error) error {
	if why != nil {
		p.group.Abort(why)
	}
	err := p.group.Close()
	p.unwatch()
	return err
}

// leaveAsync calls leave in the background; the returned function waits for it. An error is ignored
// because the group is not used again.
func (p *membership) leaveAsync(why error) (left func()) {
	var leaving sync.WaitGroup
	leaving.Go(func() { _ = p.leave(why) })
	return leaving.Wait
}

// Init joins the job that started this process and blocks until there is a world that includes this
// worker, or ctx ends. With [Late] it does not join; Run does. In a process that hvdrun did not
// start, the worker is alone in a world of size one, without sockets. Errors are ErrRemoved,
// ErrFinished, ctx's error, and those of an invalid environment or an unreachable driver. The
// caller must close the worker.
func Init(ctx context.Context, options ...InitOption) (*Worker, error) {
	late := slices.Contains(options, Late)
	lookup := os.LookupEnv
	if l := fakeproc.From(ctx); l != nil {
		lookup = l.Lookup
	}
	env, started, err := plan.WorkerFromEnv(lookup)
	if err != nil {
		return nil, fmt.Errorf("elastic: environment: %w", err)
	}
	var m meeting = solo{}
	if started {
		if m, err = newDriven(env); err != nil {
			return nil, err
		}
	}
	first := rendezvous.Joins
	if late {
		first = rendezvous.Outside
	}
	w := newOutsider(ctx, m, first)
	w.driven, w.job = started, env.RunID
	w.verification = verification{every: env.VerifyState, heal: env.HealState}
	w.replicas, w.shared = env.CommitReplicas, env.ShareOutput
	if late {
		w.stayOut(env.Slot.SlotID)
		return w, nil
	}
	return w.arrive(ctx)
}

// newWorker returns a worker in the first world of m. It closes m if that fails.
func newWorker(ctx context.Context, m meeting) (*Worker, error) {
	return newOutsider(ctx, m, rendezvous.Joins).arrive(ctx)
}

// newOutsider returns a worker of m that is in no world, in the given phase.
func newOutsider(ctx context.Context, m meeting, first rendezvous.Phase) *Worker {
	w := &Worker{meeting: m, log: logrus.StandardLogger(), fake: fakeproc.From(ctx)}
	w.reports.ctx, w.reports.stop = context.WithCancel(context.Background())
	if d, ok := m.(*driven); ok {
		chosen := func(generation uint64, backend string) { w.chosen(d, generation, backend) }
		d.chosen.Store(&chosen)
	}
	w.doing.enter(first)
	w.stopPulse = w.startPulse()
	w.appear()
	return w
}

// arrive enters the first world and closes the worker if that fails.
func (w *Worker) arrive(ctx context.Context) (*Worker, error) {
	if err := w.enter(ctx, func() {}, rendezvous.Joining{}); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// enter joins the next world, calls left, which waits until the previous world is left, and
// connects. If connecting fails it joins again, as the peers do.
func (w *Worker) enter(ctx context.Context, left func(), j rendezvous.Joining) error {
	for {
		world, err := w.join(ctx, j)
		if err != nil {
			return err
		}
		left()
		p, err := w.connect(ctx, world)
		if err == nil {
			w.member.Store(p)
			w.doing.enter(rendezvous.Outside)
			w.run.outside = false
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.logUnconnected(world, err)
		j.After, j.Cause = world.Generation, err.Error()
	}
}

// logUnconnected logs why a world could not be entered: as a warning on the lowest rank that is not
// reported dead, so that the job's log has it once, and at debug level on the others.
func (w *Worker) logUnconnected(world rendezvous.World, err error) {
	level, speaker := logrus.DebugLevel, 0
	var aborted *collective.AbortedError
	if errors.As(err, &aborted) {
		for slices.Contains(aborted.Dead, speaker) {
			speaker++
		}
	}
	if world.Rank == speaker {
		level = logrus.WarnLevel
	}
	w.log.WithError(err).WithFields(logrus.Fields{"generation": world.Generation, "size": world.Size()}).
		Log(level, "elastic: no connection to all workers of the world; waiting for the next one")
}

// connect connects to a world that join returned. It fails, or the group is aborted, as soon as the
// driver reports a dead rank in that world: peers on an unreachable host would otherwise be noticed
// only after a long timeout.
func (w *Worker) connect(ctx context.Context, world rendezvous.World) (*membership, error) {
	w.doing.commits.Store(0)
	w.entering.Store(world.Generation)
	w.doing.enter(rendezvous.Connecting)
	watch, stop := context.WithCancel(context.Background())
	connecting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	connected := make(chan *collective.Group, 1)
	var watching sync.WaitGroup
	watching.Go(func() {
		lost := w.awaitLoss(watch, world.Generation)
		if lost == nil {
			return
		}
		giveUp()
		select {
		case group := <-connected:
			group.Abort(lost)
		case <-watch.Done():
		}
	})
	unwatch := func() {
		stop()
		watching.Wait()
	}
	group, err := w.meeting.connect(connecting, world)
	if err != nil {
		unwatch()
		return nil, err
	}
	connected <- group
	return &membership{world: world, slot: world.Slots[world.Rank], group: group, unwatch: unwatch}, nil
}

// awaitLoss blocks until the driver reports dead ranks of the generation or abandons it; nil if ctx
// ends first.
func (w *Worker) awaitLoss(ctx context.Context, generation uint64) error {
	for {
		loss, more := w.meeting.loss()
		if loss.Generation == generation && generation != 0 {
			cause := errReportedLost
			if len(loss.Ranks) == 0 {
				cause = errAbandoned
			}
			return &collective.AbortedError{Generation: generation, Dead: loss.Ranks, Cause: cause}
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil
		}
	}
}

func (w *Worker) join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error) {
	w.doing.enter(rendezvous.Joins)
	stop := w.logWaiting()
	world, err := w.meeting.join(ctx, j)
	stop()
	w.fake.Survive()
	switch {
	case errors.Is(err, rendezvous.ErrRemoved):
		w.run.last = errors.Is(err, rendezvous.ErrLast)
		w.setOver()
		return world, ErrRemoved
	case errors.Is(err, rendezvous.ErrFinished):
		w.setOver()
		return world, ErrFinished
	case ctx.Err() != nil:
		return world, ctx.Err()
	case err != nil:
		return world, fmt.Errorf("elastic: join: %w", err)
	case world.Rank < 0 || world.Rank >= world.Size() || world.SyncRoot < 0 || world.SyncRoot >= world.Size():
		return world, fmt.Errorf("elastic: join: a world of %d with rank %d and root %d", world.Size(), world.Rank, world.SyncRoot)
	}
	return world, nil
}

// endWithoutDriver ends the job on this rank when all ranks were asked to leave and the driver is
// unreachable. last: this rank writes the last checkpoint.
func (w *Worker) endWithoutDriver(last bool) error {
	w.log.Warn("all workers were asked to leave and the driver is unreachable: the job ends")
	w.run.last = last
	w.setOver()
	return ErrRemoved
}

// logWaiting logs long waits for a new world until stop is called.
func (w *Worker) logWaiting() (stop func()) {
	began, done := time.Now(), make(chan struct{})
	var logging sync.WaitGroup
	logging.Go(func() {
		for next := patience; ; next *= 2 {
			select {
			case <-done:
				return
			case <-time.After(next - time.Since(began)):
				w.log.Warnf("waiting for a new world since %v", time.Since(began).Round(time.Second))
			}
		}
	})
	return func() {
		close(done)
		logging.Wait()
	}
}

// committed reports the first commit of a generation to the driver, without blocking. Beats report
// the following ones.
func (w *Worker) committed(commits uint64) {
	generation := w.Generation()
	w.reach(w.doing.phase(), true)
	w.doing.commits.Store(commits)
	if w.reports.committed == generation {
		return
	}
	w.reports.committed = generation
	w.reports.Go(func() {
		// Ignored on failure: the report is used for measurements only.
		_ = w.meeting.report(w.reports.ctx, rendezvous.Committed, generation, commits)
	})
}

// chosen reports the chosen backend to the driver without blocking.
func (w *Worker) chosen(d *driven, generation uint64, backend string) {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	if !w.use.closed {
		// Ignored on failure: the report is used for the events file only.
		w.reports.Go(func() { _ = d.client.ReportBackend(w.reports.ctx, generation, backend) })
	}
}

// begin marks the begin of a Run, or returns why it cannot begin.
func (w *Worker) begin() error {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	switch {
	case w.use.closed:
		return errors.New("elastic: Run of a closed worker")
	case w.use.running:
		return errors.New("elastic: Run of a worker that is already running")
	case w.use.over:
		return errors.New("elastic: Run of a worker whose job has ended")
	}
	w.use.running = true
	return nil
}

func (w *Worker) end() {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	w.use.running = false
}

func (w *Worker) isOver() bool {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	return w.use.over
}

func (w *Worker) setOver() {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	w.use.over = true
}

// Close leaves the job. It closes the connections so that peers that are still in the last
// operation can finish it and, if training has not ended, reports to the driver that this worker
// leaves. It blocks until everything that the worker started has ended, and at most about two
// seconds for the driver. Further calls return the same result. Close must not be called during
// Run; end Run's context instead.
func (w *Worker) Close() error {
	w.use.closing.Do(func() { w.use.closeErr = w.close() })
	w.fake.Survive()
	return w.use.closeErr
}

func (w *Worker) close() error {
	w.use.mu.Lock()
	w.use.closed = true
	over := w.use.over
	w.use.mu.Unlock()
	w.stopPulse()

	stop := time.AfterFunc(closeGrace, w.reports.stop)
	defer stop.Stop()
	var err error
	if p := w.member.Load(); p != nil {
		if !over && !w.run.late {
			// Ignored on failure: the driver notices the end of the process.
			_ = w.meeting.report(w.reports.ctx, rendezvous.Leaving, p.world.Generation, 0)
		}
		if err = p.leave(nil); err != nil {
			err = fmt.Errorf("elastic: close: %w", err)
		}
	}
	w.reports.Wait()
	w.reports.stop()
	w.run.term.leave()
	return errors.Join(err, w.meeting.close())
}

// Rank returns this worker's rank in the world, from 0; −1 before a [Late] worker's first world.
func (w *Worker) Rank() int { return w.member.Load().slot.Rank }

// Size returns the number of workers in the world; 0 before a [Late] worker's first world.
func (w *Worker) Size() int { return w.member.Load().world.Size() }

// LocalRank returns this worker's rank among those on its host, from 0.
func (w *Worker) LocalRank() int { return w.member.Load().slot.LocalRank }

// LocalSize returns the number of workers on this worker's host.
func (w *Worker) LocalSize() int { return w.member.Load().slot.LocalSize }

// CrossRank returns the index of this worker's host among the hosts that have a worker with the
// same local rank, from 0.
func (w *Worker) CrossRank() int { return w.member.Load().slot.CrossRank }

// CrossSize returns the number of hosts that have a worker with the same local rank.
func (w *Worker) CrossSize() int { return w.member.Load().slot.CrossSize }

// Slot returns the index of this worker's slot on its host, from 0. It identifies the device and is
// the same in every world.
func (w *Worker) Slot() int { return w.member.Load().slot.Index }

// Host returns the name that discovery gave this worker's host; without hvdrun, the host name of
// the system.
func (w *Worker) Host() string { return w.member.Load().slot.Host }

// Generation returns the number of the world. It increases with every reset, by one or more.
func (w *Worker) Generation() uint64 { return w.member.Load().world.Generation }

// Group returns the connected ranks of the world. Every reset replaces it, so callers must not
// store it; the worker closes it.
func (w *Worker) Group() *collective.Group { return w.member.Load().group }
