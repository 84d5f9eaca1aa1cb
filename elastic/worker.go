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
	"github.com/hvdrun/hvdrun/elastic/internal/life"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// ErrRemoved is returned by Init and Run where this worker has no place in the new world. The
// process should exit 0.
var ErrRemoved = errors.New("elastic: this worker has no place in the new world")

// ErrFinished is returned by Init and Run where the job is done but this worker's own training is
// not: it came late. The state of this process is not the job's last. The process should exit 0.
var ErrFinished = errors.New("elastic: the job was done before this worker's training")

var (
	errDriverKnows = errors.New("reported by the driver")
	errGivenUp     = errors.New("the driver has given this world up: its workers waited for each other for too long (--stall-timeout)")
)

const (
	// closeGrace bounds what Close still says to the driver.
	closeGrace = 2 * time.Second
	// patience is the wait for a new world that is first worth a line in the log; the next comes
	// after twice as long.
	patience = 5 * time.Second
)

// Worker is this process's part in the job. Its methods may be called by several goroutines, and
// tell the world that Run has entered last; before the first Run, that of Init.
type Worker struct {
	meeting meeting
	driven  bool   // by a driver, rather than alone
	job     string // which the driver runs; empty where it is alone
	log     logrus.FieldLogger
	life    *life.Life            // nil: a process
	place   atomic.Pointer[place] // never nil once the worker has been handed out

	verification verification // of states
	replicas     int          // ranks that keep each rank's Local pieces
	doing        doing
	entering     atomic.Uint64 // the newest generation that it was given
	stopPulse    func()

	reports      sync.WaitGroup
	reportCtx    context.Context // ends when the reports under way must
	stopReports  context.CancelFunc
	commit       uint64 // the last one begun; as the next
	committedGen uint64 // the last generation of which a commit has been reported; Run's goroutine alone uses it
	heeding      *heed  // of a Run after which the driver may still send SIGTERM
	late         bool   // it has been in no world yet, and Run enters the first
	last         bool   // no world follows, and of all ranks this one writes the last checkpoint; Run's goroutine alone uses it
	deserted     bool   // as the last commit found, all ranks were asked to leave and have no driver; Run's goroutine alone uses it
	outside      bool   // the world of place has been left, and no other entered; Run's goroutine alone uses it

	mu       sync.Mutex
	running  bool
	closed   bool
	over     bool // the driver knows that this worker has nothing more to do: done, removed or finished
	closeErr error
	closing  sync.Once
}

// place is a world, this worker's slot in it and its connections there.
type place struct {
	world rendezvous.World
	slot  plan.Slot
	group *collective.Group
	// unwatch ends the watch over the world for losses, and waits for that.
	unwatch func()
}

// leave ends the place's group, for a reason or in good order, and what watches over it.
func (p *place) leave(why error) error {
	if why != nil {
		p.group.Abort(why)
	}
	err := p.group.Close()
	p.unwatch()
	return err
}

// leaveAside is leave in the background, until the function that it returns has returned. Peers
// that do not say goodbye change nothing: the group is left.
func (p *place) leaveAside(why error) (left func()) {
	var leaving sync.WaitGroup
	leaving.Go(func() { _ = p.leave(why) })
	return leaving.Wait
}

