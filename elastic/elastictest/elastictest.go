// Package elastictest runs a whole elastic job in one process, so that a training loop can be
// tested under failure by go test.
//
// The driver, the rendezvous, the notifications and the connections between ranks are the real
// ones. Hosts are names, and workers are goroutines: each executes a function which begins with
// [elastic.Init], as the main function of a program does. A test adds, drains and removes hosts,
// kills workers at moments that it names, and waits for what comes of it; it never has to sleep.
//
// A worker that is killed says no more to anybody: its connections end as those of a process do
// that gets SIGKILL, and when its goroutine, or another of its own, is in package elastic or
// collective or comes there the next time, it ends, as by [runtime.Goexit]. Its context ends too.
// Only what the function does by itself in between is more than a process would do.
package elastictest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// Config says what job to run. Worker and Hosts are needed.
type Config struct {
	// Worker is what every worker executes, on a goroutine of its own; the contexts of elastic.Init
	// and elastic.Run must come from its own. It ends as a program would: nil, elastic.ErrRemoved
	// and elastic.ErrFinished are exit status 0, any other error is a failure. Variables that must
	// not be shared between workers are declared in it.
	Worker func(ctx context.Context) error
	// Hosts are those that there are when the job begins.
	Hosts []plan.Host

	// Deaths are moments at which a worker is killed: each once in the life of the job, whoever has
	// the rank then. A Generation of 0 and a Slot without a host stand for any.
	Deaths []Moment
	// At is called whenever a worker has come to another moment, on that worker's goroutine, which
	// waits for it; true kills the worker there. Workers call it at the same time. Nil: nobody
	// asks.
	At func(Moment) bool

	// Limit is when the job is stopped, because it hangs. 0: a minute.
	Limit time.Duration
	// Driver is what else there is to say: Size, Blame, Timeouts, VerifyState, Log and so on.
	// Command, Source, Launcher and Output are the job's own. Where Size is zero, the job is
	// elastic, begins with all slots of Hosts, and goes on with one worker. Where Blame is zero,
	// the slot of a worker that was killed rests for 10 ms, and at most a second. Where Log is nil,
	// nothing is logged.
	Driver driver.Config
}

// Job is one that runs. Its methods may be called by many goroutines.
type Job struct {
	cfg    Config
	source source
	stop   context.CancelCauseFunc
	done   chan struct{}
	err    error // once done is closed
	idle   bool  // so: it ended because it was stopped, and all was well

	workers sync.WaitGroup

	mu       sync.Mutex
	deaths   []Moment // to come
	procs    map[int]*process
	status   Status
	ranks    []int // of the newest world: the processes
	latest   uint64
	failures []error
	changed  chan struct{} // closed, and made anew, when the status changes
}

// Status is how a job is doing.
type Status struct {
	// World is the newest one; zero before the first. Its slots are in the order of their ranks; of
	// their fields only Host, Index and Rank are set.
	World plan.World
	// Lost is how many workers of that world are over.
	Lost int
	// Commits is how many commits that world has made.
	Commits int
	// LastCommit is the number of the last commit of the job.
	LastCommit uint64
	// Started, Killed and Ended count workers: Ended all whose functions are over or that were
	// killed.
	Started, Killed, Ended int
}

// Start begins a job. The caller waits for its end, by Wait or Stop. Whatever is wrong with the
// config is what it ends with.
func Start(cfg Config) *Job {
	ctx, stop := context.WithCancelCause(context.Background())
	j := &Job{cfg: cfg, stop: stop, done: make(chan struct{}), deaths: slices.Clone(cfg.Deaths), procs: make(map[int]*process),
		changed: make(chan struct{}), source: source{changed: make(chan struct{}), hosts: slices.Clone(cfg.Hosts)}}
	if j.cfg.Limit <= 0 {
		j.cfg.Limit = time.Minute
	}
	go func() {
		defer close(j.done)
		defer stop(nil)
		j.err = j.run(ctx)
	}()
	return j
}

// errLimit is why a job is stopped that hangs.
var errLimit = errors.New("elastictest: the job has come to its limit")

