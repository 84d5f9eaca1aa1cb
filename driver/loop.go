package driver

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/line/server"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// Run runs a job and blocks until it ends. It returns nil if the job succeeded; otherwise one of
// the errors of package job, wrapped, a *job.WorkerError, or the error that prevented the start.
// When ctx ends, Run stops the workers, with Timeouts.Drain between SIGTERM and SIGKILL, and
// returns the context's cause. No process and no goroutine of the job outlives Run.
func Run(ctx context.Context, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	if cfg.Output == nil {
		cfg.Output = &launch.Output{Stdout: os.Stdout, Stderr: os.Stderr}
		defer cfg.Output.Close()
	}
	return newLoop(cfg).guarded(ctx)
}

// guarded runs the job and ensures that its processes end if this process dies.
func (l *loop) guarded(ctx context.Context) error {
	if _, others := l.cfg.Launcher.(launch.Router); others {
		return l.serve(ctx) // agents guard the workers
	}
	guard, err := proc.StartGuard(plan.EnvRunID, l.cfg.RunID)
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	return errors.Join(l.serve(ctx), guard.Close())
}

// loop passes events to the machine and performs its actions. Other goroutines only post events;
// only the goroutine in run uses the machine. The fields are grouped by lifetime.
type loop struct {
	cfg    Config
	m      *decide.Machine
	clock  clock
	recent decide.Recent
	stalls *stalls
	locate *locator
	source sourceAge
	traces *tracer
	record
	services
	inbox
	crew
}

// record is what the job's next driver will find.
type record struct {
	writer  journalWriter
	outputs outputs
	job     decide.JobRecord
	resumes bool // the job had a previous driver
}

// services are set up by serve, before the first event.
type services struct {
	credentials *identity.Authority
	workers     *identity.Credentials // of all workers, without a worker's ticket
	meet        meeting
	push        pusher
	say         func(workers []string, ranks []uint32, text, tail []byte)
	stream      func(incarnation, protocol string, conn net.Conn) // see line/server.Config.Stream
	lines       *server.Server                                    // of workers that the launcher starts in this process; nil if the launcher is a launch.Teller
	door        string                                            // the address at which workers reach lines
	store       tcpstore.Store                                    // for programs that speak by their workers' sockets
}

// inboxRoom is how many events can be queued. A worker posts few at a time, and neither it nor the
// other workers of its host should wait while the loop writes to a slow disk.
const inboxRoom = 1 << 14

// inbox is open until run returns.
type inbox struct {
	events chan posted
	// stoppedBy is who gave the first stop command; nil: nobody.
	stoppedBy atomic.Pointer[audit.Who]
	asks      chan func()   // functions for the loop's goroutine
	batch     []posted      // reused for the inputs of a step
	ended     chan struct{} // closed when the loop takes no more events
}

// crew is the running workers and the goroutines that serve them.
type crew struct {
	keeper launch.Keeper       // the launcher, if it is a Keeper
	procs  map[string]*process // by incarnation
	wg     sync.WaitGroup      // goroutines that post events
	output sync.WaitGroup      // forwarding of the workers' output; awaited only at the job's end

	oneThread sync.Once // the log has said that workers get one OpenMP thread
}

// meeting and pusher are the parts of rendezvous.Server and notify.Pusher that the loop uses.
type (
	meeting interface {
		Publish(w plan.World, members []line.Member, root int, seq uint64)
		Dismiss(incarnation string, why error)
		Admit(worker identity.Subject)
		Hear(incarnation string, text []byte, noted func())
		Stream(ctx context.Context, incarnation, protocol string, conn net.Conn)
		Expel(incarnation string)
	}
	pusher interface {
		Push(workers []string, u notify.Update)
		PushLoss(workers []string, loss notify.Loss)
		Heard(worker string, seq uint64, loss notify.Known, again bool)
		Forget(incarnation string)
	}
)

// process is the loop's record of a worker that it has started.
type process struct {
	subject identity.Subject
	rank    atomic.Int64 // label of its output
	over    atomic.Bool  // its end was posted before its output was written
	stopped atomic.Bool  // it was asked to end
	stop    context.CancelFunc
	forget  func()    // stops waiting for its end
	hurry   func()    // ends its grace period
	more    wake.Flag // restarts its grace period
	look    wake.Flag // makes the launcher check whether a signal is ending it
}

