// Package elastictest runs an elastic job in one process, so that go test can test a training loop
// with failures.
//
// The driver, the rendezvous, the notifications and the connections between ranks are real. Hosts
// are only names, and workers are goroutines: each executes a function that begins with
// [elastic.Init], like the main function of a program. A test adds, drains and removes hosts, kills
// workers at chosen moments, and waits for the effects without sleeping.
//
// The connections of a killed worker close as those of a process that gets SIGKILL, and its context
// ends. Its goroutines end, as with [runtime.Goexit], when they are in package elastic or
// collective or next enter one of them. Until then they continue to run, unlike those of a real
// process.
//
// While workers run, GOMAXPROCS is at least one more than there are workers in all jobs.
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
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// Config describes a job. Worker and Hosts are required.
type Config struct {
	// Worker is the function that every worker executes on a separate goroutine. It must derive the
	// contexts of elastic.Init and elastic.Run from ctx. Its result acts as the exit of a program:
	// nil, elastic.ErrRemoved and elastic.ErrFinished are exit status 0, any other error is a
	// failure. Variables that workers must not share have to be declared in it.
	Worker func(ctx context.Context) error
	// Hosts are the hosts at the start of the job.
	Hosts []plan.Host

	// Deaths are moments at which a worker is killed, each once per job. In a Moment, Generation 0
	// and a Slot without a host match any.
	Deaths []Moment
	// At is called at every moment of every worker, on the worker's goroutine and therefore
	// concurrently. The worker waits for it. If it returns true, the worker is killed. It may be
	// nil.
	At func(Moment) bool

	// Limit is the time after which a hanging job is stopped. 0 or less: a minute.
	Limit time.Duration
	// Driver contains all other settings: Size, Blame, Timeouts, VerifyState, Log and so on.
	// Command, Source, Launcher and Output are overwritten. If Size is zero, the job is elastic,
	// starts with all slots of Hosts and continues with at least one worker. If Blame is zero, the
	// slot of a killed worker is excluded for 10 ms, at most a second. If Log is nil, nothing is
	// logged.
	Driver driver.Config

	// network returns the network of the process in the given slot or, for the zero SlotID, of the
	// driver. Nil: all use the kernel's network.
	network func(plan.SlotID) identity.Network
}

// Job is a running job. Its methods may be called concurrently.
type Job struct {
	cfg    Config
	source source
	stop   context.CancelCauseFunc
	done   chan struct{}
	err    error // valid when done is closed
	idle   bool  // valid when done is closed: the job ended by a stop and without a failure

	workers sync.WaitGroup

	mu       sync.Mutex
	deaths   []Moment // deaths that have not happened yet
	procs    map[int]*process
	status   Status
	ranks    []int // process IDs of the newest world, by rank
	latest   uint64
	failures []error
	changed  chan struct{} // closed and replaced when the status changes
}

// Status describes the progress of a job.
type Status struct {
	// World is the newest one; zero before the first. Its slots are in rank order, with only Host,
	// Index and Rank set.
	World plan.World
	// Lost is the number of workers of that world that have ended.
	Lost int
	// Commits is the number of commits that world has made.
	Commits int
	// LastCommit is the number of the last commit of the job.
	LastCommit uint64
	// Started, Killed and Ended are numbers of workers. Ended includes those killed.
	Started, Killed, Ended int
}

// Start starts a job in the background. The caller must call Wait or Stop, which also return the
// errors of an invalid config.
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

// errLimit is the reason for stopping a job that hangs.
var errLimit = errors.New("elastictest: the job has exceeded its limit")

func (j *Job) run(ctx context.Context) error {
	if j.cfg.Worker == nil || len(j.cfg.Hosts) == 0 {
		return errors.New("elastictest: a job needs a Worker function and Hosts")
	}
	limit := time.AfterFunc(j.cfg.Limit, func() {
		j.stop(fmt.Errorf("%w of %v: %s", errLimit, j.cfg.Limit, j.describeWorkers()))
	})
	defer limit.Stop()
	err := driver.Run(ctx, j.driverConfig())
	left := j.awaitWorkers()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.idle = errors.As(err, new(job.StopSignal)) && !errors.Is(err, job.ErrCheckpoint) && left == nil && len(j.failures) == 0
	return errors.Join(append([]error{err, left}, j.failures...)...)
}

