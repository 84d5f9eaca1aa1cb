package elastic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

var (
	errReportedLost = errors.New("reported by the driver")
	errAbandoned    = errors.New("the driver has abandoned this world: its workers waited for each other for too long (--stall-timeout), or some have left it")
)

// patience is how long to wait for a new world before the wait is logged, and the pauses until it
// is logged again.
var patience = retry.Backoff{First: 5 * time.Second}

// freeAttempts is the number of consecutive worlds that a worker may fail to enter before it pauses
// between attempts.
const freeAttempts = 3

var joinBackoff = retry.Backoff{First: 50 * time.Millisecond, Most: time.Second}

// Init joins the job that started this process and blocks until there is a world that includes this
// worker, or ctx ends. If the job already has a world, which trains without this worker, Init
// returns without joining, so that the program can load data and build its model while the others
// train. [Run] then enters the first world. Before that, while the others still train, it fetches
// the tensors of more than 16 KiB of their newest commit, so that the sync sends only later
// changes. Until then Rank, Size, LocalRank and so on return the values of the environment: those
// of the trial assignment for which the process was started, from which the world can differ. Group
// enters the world if it is called before Run. Run must be called within ten minutes of Init.
//
// In a process that hvdrun did not start, the worker is alone in a world of size one, without
// sockets. Init returns ErrRemoved, ErrFinished, ctx's error, or an error for an invalid
// environment, an unreachable driver, or a second worker in this process. The caller must close the
// worker.
//
// Init removes the worker's credentials, HVD_CREDENTIALS, from the environment: processes that the
// program starts afterwards cannot take part in the job.
func Init(ctx context.Context, options ...InitOption) (*Worker, error) {
	own, network, inherited := plan.OwnWorker, identity.Network{}, line.InheritedSocket
	if l := fakeproc.From(ctx); l != nil {
		own = func() (plan.Worker, bool, error) { return plan.WorkerFromEnv(l.Lookup) }
		network, inherited = l.Network, func(string) net.Conn { return l.Line }
	}
	env, started, err := own()
	if err != nil {
		return nil, fmt.Errorf("elastic: environment: %w", err)
	}
	var m meeting = solo{}
	if started {
		if w := initialized.Load(); w != nil && fakeproc.From(ctx) == nil && !w.isClosed() {
			return nil, errors.New("elastic: Init was called before in this process: a process is one worker")
		}
		d, err := newDriven(env, network, inherited(env.Incarnation))
		if err != nil {
			return nil, err
		}
		if fakeproc.From(ctx) == nil {
			d.pid = os.Getpid()
		}
		m = d
	}
	w := newWorker(ctx, m)
	w.driven, w.job = started, env.RunID
	if started && w.fake == nil {
		initialized.Store(w)
	}
	w.verification = verification{every: env.VerifyState, heal: env.HealState}
	w.replicas, w.shared = env.CommitReplicas, env.ShareOutput
	if d, ok := m.(*driven); ok && d.trains(ctx) {
		w.stayOut(env)
		return w, nil
	}
	if err := w.enterFirst(ctx, func() {}); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// initialized is the worker of this process; nil before Init.
var initialized atomic.Pointer[Worker]

// newWorker returns a worker with the meeting m that is in no world.
func newWorker(ctx context.Context, m meeting) *Worker {
	w := &Worker{meeting: m, log: ownLog(), fake: fakeproc.From(ctx)}
	safefile.TellLacks(func(text string) { w.log.Warn(text) })
	w.reports.ctx, w.reports.stop = context.WithCancel(context.Background())
	if d, ok := m.(*driven); ok {
		chosen := func(generation uint64, backend string) { w.chosen(d, generation, backend) }
		d.chosen.Store(&chosen)
	}
	w.first.placed, w.first.place = context.WithCancel(context.Background())
	w.doing.enter(line.Outside)
	w.reports.stopPulse = w.startPulse()
	w.appear()
	return w
}

// enter joins the next world, calls left, and connects. left waits until the previous world has
// been left. If connecting fails, enter joins again, as the peers do.
func (w *Worker) enter(ctx context.Context, left func(), j line.Joining) error {
	for attempt := 1; ; attempt++ {
		world, err := w.join(ctx, j)
		if err != nil {
			return err
		}
		left()
		w.first.place()
		p, err := w.connect(ctx, world)
		if err == nil {
			w.member.Store(p)
			w.doing.enter(line.Outside)
			w.run.outside = false
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.logUnconnected(world, err)
		j.After, j.Cause, j.Trained, j.Lost = world.Generation, err.Error(), new(false), lostBy(err)
		if err := pauseBefore(ctx, attempt); err != nil {
			return err
		}
	}
}

// pauseBefore waits before the next attempt, given the number of consecutive worlds to which this
// worker could not connect. It does not wait at first, when peers have died, and waits longer and
// longer if the network seems to be at fault.
func pauseBefore(ctx context.Context, failed int) error {
	if failed < freeAttempts {
		return ctx.Err()
	}
	_ = retry.Pause(ctx, joinBackoff.After(failed-freeAttempts+1))
	return ctx.Err()
}

// lostBy returns the ranks that an error reports as lost.
func lostBy(err error) []int {
	if aborted, is := errors.AsType[*collective.AbortedError](err); is {
		return aborted.Dead
	}
	return nil
}

func (w *Worker) join(ctx context.Context, j line.Joining) (line.World, error) {
	w.doing.enter(line.Joins)
	stop := w.logWaiting()
	world, err := w.meeting.join(ctx, j)
	stop()
	w.fake.Survive()
	switch {
	case errors.Is(err, line.ErrRemoved):
		w.run.last = errors.Is(err, line.ErrLast)
		w.use.over.Store(true)
		return world, ErrRemoved
	case errors.Is(err, line.ErrFinished):
		w.use.over.Store(true)
		return world, ErrFinished
	case ctx.Err() != nil:
		return world, ctx.Err()
	case err != nil:
		return world, fmt.Errorf("elastic: join: %w", err)
	case world.Rank < 0 || world.Rank >= world.Size() || world.SyncRoot < 0 || world.SyncRoot >= world.Size():
		return world, fmt.Errorf("elastic: join: a world of %d workers has no rank %d or no root %d", world.Size(), world.Rank, world.SyncRoot)
	}
	return world, nil
}

// logWaiting logs long waits for a new world until stop is called.
func (w *Worker) logWaiting() (stop func()) {
	began := time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	var logging sync.WaitGroup
	logging.Go(func() {
		for said := 1; retry.Pause(ctx, patience.After(said)-time.Since(began)) == nil; said++ {
			w.log.Warnf("waiting for a new world since %v", time.Since(began).Round(time.Second))
		}
	})
	return func() {
		cancel()
		logging.Wait()
	}
}

// logUnconnected logs why a world could not be entered: as a warning on the lowest rank that is not
// reported dead, so that the warning appears once in the job's log, and at debug level on the
// others.
func (w *Worker) logUnconnected(world line.World, err error) {
	level, speaker := logrus.DebugLevel, 0
	for dead := lostBy(err); slices.Contains(dead, speaker); {
		speaker++
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
func (w *Worker) connect(ctx context.Context, world line.World) (*membership, error) {
	w.doing.commits.Store(0)
	w.entering.Store(world.Generation)
	w.doing.enter(line.Connecting)
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

// awaitLoss blocks until the driver reports dead ranks of the generation or abandons it. It returns
// nil if ctx ends first.
func (w *Worker) awaitLoss(ctx context.Context, generation uint64) error {
	for {
		loss, more := w.meeting.Loss()
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

// membership is a world, this worker's slot in it and its connections.
type membership struct {
	world line.World
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

// leaveAsync calls leave in the background and returns a function that waits for it. It ignores
// errors, because the group is not used again.
func (p *membership) leaveAsync(why error) (left func()) {
	var leaving sync.WaitGroup
	leaving.Go(func() { _ = p.leave(why) })
	return leaving.Wait
}

// meeting brings a worker into worlds: into those of a driver, or into a world of one worker. Its
// methods are called by one goroutine at a time, except Report, Connected, Latest and Loss.
type meeting interface {
	// join blocks until a world newer than j.After includes this worker. The meeting sets the
	// addresses of j. It returns line.ErrRemoved or ErrFinished if no such world follows.
	join(ctx context.Context, j line.Joining) (line.World, error)
	// connect connects to the ranks of a world that join returned. The caller closes the group.
	connect(ctx context.Context, w line.World) (*collective.Group, error)
	// Report sends the driver a report about this worker.
	Report(ctx context.Context, r line.Report, generation, commits uint64) error
	// Connected reports whether the driver is connected. It blocks for at most a second.
	Connected(ctx context.Context) bool
	// Latest returns the newest notification; it does not block.
	Latest() notify.Update
	// Loss returns the ranks that the driver reports as lost, and a channel that is closed at its
	// next report. It does not block.
	Loss() (notify.Loss, <-chan struct{})
	// close ends everything that the meeting has started and waits for it.
	close() error
}

// solo is the meeting of a worker without a driver: every world has one rank.
type solo struct{}

func (solo) join(ctx context.Context, j line.Joining) (line.World, error) {
	if err := ctx.Err(); err != nil {
		return line.World{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	slot := plan.Slot{SlotID: plan.SlotID{Host: host}, LocalSize: 1, CrossSize: 1}
	return line.World{World: plan.World{Generation: j.After + 1, Slots: []plan.Slot{slot}}}, nil
}

func (solo) connect(context.Context, line.World) (*collective.Group, error) {
	return collective.Local(1)[0], nil
}

func (solo) Report(context.Context, line.Report, uint64, uint64) error { return nil }
func (solo) Connected(context.Context) bool                            { return true }
func (solo) Latest() notify.Update                                     { return notify.Update{} }
func (solo) Loss() (notify.Loss, <-chan struct{})                      { return notify.Loss{}, nil }
func (solo) close() error                                              { return nil }

// driven is the meeting of a worker that a driver has started.
type driven struct {
	*line.Client
	endpoint *collective.Endpoint
	timeline *timeline.Recorder // nil: no timeline is recorded
	warning  time.Duration      // see beater.stallWarning
	pid      int                // of the process that is this worker alone; 0: it has several

	chosen atomic.Pointer[func(generation uint64, backend string)] // nil: no callback
	supply atomic.Pointer[transfer.Supply]                         // nil: nothing to supply
}

// newDriven opens the worker's line to its launcher, and a listener for its peers. join sends the
// listener's addresses to the driver. socket is as in line.ClientConfig.
func newDriven(env plan.Worker, network identity.Network, socket net.Conn) (_ *driven, err error) {
	algorithm, err := collective.ParseAlgorithm(env.Algorithm)
	if err != nil {
		return nil, fmt.Errorf("elastic: %s: %w", plan.EnvAlgorithm, err)
	}
	ports, err := identity.ParsePorts(env.PortRange)
	if err != nil {
		return nil, fmt.Errorf("elastic: %s: %w", plan.EnvPortRange, err)
	}
	identity.UsePorts(ports)
	d := &driven{warning: env.StallWarning}
	d.Client, err = line.NewClient(line.ClientConfig{
		Worker: env, Widen: func() ([]string, error) { return d.endpoint.Widen() }, Socket: socket,
	})
	if err != nil {
		return nil, fmt.Errorf("elastic: %w", err)
	}
	dataAddr, err := dataListenAddr(env.Listen, d.Local)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("elastic: %s=%s: %w", plan.EnvListen, env.Listen, err), d.Client.Close())
	}
	data := collective.Config{
		Credentials: d.Credentials,
		ListenAddr:  dataAddr,
		Interfaces:  env.NetworkInterfaces,
		Encrypt:     env.EncryptData,
		Algorithm:   algorithm,
		OnlySockets: env.OnlySockets,
		Connections: env.Connections,
		Log:         ownLog(),
		Visited:     d.visited,
		Network:     network,
		Backend: func(generation uint64, backend string) {
			if chosen := d.chosen.Load(); chosen != nil {
				(*chosen)(generation, backend)
			}
		},

		FusionThreshold: env.FusionThreshold << 20,
		CycleTime:       env.CycleTime,
		StallWarning:    env.StallWarning,
	}
	if env.TimelineFilename != "" {
		d.timeline = timeline.New(timeline.Config{
			Filename: env.TimelineFilename, RunID: env.RunID, Shared: env.ShareOutput, Log: ownLog(),
		})
		data.Timeline = d.timeline
	}
	if d.endpoint, err = collective.Listen(data); err != nil {
		return nil, errors.Join(fmt.Errorf("elastic: %w", err), d.Client.Close())
	}
	return d, nil
}

// dataListenAddr returns the address on which to listen for peers. It is the one that the user asks
// for. Otherwise it is a loopback address if the driver's side is one, because the driver asks for
// other addresses if there are other machines. Empty: all addresses, or those of the interfaces.
func dataListenAddr(asked string, local netip.Addr) (string, error) {
	if asked == "" {
		if local.IsLoopback() {
			return netip.AddrPortFrom(local, 0).String(), nil
		}
		return "", nil
	}
	own, err := identity.OwnAddr(asked)
	if err != nil || own.IsUnspecified() {
		return "", err
	}
	return netip.AddrPortFrom(own, 0).String(), nil
}

func (d *driven) join(ctx context.Context, j line.Joining) (line.World, error) {
	j.DataAddrs = d.endpoint.Addrs()
	place, err := d.Join(ctx, j)
	if err != nil {
		return line.World{}, err
	}
	return place.World()
}

func (d *driven) connect(ctx context.Context, w line.World) (*collective.Group, error) {
	g, err := d.endpoint.Connect(ctx, collective.Peers{Generation: w.Generation, Key: w.Key, Rank: w.Rank, Addrs: w.DataAddrs(), Hosts: hostsOf(w.World)})
	if err != nil || d.timeline == nil {
		return g, err
	}
	if err := d.timeline.Enter(ctx, g); err != nil {
		g.Abort(err)
		return nil, err
	}
	return g, nil
}

func (d *driven) connections() uint64 { return d.endpoint.Connections() }

func (d *driven) operations() []collective.Operations { return d.endpoint.Operations() }

func (d *driven) stallWarning() time.Duration { return d.warning }

func (d *driven) usage() *proc.Usage {
	if d.pid == 0 {
		return nil
	}
	return new(proc.UsageOf(d.pid))
}

func (d *driven) close() error {
	if d.timeline != nil {
		_ = d.timeline.Close() // always nil: it logs write errors itself
	}
	return errors.Join(d.endpoint.Close(), d.Client.Close())
}

func hostsOf(w plan.World) []string {
	hosts := make([]string, len(w.Slots))
	for i, s := range w.Slots {
		hosts[i] = s.Host
	}
	return hosts
}