// posted is an event for the loop.
type posted struct {
	input decide.Input
	noted func() // called when the event is in the journal; may be nil
	// answer receives the answer to a command, without blocking; nil if the event is not a command.
	answer chan<- decide.Answer
}

// tellSender informs the sender of an event that it need not repeat the event.
func (in posted) tellSender() {
	if in.noted != nil {
		in.noted()
	}
}

func newLoop(cfg Config) *loop {
	l := &loop{
		cfg:    cfg,
		clock:  newClock(time.Time{}),
		stalls: newStalls(cfg.Timeouts),
		locate: newLocator(),
		traces: newTracer(),
		inbox:  inbox{events: make(chan posted, inboxRoom), asks: make(chan func()), ended: make(chan struct{})},
		crew:   crew{procs: make(map[string]*process)},
	}
	l.keeper, _ = cfg.Launcher.(launch.Keeper)
	l.writer.log, l.writer.mirror, l.writer.meter, l.writer.asks = cfg.Log, cfg.Mirror, cfg.Meter, l.asks
	l.m = decide.New(decide.Config{Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}, l.writer.newID)
	return l
}

// open sets up the job's credentials and the journal.
func (l *loop) open() (err error) {
	if l.cfg.Authority == nil {
		l.cfg.Authority, err = NewAuthority(l.cfg.RunID)
	}
	if err == nil {
		l.credentials, err = identity.AuthorityOf(l.cfg.Authority)
	}
	if err == nil {
		l.workers, err = l.credentials.Issue(identity.Subject{RunID: l.cfg.RunID, Role: identity.Worker})
	}
	if err != nil || l.resumes {
		return err
	}
	begun := l.clock.now()
	l.m.Begin(begun)
	l.job = decide.JobRecord{
		Version: decide.JournalVersion, Begun: begun.UnixNano(), Size: l.cfg.Size, Blame: l.cfg.Blame,
		Timeouts: l.cfg.Timeouts,
	}
	if l.job.MasterPort, err = identity.FreePort(); err == nil && l.cfg.Journal != "" {
		err = l.writer.begin(l.cfg, l.job)
	}
	if err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	return nil
}

// network returns the network of the workers and of the driver. In tests the launcher may provide
// one.
func (l *loop) network() identity.Network {
	if own, ok := l.cfg.Launcher.(interface{ Network() identity.Network }); ok {
		return own.Network()
	}
	return identity.Network{}
}

// serve sets up the job's services and runs the loop.
func (l *loop) serve(ctx context.Context) error {
	if err := l.open(); err != nil {
		return err
	}
	defer l.closeJournal()
	if l.keeper != nil && l.cfg.Journal != "" {
		if err := l.outputs.open(l.cfg); err != nil {
			return err
		}
		defer func() { l.outputs.close(finished(l.m)) }()
	}
	side, cancel := context.WithCancel(context.WithoutCancel(ctx))
	closeDoor, err := l.openLines(side)
	if err != nil {
		cancel()
		return fmt.Errorf("driver: %w", err)
	}
	defer closeDoor()
	l.push = notify.NewPusher(notify.PusherConfig{
		Update:    func(workers []string, u notify.Update) { l.say(workers, nil, line.Updated(u), nil) },
		Loss:      func(workers []string, lost notify.Loss) { l.say(workers, nil, line.Lost(lost), nil) },
		Delivered: l.delivered(),
	})
	meet := rendezvous.NewServer(rendezvous.ServerConfig{
		Handler: l, Tell: l.say, DataKey: l.credentials.DataKey, Tasks: l.cfg.Tasks, Log: l.cfg.Log,
		Store: func(conn net.Conn) error { return tcpstore.Serve(conn, &l.store) },
	})
	l.meet = meet
	for id, slot := range l.m.Incarnations() { // the previous driver's
		meet.Admit(l.subjectOf(id, slot))
	}
	if widener, ok := l.cfg.Launcher.(launch.Widener); ok {
		widener.Widen(meet.Widen)
	}

	defer l.finishOutput()
	defer l.handTraces(true)
	defer l.wg.Wait()
	defer cancel()
	var known []plan.Host // to the previous driver; nil: the first driver
	if l.resumes {
		known = append([]plan.Host{}, l.m.Hosts()...)
	}
	l.wg.Go(func() { l.discover(side, known) })
	l.wg.Go(func() { l.watchStalls(side.Done()) })
	l.wg.Go(func() { l.locateStalled(side) })
	defer l.serveControl(side)()
	return l.run(ctx)
}