func (j *Job) driverConfig() driver.Config {
	cfg := j.cfg.Driver
	if cfg.Size == (job.Size{}) {
		cfg.Size = job.Size{Min: 1, Elastic: true}
	}
	if cfg.Size.NP == 0 {
		for _, h := range j.cfg.Hosts {
			cfg.Size.NP += h.Slots
		}
	}
	if b := &cfg.Blame; b.Policy == job.BlameSlot && b.CooldownMin == 0 && b.CooldownMax == 0 {
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
	cfg.Env = append(slices.Clip(cfg.Env), plan.EnvOnlySockets+"=1") // shared memory works between processes only
	cfg.Source, cfg.Launcher = &j.source, launcher{job: j, log: cfg.Log}
	cfg.Output = &launch.Output{}
	events := cfg.Events
	cfg.Events = func(e job.Event) {
		j.observe(e)
		if events != nil {
			events(e)
		}
	}
	return cfg
}

// exitTimeout limits how long Worker functions may run after the end of the job.
const exitTimeout = 10 * time.Second

func (j *Job) awaitWorkers() error {
	ended := make(chan struct{})
	go func() {
		j.workers.Wait()
		close(ended)
	}()
	bound := time.NewTimer(exitTimeout)
	defer bound.Stop()
	select {
	case <-ended:
		return nil
	case <-bound.C:
		return fmt.Errorf("elastictest: Worker functions ignore the end of their context and still run %v after the job: %s",
			exitTimeout, j.describeWorkers())
	}
}

// Wait blocks until the job and all workers' goroutines have ended. It returns the error of
// driver.Run, nil if the job is done, joined with all failures of Worker functions, including those
// that the job has survived.
func (j *Job) Wait() error {
	<-j.done
	return j.err
}

// Stop ends the job as SIGTERM ends hvdrun: its workers leave together at their next commit. It
// blocks like Wait and returns the same, or nil if the job ended because of Stop.
func (j *Job) Stop() error {
	j.stop(job.StopSignal{Signal: syscall.SIGTERM})
	err := j.Wait()
	if j.idle {
		return nil
	}
	return err
}

// Kill kills the worker with the given rank in the newest world at once, as SIGKILL would. It
// reports whether there was such a worker.
func (j *Job) Kill(rank int) bool {
	j.mu.Lock()
	var p *process
	if rank >= 0 && rank < len(j.ranks) {
		p = j.procs[j.ranks[rank]]
	}
	j.mu.Unlock()
	return p != nil && p.kill(syscall.SIGKILL)
}

// Die kills the worker from whose context ctx is derived, and ends the calling goroutine. It panics
// if there is no such worker.
func Die(ctx context.Context) {
	p, ok := ctx.Value(processKey{}).(*process)
	if !ok {
		panic("elastictest: Die with a context that is not derived from a worker's")
	}
	p.kill(syscall.SIGKILL)
	p.fake.Survive()
}

// AddHost adds a host to the discovered ones, or changes its slots.
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

// DrainHost makes discovery ask the workers of a host to leave, which they do at the next commit.
func (j *Job) DrainHost(name string) {
	j.source.change(func(hosts []plan.Host) []plan.Host {
		for i := range hosts {
			hosts[i].Draining = hosts[i].Draining || hosts[i].Name == name
		}
		return hosts
	})
}

// RemoveHost removes a host from the discovered ones. Its workers leave at the next commit.
func (j *Job) RemoveHost(name string) {
	j.source.change(func(hosts []plan.Host) []plan.Host {
		return slices.DeleteFunc(hosts, func(h plan.Host) bool { return h.Name == name })
	})
}

// Await blocks until enough returns true for the job's status. It calls enough after each change,
// or once after several changes in quick succession. It returns an error if the job ends before.
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
				return fmt.Errorf("elastictest: the job ended before the awaited status: %w", j.err)
			}
			return errors.New("elastictest: the job was done before the awaited status")
		}
	}
}

// Size returns a condition for Await: the newest world has n workers, none is lost, and it has made
// a commit.
func Size(n int) func(Status) bool {
	return func(s Status) bool { return s.World.Size() == n && s.Lost == 0 && s.Commits > 0 }
}

// Commit returns a condition for Await: the job has made the commit with the given number or a
// later one.
func Commit(number uint64) func(Status) bool {
	return func(s Status) bool { return s.LastCommit >= number }
}

// observe updates the status from the driver's events.
func (j *Job) observe(e job.Event) {
	if e.Name != job.WorldPublished {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ranks, j.status.World, j.status.Commits, j.status.Lost = nil, plan.World{}, 0, 0
	for _, f := range e.Fields {
		switch v := f.Value.(type) {
		case uint64:
			j.status.World.Generation = v
		case []job.PublishedSlot:
			for _, s := range v {
				j.ranks = append(j.ranks, s.PID)
				if p := j.procs[s.PID]; p == nil || p.over {
					j.status.Lost++
				}
				j.status.World.Slots = append(j.status.World.Slots, plan.Slot{SlotID: plan.SlotID{Host: s.Host, Index: s.Slot}, Rank: s.Rank})
			}
		}
	}
	j.notify()
}

// notify wakes calls of Await. The caller holds mu.
func (j *Job) notify() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// describeWorkers describes the progress of each worker.
func (j *Job) describeWorkers() string {
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

// source implements discovery.
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

// Watch reports the hosts at every change.
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
