package elastictest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// launcher starts workers as goroutines.
type launcher struct {
	job *Job
	log logrus.FieldLogger
}

var _ launch.Router = launcher{}

// HostAddr implements launch.Router: goroutines do not need to be stopped when the driver's process
// ends.
func (launcher) HostAddr(_ context.Context, h string) (string, error) { return h, nil }

// Network returns the driver's network.
func (l launcher) Network() identity.Network { return l.job.networkOf(plan.SlotID{}) }

func (j *Job) networkOf(slot plan.SlotID) identity.Network {
	if j.cfg.network == nil {
		return identity.Network{}
	}
	return j.cfg.network(slot)
}

// Run implements launch.Launcher. It returns when the worker has ended for the others; its
// goroutine may still run.
func (l launcher) Run(ctx context.Context, s *launch.Spec, started func(pid int)) error {
	if ctx.Err() != nil {
		return &launch.StartError{Command: s.Command[0], Err: ctx.Err()}
	}
	near, far := net.Pipe()
	p := l.job.spawn(s, l.log, near)
	started(p.pid)
	var talking sync.WaitGroup
	talking.Go(func() {
		cleanup := s.Talk(ctx, p.pid, far)
		far.Close()
		if cleanup != nil {
			cleanup()
		}
	})
	defer talking.Wait()
	defer near.Close() // nothing of the process must remain
	asked := ctx.Done()
	var grace <-chan time.Time
	for {
		select {
		case <-p.dead:
			return p.exit()
		case <-asked:
			asked = nil
			if !p.fake.Terminate() {
				p.kill(syscall.SIGTERM)
				continue
			}
			timer := time.NewTimer(s.Grace)
			defer timer.Stop()
			grace = timer.C
		case <-grace:
			p.kill(syscall.SIGKILL)
		}
	}
}

type processKey struct{}

// process is a worker.
type process struct {
	job    *Job
	pid    int
	slot   plan.SlotID
	fake   *fakeproc.Process
	cancel context.CancelFunc
	dead   chan struct{} // closed when other workers can no longer see it

	before line.Phase // used by its goroutine only
	at     Moment     // at and over are guarded by the job's mu
	over   bool

	mu     sync.Mutex
	signal syscall.Signal // the signal that has ended it
	err    error          // the result of its function
}

func (j *Job) spawn(s *launch.Spec, log logrus.FieldLogger, socket net.Conn) *process {
	env := make(map[string]string)
	for _, pair := range s.Env {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	p := &process{job: j, slot: s.Slot, dead: make(chan struct{})}
	p.fake = &fakeproc.Process{
		Lookup:  func(name string) (string, bool) { value, ok := env[name]; return value, ok },
		Log:     log.WithField("worker", s.Slot.String()),
		Reached: p.reached,
		Line:    socket,
		Network: j.networkOf(s.Slot),
	}
	ctx, cancel := context.WithCancel(fakeproc.With(context.Background(), p.fake))
	p.cancel = cancel
	j.mu.Lock()
	j.status.Started++
	p.pid, p.at = j.status.Started, Moment{Rank: -1}
	j.procs[p.pid] = p
	j.notify()
	j.mu.Unlock()
	addProcessor()
	j.workers.Go(func() {
		defer removeProcessor()
		p.main(context.WithValue(ctx, processKey{}, p))
	})
	return p
}

var errEnded = errors.New("elastictest: the function has ended its goroutine")

// main runs the worker's function on its goroutine.
func (p *process) main(ctx context.Context) {
	err := errEnded
	defer func() {
		p.end(0, err)
		p.fake.Clean()
		p.job.mu.Lock()
		delete(p.job.procs, p.pid)
		p.job.mu.Unlock()
	}()
	if err = p.job.cfg.Worker(ctx); err == nil && !p.fake.Entered() {
		err = errors.New("elastictest: the function has not called elastic.Init with its own context")
	}
}

func (p *process) kill(how syscall.Signal) bool { return p.end(how, nil) }

// end ends the process and reports true, or returns false if it has ended before.
func (p *process) end(how syscall.Signal, err error) bool {
	p.mu.Lock()
	if !p.fake.Kill() {
		p.mu.Unlock()
		return false
	}
	if errors.Is(err, elastic.ErrRemoved) || errors.Is(err, elastic.ErrFinished) {
		err = nil
	}
	p.signal, p.err = how, err
	p.mu.Unlock()
	p.cancel() // after the connections, so that they close without goodbye messages
	j := p.job
	j.mu.Lock()
	if err != nil {
		j.failures = append(j.failures, fmt.Errorf("worker %v: %w", p.slot, err))
	}
	j.status.Ended++
	p.over = true
	if slices.Contains(j.ranks, p.pid) {
		j.status.Lost++
	}
	if how == syscall.SIGKILL {
		j.status.Killed++
	}
	j.notify()
	j.mu.Unlock()
	close(p.dead)
	return true
}

// exit returns the result of the process as launch.Launcher defines it.
func (p *process) exit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.signal != 0:
		return &launch.ExitError{Code: 128 + int(p.signal), Signal: p.signal}
	case p.err != nil:
		return &launch.ExitError{Code: 1}
	}
	return nil
}

// reached handles a moment of the worker's goroutine.
func (p *process) reached(m fakeproc.Moment) {
	phase := phaseOf(p.before, m)
	p.before = m.Phase
	if phase == 0 {
		return
	}
	now := Moment{Rank: m.Rank, Phase: phase, Commit: m.Commit, Generation: m.Generation, Slot: p.slot}
	j := p.job
	j.mu.Lock()
	p.at = now
	due := slices.IndexFunc(j.deaths, now.is)
	dies := due >= 0
	if dies {
		j.deaths = slices.Delete(j.deaths, due, due+1)
	}
	if phase == Committed {
		j.committed(now)
	}
	j.mu.Unlock()
	if !dies && j.cfg.At != nil {
		dies = j.cfg.At(now)
	}
	if dies {
		p.kill(syscall.SIGKILL)
	}
}

// committed records a commit. The caller holds mu.
func (j *Job) committed(m Moment) {
	j.status.LastCommit = max(j.status.LastCommit, m.Commit)
	if m.Generation == j.status.World.Generation && (j.status.Commits == 0 || m.Commit > j.latest) {
		j.latest = m.Commit
		j.status.Commits++
	}
	j.notify()
}
