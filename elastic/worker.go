package elastic

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/internal/line"
)

// ErrRemoved is returned by Init and Run if this worker has no place in the new world. The process
// should exit with status 0.
var ErrRemoved = errors.New("elastic: this worker has no place in the new world")

// ErrFinished is returned by Init and Run if the job was done before this worker had finished its
// training, because it joined late. Its state is not the job's final state. The process should exit
// with status 0.
var ErrFinished = errors.New("elastic: the job was done before this worker's training")

// closeGrace bounds the time of the reports that Close makes to the driver.
const closeGrace = 2 * time.Second

// Worker is this process's membership in the job. Its methods may be called concurrently. They
// describe the world that Run entered last. Before the first Run they describe the world of Init
// or, if Init has not entered one, the trial assignment for which the process was started.
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

	reports reports
	first   firstWorld
	run     runState
	use     use
}

// reports are the worker's background reports to the driver.
type reports struct {
	sync.WaitGroup
	ctx       context.Context // canceled when reports must end
	stop      context.CancelFunc
	stopPulse func()
	committed uint64 // last generation with a reported commit; used by Run's goroutine only
}

// runState is used by Run's goroutine only.
type runState struct {
	sound    time.Time     // start of the training that can be undone: the last commit, or the start of training in the world
	undone   time.Duration // training time that an abort has undone in the world that is being left
	commit   uint64        // number of the last commit begun
	term     *termHandler  // handler of a Run that ended while the driver may still send SIGTERM
	last     bool          // no world follows, and this rank writes the last checkpoint
	deserted bool          // at the last commit all ranks were asked to leave and had no driver
	outside  bool          // the world of member has been left and no other entered
}

// use tracks the lifecycle of a worker.
type use struct {
	mu       sync.Mutex
	running  bool
	closed   bool
	over     atomic.Bool // the driver expects nothing more from this worker: it is done, removed or finished
	closing  sync.Once
	closeErr error    // result of closing
	closers  []func() // called by Close at its end
}

// endWithoutDriver ends the job on this rank if all ranks were asked to leave and the driver is
// unreachable. last means that this rank writes the last checkpoint.
func (w *Worker) endWithoutDriver(last bool) error {
	w.log.Warn("all workers were asked to leave and the driver is unreachable: the job ends")
	w.run.last = last
	w.use.over.Store(true)
	return ErrRemoved
}

// committed reports the first commit of a generation to the driver, without blocking. Beats report
// the following ones.
func (w *Worker) committed(commits uint64) {
	generation := w.Generation()
	w.run.sound = time.Now()
	w.reach(w.doing.phase(), true)
	w.doing.commits.Store(commits)
	if w.reports.committed == generation {
		return
	}
	w.reports.committed = generation
	w.reports.Go(func() {
		// Ignored on failure: the report is used for measurements only.
		_ = w.meeting.Report(w.reports.ctx, line.Committed, generation, commits)
	})
}

// beginTraining records that training begins or continues in the world.
func (w *Worker) beginTraining() {
	w.run.sound = time.Now()
	w.doing.enter(line.Training)
	if w.Rank() == 0 {
		w.doing.hasNews() // until it knows, the driver counts the time as synchronisation
	}
}

// chosen reports the chosen backend to the driver without blocking.
func (w *Worker) chosen(d *driven, generation uint64, backend string) {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	if !w.use.closed {
		// Ignored on failure: the report is used for the events file only.
		w.reports.Go(func() { _ = d.ReportBackend(w.reports.ctx, generation, backend) })
	}
}

// begin marks the start of a Run, or returns why it cannot start.
func (w *Worker) begin() error {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	switch {
	case w.use.closed:
		return errors.New("elastic: Run was called after the worker was closed")
	case w.use.running:
		return errors.New("elastic: Run was called while another Run of the worker runs")
	case w.use.over.Load():
		return errors.New("elastic: Run was called after the worker's job had ended")
	}
	w.use.running = true
	return nil
}

func (w *Worker) end() {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	w.use.running = false
}

func (w *Worker) isClosed() bool {
	w.use.mu.Lock()
	defer w.use.mu.Unlock()
	return w.use.closed
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
	w.use.mu.Unlock()
	w.reports.stopPulse()
	w.prepared()

	stop := time.AfterFunc(closeGrace, w.reports.stop)
	defer stop.Stop()
	var err error
	if p := w.member.Load(); p != nil {
		if !w.use.over.Load() && p.group != nil {
			// Ignored on failure: the driver notices the end of the process.
			_ = w.meeting.Report(w.reports.ctx, line.Leaving, p.world.Generation, 0)
		}
		if err = p.leave(nil); err != nil {
			err = fmt.Errorf("elastic: close: %w", err)
		}
	}
	w.reports.Wait()
	w.reports.stop()
	w.run.term.leave()
	for _, f := range w.use.closers {
		f()
	}
	return errors.Join(err, w.meeting.close())
}

// Rank returns this worker's rank in the world, from 0.
func (w *Worker) Rank() int { return w.member.Load().slot.Rank }

// Size returns the number of workers in the world.
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

// Addresses returns the addresses, as host:port, on which a rank of the world listens for the
// others, in order of preference: addresses of its machine that others may be able to reach. It
// returns nil without a driver. Each call allocates. It panics if the world has no such rank.
func (w *Worker) Addresses(rank int) []string {
	if !w.driven || w.group() == nil {
		return nil
	}
	return w.member.Load().world.DataAddrs()[rank]
}

// Generation returns the number of the world. It increases with every reset, by one or more. It is
// 0 before the first world.
func (w *Worker) Generation() uint64 { return w.member.Load().world.Generation }

// Group returns the connected ranks of the world. Every reset replaces the group, so callers must
// not store it; the worker closes it. If Init has left the entry into the world to Run, a call of
// Group before Run enters the world and blocks as Init would. If that fails, the operations of the
// group fail with the error. They also fail while Run calls train in no world: see [Steps.Step].
func (w *Worker) Group() *collective.Group {
	if none := w.first.none.Load(); none != nil {
		return none
	}
	if g := w.group(); g != nil {
		return g
	}
	return w.firstGroup()
}

// group returns the connected ranks of the world; nil before the first world.
func (w *Worker) group() *collective.Group { return w.member.Load().group }