func (j *Job) run(ctx context.Context) error {
	if j.cfg.Worker == nil || len(j.cfg.Hosts) == 0 {
		return errors.New("elastictest: a job needs a worker's function and hosts")
	}
	limit := time.AfterFunc(j.cfg.Limit, func() {
		j.stop(fmt.Errorf("%w of %v: %s", errLimit, j.cfg.Limit, j.whereabouts()))
	})
	defer limit.Stop()
	err := driver.Run(ctx, j.driverConfig())
	left := j.awaitWorkers()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.idle = errors.As(err, new(driver.StopSignal)) && !errors.Is(err, driver.ErrCheckpoint) && left == nil && len(j.failures) == 0
	return errors.Join(append([]error{err, left}, j.failures...)...)
}

func (j *Job) driverConfig() driver.Config {
	cfg := j.cfg.Driver
	if cfg.Size == (driver.Size{}) {
		cfg.Size = driver.Size{Min: 1, Elastic: true}
	}
	if cfg.Size.NP == 0 {
		for _, h := range j.cfg.Hosts {
			cfg.Size.NP += h.Slots
		}
	}
	if b := &cfg.Blame; b.Policy == driver.BlameSlot && b.CooldownMin == 0 && b.CooldownMax == 0 {
		b.CooldownMin, b.CooldownMax = 10*time.Millisecond, time.Second
	}
	if cfg.Timeouts.Drain == 0 {
		cfg.Timeouts.Drain = 10 * time.Second
	}
	if cfg.Log == nil {
		quiet := logrus.New()
		quiet.SetOutput(io.Discard)
		cfg.Log = quiet
	}
	cfg.Command = []string{"a function"}
	cfg.Env = append(slices.Clip(cfg.Env), plan.EnvOnlySockets+"=1") // shared memory knows processes alone
	cfg.Source, cfg.Launcher = &j.source, launcher{job: j, log: cfg.Log}
	cfg.Output = &launch.Output{}
	tell := cfg.Events
	cfg.Events = func(e driver.Event) {
		j.hear(e)
		if tell != nil {
			tell(e)
		}
	}
	return cfg
}

// leftBound is how long functions may go on after the end of the job.
const leftBound = 10 * time.Second

// awaitWorkers waits for the goroutines of all workers.
func (j *Job) awaitWorkers() error {
	ended := make(chan struct{})
	go func() {
		j.workers.Wait()
		close(ended)
	}()
	bound := time.NewTimer(leftBound)
	defer bound.Stop()
	select {
	case <-ended:
		return nil
	case <-bound.C:
		return fmt.Errorf("elastictest: functions of workers go on %v after the job, they heed no end of their context: %s",
			leftBound, j.whereabouts())
	}
}

// Wait blocks until the job has ended and all goroutines of workers with it. It returns what
// driver.Run has returned, nil where the job is done, and joined to it all errors of workers'
// functions that were failures, also those which the job has survived.
func (j *Job) Wait() error {
	<-j.done
	return j.err
}

// Stop ends the job as SIGTERM ends hvdrun: members leave together at their next commit. It blocks
// as Wait does, and returns the same, or nil where the job ended because of it.
func (j *Job) Stop() error {
	j.stop(driver.StopSignal{Signal: syscall.SIGTERM})
	err := j.Wait()
	if j.idle {
		return nil
	}
	return err
}

// Kill kills the worker that has the rank in the newest world, at once, as SIGKILL would. It
// reports whether there was one.
func (j *Job) Kill(rank int) bool {
	j.mu.Lock()
	var p *process
	if rank >= 0 && rank < len(j.ranks) {
		p = j.procs[j.ranks[rank]]
	}
	j.mu.Unlock()
	return p != nil && p.kill(syscall.SIGKILL)
}

// Die kills the worker to whose function ctx was given, or another context that comes from it, and
// ends the calling goroutine. It panics where there is no such worker.
func Die(ctx context.Context) {
	p, ok := ctx.Value(processKey{}).(*process)
	if !ok {
		panic("elastictest: Die with a context that comes from no worker's")
	}
	p.kill(syscall.SIGKILL)
	p.life.Survive()
}