// Init joins the job that started this process and blocks until there is a world with this worker
// in it, or ctx ends. With [Late] it leaves that to Run. A process that hvdrun did not start
// becomes a world of one, without sockets. Errors are ErrRemoved, ErrFinished, ctx's, and those of
// an environment or a driver that cannot be used. The caller closes the worker.
func Init(ctx context.Context, options ...InitOption) (*Worker, error) {
	late := slices.Contains(options, Late)
	lookup := os.LookupEnv
	if l := life.From(ctx); l != nil {
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
	w.replicas = env.CommitReplicas
	if late {
		w.stayOut(env.Slot.SlotID)
		return w, nil
	}
	return w.arrive(ctx)
}

// newWorker enters the first world of m, which it closes where that fails.
func newWorker(ctx context.Context, m meeting) (*Worker, error) {
	return newOutsider(ctx, m, rendezvous.Joins).arrive(ctx)
}

// newOutsider returns a worker of m that is in no world, in its first phase.
func newOutsider(ctx context.Context, m meeting, first rendezvous.Phase) *Worker {
	w := &Worker{meeting: m, log: logrus.StandardLogger(), life: life.From(ctx)}
	w.reportCtx, w.stopReports = context.WithCancel(context.Background())
	if d, ok := m.(*driven); ok {
		chosen := w.chosen
		d.chosen.Store(&chosen)
	}
	w.doing.enter(first)
	w.stopPulse = w.startPulse()
	w.appear()
	return w
}

// arrive enters the first world, and closes the worker where that fails.
func (w *Worker) arrive(ctx context.Context) (*Worker, error) {
	if err := w.enter(ctx, func() {}, rendezvous.Joining{}); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// enter joins the next world and, once left has returned, connects to it. Where the connections
// fail it joins again, as the peers do.
func (w *Worker) enter(ctx context.Context, left func(), j rendezvous.Joining) error {
	for {
		world, err := w.join(ctx, j)
		if err != nil {
			return err
		}
		left()
		p, err := w.connect(ctx, world)
		if err == nil {
			w.place.Store(p)
			w.doing.enter(rendezvous.Outside)
			w.outside = false
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.sayUnconnected(world, err)
		j.After, j.Cause = world.Generation, err.Error()
	}
}

// sayUnconnected logs why a world could not be entered: as a warning on the lowest rank that is not
// said to be dead, so that the log of the job has it once, and at debug level on the others.
func (w *Worker) sayUnconnected(world rendezvous.World, err error) {
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

// connect connects to a world that join returned. As soon as the driver knows of a rank there that
// is dead, it gives up, or the group is aborted: peers whose host was cut off say nothing
// themselves for a long time.
func (w *Worker) connect(ctx context.Context, world rendezvous.World) (*place, error) {
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
	return &place{world: world, slot: world.Slots[world.Rank], group: group, unwatch: unwatch}, nil
}

// awaitLoss blocks until the driver says that ranks of the generation are dead, or that it was
// given up; nil when ctx ends first.
func (w *Worker) awaitLoss(ctx context.Context, generation uint64) error {
	for {
		loss, more := w.meeting.loss()
		if loss.Generation == generation && generation != 0 {
			cause := errDriverKnows
			if len(loss.Ranks) == 0 {
				cause = errGivenUp
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
	stop := w.sayWaiting()
	world, err := w.meeting.join(ctx, j)
	stop()
	w.life.Survive()
	switch {
	case errors.Is(err, rendezvous.ErrRemoved):
		w.last = errors.Is(err, rendezvous.ErrLast)
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

// goAlone is join where all ranks were asked to leave and no driver is there to send them away.
// last tells whether this rank writes the last checkpoint.
func (w *Worker) goAlone(last bool) error {
	w.log.Warn("all workers were asked to leave and no driver is there: the job ends here")
	w.last = last
	w.setOver()
	return ErrRemoved
}

// sayWaiting logs that a new world is waited for, when it takes long, until the function it returns
// is called.
func (w *Worker) sayWaiting() (stop func()) {
	began, done := time.Now(), make(chan struct{})
	var saying sync.WaitGroup
	saying.Go(func() {
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
		saying.Wait()
	}
}

// committed tells the driver of the first commit in a generation, and beats tell of the others;
// training does not wait for it.
func (w *Worker) committed(commits uint64) {
	generation := w.Generation()
	w.reach(w.doing.phase(), true)
	w.doing.commits.Store(commits)
	if w.committedGen == generation {
		return
	}
	w.committedGen = generation
	w.reports.Go(func() {
		// It serves measurements only; a driver that does not hear of it decides nothing else.
		_ = w.meeting.report(w.reportCtx, rendezvous.Committed, generation, commits)
	})
}

// chosen tells the driver of a backend; training does not wait for it.
func (w *Worker) chosen(generation uint64, backend string) {
	r, known := rendezvous.Over(backend)
	w.mu.Lock()
	defer w.mu.Unlock()
	if known && !w.closed {
		// It is for the events alone.
		w.reports.Go(func() { _ = w.meeting.report(w.reportCtx, r, generation, 0) })
	}
}

// begin says that a Run begins, or why it cannot.
func (w *Worker) begin() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.closed:
		return errors.New("elastic: Run of a closed worker")
	case w.running:
		return errors.New("elastic: Run of a worker that runs already")
	case w.over:
		return errors.New("elastic: Run of a worker that is through with its job")
	}
	w.running = true
	return nil
}

func (w *Worker) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
}

func (w *Worker) isOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over
}

func (w *Worker) setOver() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
}

// Close leaves the job: it closes the connections so that peers still in the last operation can
// finish it, and, where no Run has brought training to its end, tells the driver that this worker
// leaves. It waits for all that the worker has started, and for the driver no longer than about two
// seconds. Closing again returns the same. Close must not be called during Run; end Run's context
// instead.
func (w *Worker) Close() error {
	w.closing.Do(func() { w.closeErr = w.close() })
	w.life.Survive()
	return w.closeErr
}

func (w *Worker) close() error {
	w.mu.Lock()
	w.closed = true
	over := w.over
	w.mu.Unlock()
	w.stopPulse()

	stop := time.AfterFunc(closeGrace, w.stopReports)
	defer stop.Stop()
	var err error
	if p := w.place.Load(); p != nil {
		if !over && !w.late {
			// Best effort: a driver that does not hear it sees the process end.
			_ = w.meeting.report(w.reportCtx, rendezvous.Leaving, p.world.Generation, 0)
		}
		if err = p.leave(nil); err != nil {
			err = fmt.Errorf("elastic: close: %w", err)
		}
	}
	w.reports.Wait()
	w.stopReports()
	w.heeding.leave()
	return errors.Join(err, w.meeting.close())
}

// Rank is this worker's place in the world, from 0; −1 where it has been in none, before the first
// Run of a Late one.
func (w *Worker) Rank() int { return w.place.Load().slot.Rank }

// Size is the number of workers in the world; 0 where it has been in none.
func (w *Worker) Size() int { return w.place.Load().world.Size() }

// LocalRank is this worker's place among those of its host, from 0.
func (w *Worker) LocalRank() int { return w.place.Load().slot.LocalRank }

// LocalSize is the number of workers on this worker's host.
func (w *Worker) LocalSize() int { return w.place.Load().slot.LocalSize }

// CrossRank is the place of this worker's host among those with a worker of the same local rank,
// from 0.
func (w *Worker) CrossRank() int { return w.place.Load().slot.CrossRank }

// CrossSize is the number of hosts with a worker of the same local rank.
func (w *Worker) CrossSize() int { return w.place.Load().slot.CrossSize }

// Slot is the index of this worker's slot on its host, from 0. It names the device and stays the
// same in every world.
func (w *Worker) Slot() int { return w.place.Load().slot.Index }

// Host is this worker's host by the name that discovery gave it; of a process that hvdrun did not
// start, the system's.
func (w *Worker) Host() string { return w.place.Load().slot.Host }

// Generation is the number of the world. It grows with every reset, not always by one.
func (w *Worker) Generation() uint64 { return w.place.Load().world.Generation }

// Group is the connected ranks of the world. Each reset makes another, so ask for it where it is
// used; the worker closes it.
func (w *Worker) Group() *collective.Group { return w.place.Load().group }
