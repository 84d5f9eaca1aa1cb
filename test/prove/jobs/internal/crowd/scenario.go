package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/report"
)

// Scenario is a job: it forms a world of Workers workers, grows by a host and shrinks again, loses
// one in a hundred of its workers at once, one in ten, and a third of its hosts, and is stopped.
type Scenario struct {
	Workers int
	Each    int    // most workers of a host
	Result  string // file for its [Sample]
	Profile string // file for a profile of the driver's processor; empty: none
	Heap    string // file for a profile of the driver's memory; empty: none
	Verbose bool   // print the driver's log
}

const (
	// fewest is the number of hosts of even a small job; added is the number of slots of the host
	// by which a job grows.
	fewest = 6
	added  = 8
	// starting is how long the driver waits for workers and for their agents.
	starting = 2 * time.Minute
	// spare is the number of descriptors that the driver has in addition to perHost for each host.
	spare, perHost = 500, 4
)

// stage is a running job.
type stage struct {
	Scenario
	hosts   []plan.Host
	source  source
	fleet   *fleet
	agents  *client.Agents
	lines   atomic.Int64
	journal string
	events  *json.Encoder

	mu   sync.Mutex
	seen map[job.EventName][]time.Time
	more wake.Flag // an event has been added
}

var errStop = errors.New("the measurement is over")

// run runs the driver's process, and writes its events to a file.
func (sc Scenario) run(ctx context.Context, events io.Writer) (s Sample, err error) {
	dir, err := os.MkdirTemp("", "hvdrun-scale-")
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	st := &stage{
		Scenario: sc, seen: make(map[job.EventName][]time.Time), more: wake.New(),
		journal: filepath.Join(dir, "journal"), events: json.NewEncoder(events),
	}
	st.hosts = sc.hosts()
	if err := permit(uint64(perHost*len(st.hosts) + spare)); err != nil {
		return s, err
	}
	if sc.Profile != "" {
		f, err := os.Create(sc.Profile)
		if err != nil {
			return s, err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return s, err
		}
		defer func() {
			pprof.StopCPUProfile()
			err = errors.Join(err, f.Close())
		}()
	}
	return st.play(ctx)
}

// permit raises the limit of open descriptors of this process to n.
func permit(n uint64) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil || limit.Cur >= n {
		return err
	}
	limit.Cur, limit.Max = n, max(n, limit.Max)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("crowd: the driver needs %d descriptors (ulimit -n): %w", n, err)
	}
	return nil
}

// journalSize returns the size of a journal in KiB.
func journalSize(path string) (float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	_, end, err := journal.Read(f, func([]byte) error { return nil })
	return float64(end) / (1 << 10), err
}

// play runs the driver and measures it.
func (st *stage) play(ctx context.Context) (s Sample, err error) {
	runID := fmt.Sprint("crowd", os.Getpid())
	authority, err := identity.NewAuthority(runID)
	if err != nil {
		return s, err
	}
	config := st.config(runID, authority)
	st.source.set(st.hosts)
	run, stop := context.WithCancelCause(ctx)
	ended := make(chan error, 1)
	cpu, began := processor(), time.Now()
	go func() { ended <- driver.Run(run, config) }()
	if err = st.acts(ctx, &s, began, cpu); err == nil {
		s.Lines = float64(st.lines.Load())
		s.Journal, err = journalSize(st.journal)
	}
	stopped := time.Now()
	stop(errStop)
	result := <-ended
	s.Stopped = report.Milliseconds(time.Since(stopped))
	if !errors.Is(result, errStop) {
		err = errors.Join(err, fmt.Errorf("the driver: %w", result))
	}
	err = errors.Join(err, st.agents.Close(), st.fleet.close())
	s.WorkersCPU = report.Milliseconds(st.fleet.processor())
	return s, err
}