// AddHost adds a host to those that discovery finds, or gives one other slots.
func (j *Job) AddHost(name string, slots int) {
	j.source.change(func(hosts []plan.Host) []plan.Host {
		at := slices.IndexFunc(hosts, func(h plan.Host) bool { return h.Name == name })
		if at < 0 {
			return append(hosts, plan.Host{Name: name, Slots: slots})
		}
		hosts[at].Slots = slots
		return hosts
	})
}

// DrainHost has discovery say that the workers of a host shall leave. They do at the next commit.
func (j *Job) DrainHost(name string) {
	j.source.change(func(hosts []plan.Host) []plan.Host {
		for i := range hosts {
			hosts[i].Draining = hosts[i].Draining || hosts[i].Name == name
		}
		return hosts
	})
}

// RemoveHost takes a host away from those that discovery finds. Its workers are let leave at the
// next commit.
func (j *Job) RemoveHost(name string) {
	j.source.change(func(hosts []plan.Host) []plan.Host {
		return slices.DeleteFunc(hosts, func(h plan.Host) bool { return h.Name == name })
	})
}

// Await blocks until enough says so of the job's status. It is asked again when that has changed;
// of changes that follow each other fast it may see the last alone. Await returns an error where
// the job ends before.
func (j *Job) Await(enough func(Status) bool) error {
	for {
		j.mu.Lock()
		status, changed := j.status, j.changed
		j.mu.Unlock()
		if enough(status) {
			return nil
		}
		select {
		case <-changed:
		case <-j.done:
			j.mu.Lock()
			status = j.status
			j.mu.Unlock()
			switch {
			case enough(status):
				return nil
			case j.err != nil:
				return fmt.Errorf("elastictest: the job ended before what was waited for: %w", j.err)
			}
			return errors.New("elastictest: the job was done before what was waited for")
		}
	}
}

// Size is for Await: the newest world has so many workers, which are all there, and has made a
// commit.
func Size(n int) func(Status) bool {
	return func(s Status) bool { return s.World.Size() == n && s.Lost == 0 && s.Commits > 0 }
}

// Commit is for Await: the job has made the commit of the number.
func Commit(number uint64) func(Status) bool {
	return func(s Status) bool { return s.LastCommit >= number }
}

// hear takes note of the driver's events.
func (j *Job) hear(e driver.Event) {
	if e.Name != driver.WorldPublished {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ranks, j.status.World, j.status.Commits, j.status.Lost = nil, plan.World{}, 0, 0
	for _, f := range e.Fields {
		switch v := f.Value.(type) {
		case uint64:
			j.status.World.Generation = v
		case []driver.PublishedSlot:
			for _, s := range v {
				j.ranks = append(j.ranks, s.PID)
				if p := j.procs[s.PID]; p == nil || p.over {
					j.status.Lost++
				}
				j.status.World.Slots = append(j.status.World.Slots, plan.Slot{SlotID: plan.SlotID{Host: s.Host, Index: s.Slot}, Rank: s.Rank})
			}
		}
	}
	j.tell()
}

// tell wakes who awaits another status. The caller holds mu.
func (j *Job) tell() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// whereabouts says what each worker does.
func (j *Job) whereabouts() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []string
	for _, p := range j.procs {
		all = append(all, fmt.Sprintf("%v is %s", p.slot, p.at))
	}
	if len(all) == 0 {
		return "there is no worker"
	}
	slices.Sort(all)
	return strings.Join(all, "; ")
}

// source is discovery.
type source struct {
	mu      sync.Mutex
	hosts   []plan.Host
	changed chan struct{}
}

func (s *source) change(f func([]plan.Host) []plan.Host) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hosts = f(slices.Clone(s.hosts))
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *source) now() ([]plan.Host, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.hosts), s.changed
}

// Discover returns the hosts.
func (s *source) Discover(context.Context) ([]plan.Host, error) {
	hosts, _ := s.now()
	return hosts, nil
}

// Watch tells them at every change.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	for {
		hosts, changed := s.now()
		found(hosts)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