// openStreams sets the function that serves workers' connections of other protocols. They last
// until ctx ends, because bytes that a worker has sent may still arrive after its process has
// ended.
func (l *loop) openStreams(ctx context.Context) {
	l.stream = func(incarnation, protocol string, conn net.Conn) { l.meet.Stream(ctx, incarnation, protocol, conn) }
}

// openLines sets how lines are sent to workers: by the launcher if it is a launch.Teller, otherwise
// from this process.
func (l *loop) openLines(ctx context.Context) (closeDoor func(), err error) {
	l.openStreams(ctx)
	if teller, ok := l.cfg.Launcher.(launch.Teller); ok {
		l.say = teller.Tell
		return func() {}, nil
	}
	l.lines = server.New(server.Config{
		Up:     func(incarnation string, text []byte, _ string) { l.meet.Hear(incarnation, text, func() {}) },
		Stream: l.stream,
		Driver: func() bool { return true },
		Log:    l.cfg.Log,
	})
	l.say = l.lines.Tell
	own, err := l.credentials.Issue(identity.Subject{RunID: l.cfg.RunID, Role: identity.Agent, Host: "driver"})
	if err != nil {
		return nil, err
	}
	door, err := server.OpenDoor(l.lines, l.network(), identity.ListenLoopback(), own)
	if err != nil {
		return nil, err
	}
	l.door = door.Addr()
	return door.Close, nil
}

// discover posts the results of discovery until ctx ends. known are the hosts of the previous
// driver; nil: the first driver.
func (l *loop) discover(ctx context.Context, known []plan.Host) {
	poll := &discovery.Poll{
		Source:   l.cfg.Source,
		Interval: l.cfg.Timeouts.DiscoveryInterval, RemovalAfter: l.cfg.RemovalAfter, Known: known,
		Log: l.cfg.Log,
		Failed: func(err error, age time.Duration) {
			l.source.fails(age)
			l.post(decide.SourceStale{Cause: decide.Cause{Err: err}})
		},
		Stands: l.source.stands,
	}
	err := poll.Run(ctx, func(hosts []plan.Host) { l.post(decide.HostsFound{Hosts: slices.Clone(hosts)}) })
	if first, ok := errors.AsType[*discovery.FirstError](err); ok && ctx.Err() == nil {
		l.post(decide.SourceFailed{Cause: decide.Cause{Err: first.Err}})
	}
}