// config returns the driver's configuration, and creates the agents' client.
func (st *stage) config(runID string, authority *identity.Authority) driver.Config {
	log := logrus.New()
	log.SetLevel(logrus.InfoLevel)
	if !st.Verbose {
		log.SetOutput(io.Discard)
	}
	log.AddHook(st)
	st.fleet = newFleet(len(st.hosts) + 1)
	st.agents = client.New(client.Config{
		Authority: authority, Starter: st.fleet, LocalOnly: true, Keep: true, Lease: starting, Log: log,
		Hello: client.Hello{LogLevel: log.GetLevel().String()},
	})
	return driver.Config{
		RunID: runID, Authority: authority,
		Command: []string{"worker"}, Source: &st.source, Launcher: st.agents, Log: log, Journal: st.journal,
		Output: &launch.Output{Stdout: io.Discard, Stderr: io.Discard},
		Size:   job.Size{NP: st.Workers, Min: 1, Elastic: true},
		// The slots of dead workers stay excluded.
		Blame:    job.Blame{CooldownMin: time.Hour, CooldownMax: time.Hour},
		Timeouts: job.Timeouts{DiscoveryInterval: 10 * time.Millisecond, Start: starting, Join: starting},
		Events:   st.note,
	}
}

// Levels and Fire make the stage count log lines.
func (st *stage) Levels() []logrus.Level { return logrus.AllLevels }

// Fire counts a line.
func (st *stage) Fire(*logrus.Entry) error { st.lines.Add(1); return nil }

// acts runs the phases of the job.
func (st *stage) acts(ctx context.Context, s *Sample, began time.Time, cpu time.Duration) error {
	published, err := st.await(ctx, job.WorldPublished, 1)
	if err != nil {
		return err
	}
	first, err := st.hear(ctx, func(n news) bool { return n.World == 1 && n.Size == st.Workers })
	if err != nil {
		return err
	}
	s.Formed, s.Received = report.Milliseconds(first.Sub(began)), report.Milliseconds(first.Sub(published))
	if err := st.committed(ctx); err != nil {
		return err
	}
	s.FormCPU = report.Milliseconds(processor() - cpu)

	cpu = processor()
	if s.Acked, err = st.change(ctx, append(slices.Clip(st.hosts), plan.Host{Name: hostName(len(st.hosts)), Slots: added}), 2); err != nil {
		return err
	}
	if s.AckedWarm, err = st.change(ctx, st.hosts, 3); err != nil {
		return err
	}
	if _, err = st.await(ctx, job.WorkerExited, added); err != nil {
		return err
	}
	s.GrowCPU = report.Milliseconds(processor() - cpu)
	if err := s.memory(st.Heap); err != nil {
		return err
	}
	s.Descriptors -= float64(st.fleet.descriptors())

	if s.ReformedFew, err = st.lose(ctx, 100); err != nil {
		return err
	}
	cpu = processor()
	if s.Reformed, err = st.lose(ctx, 10); err != nil {
		return err
	}
	s.DieCPU = report.Milliseconds(processor() - cpu)
	if s.Left, err = st.shrink(ctx); err != nil {
		return err
	}
	return s.most()
}

// lose kills every n-th worker, where n is the argument one, and returns the time until the others
// have the next world.
func (st *stage) lose(ctx context.Context, one int) (ms float64, err error) {
	died := time.Now()
	left, err := st.fleet.kill(one)
	if err != nil {
		return 0, err
	}
	next, err := st.hear(ctx, func(n news) bool { return n.World > 3 && n.Size == left })
	if err != nil {
		return 0, err
	}
	return report.Milliseconds(next.Sub(died)), st.committed(ctx)
}

// shrink removes a third of the hosts, and returns the time until the workers of the others have
// the next world.
func (st *stage) shrink(ctx context.Context) (ms float64, err error) {
	left := st.hosts[(len(st.hosts)+2)/3:]
	rest := st.fleet.members(left[0].Name)
	began := time.Now()
	st.source.set(left)
	next, err := st.hear(ctx, func(n news) bool { return n.World > 3 && n.Size == rest })
	return report.Milliseconds(next.Sub(began)), err
}

// change changes the list of hosts and returns the time from the driver's decision to notify the
// workers until the last worker was notified. It then waits for the resulting world.
func (st *stage) change(ctx context.Context, to []plan.Host, generation int) (ms float64, err error) {
	st.source.set(to)
	told, err := st.await(ctx, job.HostsUpdated, generation-1)
	if err != nil {
		return 0, err
	}
	heard, err := st.hear(ctx, func(n news) bool { return n.Heard > 0 })
	if err != nil {
		return 0, err
	}
	if _, err = st.hear(ctx, func(n news) bool { return n.World == uint64(generation) }); err != nil {
		return 0, err
	}
	return report.Milliseconds(heard.Sub(told)), st.committed(ctx)
}

// await blocks until the event with that name has happened count times, and returns the time of the
// last one.
func (st *stage) await(ctx context.Context, name job.EventName, count int) (time.Time, error) {
	for {
		st.mu.Lock()
		seen := st.seen[name]
		st.mu.Unlock()
		if len(seen) >= count {
			return seen[count-1], nil
		}
		select {
		case <-st.more:
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("waiting for %s, %d of %d: %w", name, len(seen), count, ctx.Err())
		}
	}
}

// note records an event.
func (st *stage) note(e job.Event) {
	if err := st.events.Encode(e); err != nil {
		panic(err) // the file is one of the case's
	}
	st.mu.Lock()
	st.seen[e.Name] = append(st.seen[e.Name], e.Time)
	st.mu.Unlock()
	st.more.Set()
}

// committed waits until all members of a world have committed in it.
func (st *stage) committed(ctx context.Context) error {
	_, err := st.hear(ctx, func(n news) bool { return n.Committed > 0 && n.Committed == n.Size })
	return err
}

// hear blocks until news arrives for which what returns true, and returns its time.
func (st *stage) hear(ctx context.Context, what func(news) bool) (time.Time, error) {
	for {
		select {
		case n := <-st.fleet.told:
			if what(n) {
				return time.Unix(0, n.At), nil
			}
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("waiting for the workers: %w", ctx.Err())
		}
	}
}

// hosts returns the hosts of the first world, with Each slots on each, or fewer, so that there are
// several hosts.
func (sc Scenario) hosts() (list []plan.Host) {
	slots := min(sc.Each, (sc.Workers+fewest-1)/fewest)
	for n := sc.Workers; n > 0; n -= slots {
		list = append(list, plan.Host{Name: hostName(len(list)), Slots: min(n, slots)})
	}
	return list
}

func hostName(i int) string { return fmt.Sprintf("host%05d", i) }

// source is a changeable list of hosts.
type source struct {
	mu   sync.Mutex
	list []plan.Host
}

func (s *source) set(list []plan.Host) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
}

// Discover returns the list.
func (s *source) Discover(context.Context) ([]plan.Host, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list), nil
}

// processor returns this process's CPU time.
func processor() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// memory records this process's memory, descriptors and goroutines.
func (s *Sample) memory(profile string) error {
	runtime.GC()
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return err
		}
		if err := errors.Join(pprof.WriteHeapProfile(f), f.Close()); err != nil {
			return err
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s.Heap, s.Stacks = float64(m.HeapInuse)/(1<<20), float64(m.StackInuse)/(1<<20)
	s.Goroutines = float64(runtime.NumGoroutine())
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	s.Descriptors = float64(len(open))
	s.RSS, err = resident("VmRSS:")
	return err
}

// most records this process's largest memory.
func (s *Sample) most() (err error) {
	s.Peak, err = resident("VmHWM:")
	return err
}

// resident returns a line of this process's memory, in MiB.
func resident(name string) (float64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			kib, err := strconv.Atoi(f[1])
			return float64(kib) / (1 << 10), err
		}
	}
	return 0, fmt.Errorf("crowd: no line %s in /proc/self/status", name)
}