// run is the loop: only it waits for events and uses the machine.
func (l *loop) run(ctx context.Context) error {
	defer l.drop()
	defer close(l.ended)
	if l.cfg.Meter != nil {
		l.cfg.Meter.loop.Store(l)
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	interrupt := ctx.Done()
	if l.resumes {
		if l.keeper != nil {
			l.keeper.Adopt(slices.Collect(maps.Keys(l.m.Incarnations())), l.m.Term()+1, l.m.Last())
		}
		if end := l.feed([]posted{{input: decide.Resumed{}}}); end != nil {
			return end.Err
		}
		l.setTimer(timer)
	}
	l.noteAudit()
	for {
		var in posted
		select {
		case in = <-l.events:
			if interrupt != nil && ctx.Err() != nil { // the workers may have ended because of it
				interrupt = nil
				if end := l.admit([]posted{{input: decide.Interrupted{Cause: decide.Cause{Err: l.interruption(ctx)}}}}); end != nil {
					in.tellSender()
					return end.Err
				}
			}
			l.batch = gather(l.batch[:0], in, l.events)
			if end := l.admit(l.batch); end != nil {
				return end.Err
			}
			l.setTimer(timer)
			continue
		case <-l.writer.retry:
			l.writer.retry = nil
			l.tidy()
			continue
		case ask := <-l.asks:
			ask()
			continue
		case <-l.cfg.Audit.News():
			l.noteAudit()
			continue
		case e := <-l.cfg.TaskEvents:
			in.input = decide.TasksTold{TaskEvent: e}
		case <-timer.C:
			if len(l.events) > 0 {
				l.setTimer(timer) // pending events come first: the deadline may be waiting for one of them
				continue
			}
			in.input = decide.DeadlinePassed{}
		case <-interrupt:
			interrupt = nil
			in.input = decide.Interrupted{Cause: decide.Cause{Err: l.interruption(ctx)}}
		}
		if end := l.admit([]posted{in}); end != nil {
			return end.Err
		}
		l.setTimer(timer)
	}
}

const (
	// mostAtOnce bounds the inputs of a step, and so the time between two checks of the timer.
	mostAtOnce = 1024
	// crowded is the number of inputs at once that shows that many workers are about to post.
	crowded = 8
)

// gather appends in to batch, and then the events that have already been posted and can share a
// step with it: when a thousand workers join, the machine need not examine all of them a thousand
// times. If there are many events, gather first yields to workers that are about to post.
func gather(batch []posted, in posted, events <-chan posted) []posted {
	batch = append(batch, in)
	looked := 0 // length of the batch at the last yield
	for in.ofWorker() && len(batch) < mostAtOnce {
		select {
		case in = <-events:
			batch = append(batch, in) // the last one may be of another kind
			continue
		default:
		}
		if len(batch) < crowded || len(batch) == looked {
			return batch
		}
		looked = len(batch)
		runtime.Gosched()
	}
	return batch
}

// ofWorker reports whether the input is of a kind that every worker sends for itself.
func (in posted) ofWorker() bool {
	switch in.input.(type) {
	case decide.WorkerForked, decide.WorkerJoined, decide.WorkerReported, decide.WorkerWrites, decide.WorkerEnded,
		decide.BackendTold, decide.WorkerMoved, decide.WorkerFailing:
		return true
	}
	return false
}

// admit feeds inputs to the machine.
func (l *loop) admit(batch []posted) *decide.FinishJob {
	l.noteAudit() // audit records from before the inputs come before the events that these cause
	return l.feed(batch)
}

// setTimer sets the timer to the machine's next deadline.
func (l *loop) setTimer(timer *time.Timer) {
	if at, ok := l.m.Deadline(); ok {
		timer.Reset(at.Sub(l.clock.now()))
	} else {
		timer.Stop()
	}
}

// feed steps the machine, records the inputs, and performs the actions. It returns the FinishJob
// action, if any. If one of the inputs is a command, it is the last one.
func (l *loop) feed(batch []posted) *decide.FinishJob {
	if len(batch) == 0 {
		return nil
	}
	now := l.clock.now()
	inputs := make([]decide.Input, len(batch))
	for i, in := range batch {
		inputs[i] = in.input
	}
	actions := l.m.Step(now, inputs...)
	l.traces.step(now, l.clock.now(), inputs, actions)
	if l.writer.note(now, inputs, actions) && l.keeper != nil {
		l.keeper.Noted(now)
	}
	for _, in := range batch {
		in.tellSender()
		if e, ok := in.input.(decide.WorkerEnded); ok && l.keeper != nil {
			l.keeper.Settle(e.ID)
			l.outputs.note(outputNote{Worker: e.ID, Ended: true})
		}
	}
	for _, a := range actions {
		switch a := a.(type) {
		case decide.FinishJob:
			l.logGoodput(now)
			return &a
		case decide.Answer:
			if a.Refused == nil {
				l.cfg.Log.Info("command: " + a.Done)
			}
			batch[len(batch)-1].answer <- a
		default:
			l.perform(a)
		}
	}
	for _, in := range inputs {
		if e, ok := in.(decide.WorkerEnded); ok {
			l.push.Forget(e.ID)
			l.stalls.forget(e.ID)
			delete(l.procs, e.ID)
			l.meet.Expel(e.ID)
		}
	}
	l.tidy()
	return nil
}

func (l *loop) perform(a decide.Action) {
	switch a := a.(type) {
	case decide.StartWorker:
		l.start(a)
	case decide.StopWorker:
		p := l.procs[a.ID]
		p.stopped.Store(true)
		if a.Now {
			p.hurry()
		}
		p.stop()
	case decide.GiveTime:
		if p := l.procs[a.ID]; p != nil {
			p.more.Set()
		}
	case decide.LookAt:
		if p := l.procs[a.ID]; p != nil {
			p.look.Set()
		}
	case decide.WatchDone:
		l.stalls.watchDone(l.clock.now(), a.Generation)
	case decide.ForgetWorker:
		l.push.Forget(a.ID)
		l.stalls.forget(a.ID)
		if p := l.procs[a.ID]; p != nil {
			p.forget()
		}
	case decide.PublishWorld:
		l.publish(a)
	case decide.DismissWorker:
		l.meet.Dismiss(a.ID, dismissals[a.Why])
	case decide.NotifyWorkers:
		l.push.Push(ids(a.Members), notify.Update{Seq: a.Seq, Change: a.Change, Generation: a.Generation})
	case decide.TellLoss:
		l.push.PushLoss(ids(a.Members), notify.Loss{Generation: a.Generation, Ranks: a.Ranks})
	case decide.EmitEvent:
		l.recent.Add(a.Event)
		l.cfg.Events(a.Event)
	case decide.LogLine:
		l.log(a)
	case decide.Remind:
		l.remind(a)
	default:
		panic(fmt.Sprintf("driver: unknown action %T", a))
	}
}

// dismissals are the errors that answer a dismissed worker's join.
var dismissals = map[decide.Dismissal]error{
	decide.DismissRemoved:  line.ErrRemoved,
	decide.DismissLast:     line.ErrLast,
	decide.DismissFinished: line.ErrFinished,
}

// ids returns the workers' incarnations.
func ids(workers []*decide.Worker) []string {
	names := make([]string, len(workers))
	for i, w := range workers {
		names[i] = w.ID()
	}
	return names
}

// finished reports whether the machine's job has ended.
func finished(m *decide.Machine) bool {
	is, _ := m.Finished()
	return is
}

func (l *loop) log(a decide.LogLine) {
	switch a.Level {
	case decide.Debug:
		l.cfg.Log.Debug(a.Text)
	case decide.Info:
		l.cfg.Log.Info(a.Text)
	default:
		l.cfg.Log.Warn(a.Text)
	}
}

// logGoodput writes the last line of the job's log.
func (l *loop) logGoodput(now time.Time) {
	if l.m.Measured() {
		g := l.m.Goodput(now)
		l.cfg.Log.WithField("goodput", math.Round(1e4*g.Of(job.PartTraining)/max(g.Seconds, 1e-9))/1e4).Info(g)
	}
}

func (l *loop) publish(a decide.PublishWorld) {
	members := make([]line.Member, len(a.Members))
	for r, w := range a.Members {
		if p := l.procs[w.ID()]; p != nil { // nil if it ended under the previous driver
			p.rank.Store(int64(r))
		}
		members[r] = line.Member{Incarnation: w.ID(), DataAddrs: w.DataAddrs(), Handle: w.Handle()}
	}
	l.stalls.enter(l.clock.now(), a.World.Generation, ids(a.Members))
	l.store.NextWorld()
	l.meet.Publish(a.World, members, a.Root, a.Seq)
}

// finishOutput waits until the workers' output is written or can no longer be written.
func (l *loop) finishOutput() {
	done := make(chan struct{})
	go func() {
		l.output.Wait()
		close(done)
	}()
	l.cfg.Output.Finish(done)
}

// subjectOf returns the identity of a worker.
func (l *loop) subjectOf(incarnation string, slot plan.SlotID) identity.Subject {
	return identity.Subject{RunID: l.cfg.RunID, Role: identity.Worker, Host: slot.Host, Index: slot.Index, Incarnation: incarnation}
}

// ask calls f on the loop's goroutine, between two events, and blocks until f has returned. It
// returns errEnded after the loop's end, and the cause of ctx if that ends first.
func (l *loop) ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case l.asks <- func() { f(); close(done) }:
		<-done
		return nil
	case <-l.ended:
		return errEnded
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// post sends an event to the loop. After the loop's end it drops the event.
func (b *inbox) post(in decide.Input) { b.send(posted{input: in}) }

// send is like post, with all fields of an event. It returns false after the loop's end.
func (b *inbox) send(in posted) bool {
	select {
	case b.events <- in:
		return true
	case <-b.ended:
		return false
	}
}

// postThen is like post, and calls noted when the event is in the journal, so that its sender need
// not repeat it to another driver, or after the loop's end.
func (b *inbox) postThen(in decide.Input, noted func()) {
	if !b.send(posted{input: in, noted: noted}) {
		noted()
		return
	}
	select {
	case <-b.ended:
		b.drop()
	default:
	}
}

// drop drops the queued events after the loop's end.
func (b *inbox) drop() {
	for {
		select {
		case in := <-b.events:
			in.tellSender()
		default:
			return
		}
	}
}

// postNoted is like post, but blocks until the event is in the journal or the loop has ended.
func (b *inbox) postNoted(in decide.Input) {
	noted := make(chan struct{})
	b.postThen(in, func() { close(noted) })
	select {
	case <-noted:
	case <-b.ended:
	}
}

// Joined is called by the rendezvous when a worker joins.
func (l *loop) Joined(from identity.Subject, j line.Joining) {
	l.post(decide.WorkerJoined{ID: from.Incarnation, Join: decide.Join{
		After: j.After, Commits: j.Commits, HoldsState: j.HoldsState, DataAddrs: j.DataAddrs, Cause: j.Cause, Trained: j.Trained,
		Lost: j.Lost, Undone: j.Undone, Handle: []byte(j.Handle), Program: j.Program,
	}})
}

// Reported is called by the rendezvous with a worker's report.
func (l *loop) Reported(from identity.Subject, r line.Report, generation, commits uint64, noted func()) {
	l.postThen(decide.WorkerReported{
		ID: from.Incarnation, Report: decide.Report(r), Generation: generation, Commits: commits,
	}, noted)
}

// BackendReported is called by the rendezvous with the collective backend of a world's GPUs.
func (l *loop) BackendReported(from identity.Subject, generation uint64, backend string, noted func()) {
	l.postThen(decide.BackendTold{ID: from.Incarnation, Generation: generation, Backend: backend}, noted)
}

// FailureReported is called by the rendezvous with a program's report of the error that ends it.
func (l *loop) FailureReported(from identity.Subject, text string, noted func()) {
	l.postThen(decide.WorkerFailing{ID: from.Incarnation, Said: text}, noted)
}

// Heard is called by the rendezvous when a worker acknowledges an update or a loss.
func (l *loop) Heard(from identity.Subject, h line.Heard) {
	l.push.Heard(from.Incarnation, h.Seq, notify.Known{Generation: h.LostGeneration, Ranks: h.LostRanks}, h.Again)
}

// Beaten is called by the rendezvous with a worker's heartbeat. The machine gets an input only if
// the worker's last checkpoint grows or a world begins to train; stalls evaluates the rest.
func (l *loop) Beaten(from identity.Subject, b line.Beat) {
	now := l.clock.now()
	if len(b.Entered) > 0 {
		l.traces.beat(now, from.Incarnation, &b)
	}
	if l.stalls.hear(now, from.Incarnation, b) {
		l.post(decide.WorkerWrites{ID: from.Incarnation})
	}
	if l.stalls.begins(from.Incarnation, b) {
		l.post(decide.WorldTrains{Generation: b.Generation})
	}
}

// interruption returns why the job is to end, including the user who gave the command.
func (l *loop) interruption(ctx context.Context) error {
	cause, by := context.Cause(ctx), l.stoppedBy.Load()
	if command, is := errors.AsType[job.StopCommand](cause); is && by != nil {
		command.UID = by.UID
		return command
	}
	return cause
}

// NewRunID returns a random Config.RunID, for callers that need it before Run.
func NewRunID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the program if there is no randomness
	return hex.EncodeToString(b[:])
}
