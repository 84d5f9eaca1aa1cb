// Command chaos runs the same job repeatedly and kills random workers at random moments: rank 0,
// new workers, two at once, one during the recovery from another's death. Some workers are asked to
// leave instead. Jobs commit every step, or every second or third. Every run must end with the same
// result as an undisturbed one.
//
//	go run ./test/chaos -runs 200
//
// With -microbatches the workers train by elastic.Steps: the sums of their gradients depend on the
// order, and no step may be applied twice by a worker.
//
// With -commits workers are killed during commits only: while values are encoded, tensors are
// copied, or the ranks agree on the commit, and right after it.
//
// After each run it checks that hvdrun has ended with status 0 and in time, that no process
// remains, that all workers of the last world have exactly the weights of an undisturbed run, and
// that no committed step was lost, repeated or left out (steplog.Check). The files of a failed run
// are kept.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var c chaos
	flag.IntVar(&c.runs, "runs", 200, "jobs to run")
	flag.Uint64Var(&c.seed, "seed", 1, "random seed of the first run, incremented for each further run")
	flag.IntVar(&c.parallel, "parallel", 1, "jobs to run concurrently")
	flag.IntVar(&c.steps, "steps", 400, "steps of a job")
	flag.DurationVar(&c.stepTime, "step-time", 2*time.Millisecond, "time of a step besides communication")
	flag.DurationVar(&c.pause, "pause", 80*time.Millisecond, "mean time between two kills")
	flag.Float64Var(&c.ask, "ask", 0.25, "share of workers that are asked to leave by SIGTERM instead of killed")
	flag.IntVar(&c.drivers, "drivers", 0, "number of kills and resumes of hvdrun itself in a job")
	flag.DurationVar(&c.control, "control-limit", 0, "longest time until a resumed driver controls the job, on an idle machine; 0: no limit")
	flag.IntVar(&c.commits, "commits", 0, "number of kills of one or two workers during commits, instead of all other kills, in as many runs as needed")
	flag.IntVar(&c.microbatches, "microbatches", 0, "train by elastic.Steps of so many microbatches, a power of two")
	flag.IntVar(&c.size, "size", steplog.Size, "weights of a job, of 4 bytes each")
	flag.DurationVar(&c.still, "still", follow.Patience, "longest time without progress in a run: neither a step nor an event")
	flag.Parse()
	if err := c.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		stop()
		os.Exit(1)
	}
}

// chaos is the flags and the state shared by all runs.
type chaos struct {
	runs, parallel, steps  int
	drivers, commits, size int
	microbatches           int
	seed                   uint64
	ask                    float64
	stepTime, pause, still time.Duration
	control                time.Duration

	programs follow.Programs
	dir      string
	calm     ending // of the undisturbed run
}

func (c *chaos) run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "hvdrun-chaos-")
	if err != nil {
		return err
	}
	c.dir = dir
	if c.programs, err = follow.Build(ctx, dir); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	if c.calm, err = c.undisturbed(); err != nil {
		return err
	}
	sum, err := c.runAll(ctx)
	sum.print(os.Stdout)
	if err != nil {
		return err
	}
	if sum.failed > 0 {
		return fmt.Errorf("%d of %d runs failed; their files are in %s", sum.failed, sum.runs, dir)
	}
	return os.RemoveAll(dir)
}

// runAll runs the jobs, parallel of them at a time, and prints a line for each.
func (c *chaos) runAll(ctx context.Context) (summary, error) {
	var (
		mu   sync.Mutex
		sum  summary
		wg   sync.WaitGroup
		turn = make(chan struct{}, max(1, c.parallel))
	)
	began := time.Now()
	for i := range c.runs {
		turn <- struct{}{}
		mu.Lock()
		left := c.commits - sum.strikes.tries
		mu.Unlock()
		if ctx.Err() != nil || c.commits > 0 && left <= 0 {
			break
		}
		wg.Go(func() {
			defer func() { <-turn }()
			o := c.disturbed(ctx, i, left)
			mu.Lock()
			defer mu.Unlock()
			if ctx.Err() == nil {
				sum.add(o)
				fmt.Printf("run %3d seed %-4d %s\n", i+1, c.seed+uint64(i), o)
			}
		})
	}
	wg.Wait()
	sum.took = time.Since(began)
	return sum, context.Cause(ctx)
}

// disturbed runs one job and kills its processes at random.
func (c *chaos) disturbed(ctx context.Context, i, tries int) outcome {
	seed := c.seed + uint64(i)
	dir := filepath.Join(c.dir, fmt.Sprintf("run.%d", i+1))
	if err := os.Mkdir(dir, 0o777); err != nil {
		return outcome{err: err}
	}
	dice := rand.New(rand.NewPCG(seed, 0))
	flags := []string{"-log-all", "-local", "-chatter", "-commit-every", strconv.Itoa(1 + dice.IntN(3))}
	if c.commits > 0 {
		flags = []string{"-log-all", "-struck", fmt.Sprintf("-async=%t", dice.IntN(2) == 0), fmt.Sprintf("-local=%t", dice.IntN(2) == 0)}
	}
	np, spares, hosts := 4, 0, "localhost:2,127.0.0.1:2"
	if c.microbatches > 0 {
		here, there := 1+dice.IntN(4), 1+dice.IntN(4)
		spares = dice.IntN(min(3, here+there))
		np, hosts = here+there-spares, fmt.Sprintf("localhost:%d,127.0.0.1:%d", here, there)
		flags = []string{"-log-all", "-chatter", fmt.Sprintf("-balance=%t", dice.IntN(2) == 0), fmt.Sprintf("-late=%t", dice.IntN(2) == 0)}
	}
	began := time.Now()
	places := []string{"-np", strconv.Itoa(np), "--min-np", "1", "-H", hosts}
	if spares > 0 {
		places = append(places, "--max-np", strconv.Itoa(np), "--spares", strconv.Itoa(spares))
	}
	r, err := c.programs.Start(follow.Job{
		Dir:     dir,
		Flags:   append(places, "--commit-replicas", "1", "--blacklist-cooldown-range", "0.1,0.4", "--log-level", "debug"),
		Trainer: c.trainer(flags...),
		Still:   c.still,
	})
	if err != nil {
		return outcome{err: err}
	}
	k := &killer{
		job: r, dice: dice, pause: c.pause, until: c.steps * 85 / 100, ask: c.ask,
		drivers: driverKiller{left: c.drivers, limit: c.control}, struck: make(map[int]bool),
	}
	var hit strikes
	var killErr error
	if c.commits > 0 {
		hit.tries, killErr = k.strikeCommits(ctx, tries)
	} else {
		killErr = k.run(ctx)
	}
	if ctx.Err() != nil {
		k.job.Kill()
	}
	res, err := k.job.Wait()
	o := outcome{
		took: time.Since(began), kills: k.kills, asked: k.asked, resets: follow.Count(res.Events, "reset"), recoveries: recoveries(k.kills, res.Lines),
		drivers: k.drivers.killed, controls: k.drivers.controls,
	}
	if o.err = errors.Join(killErr, err); o.err == nil {
		o.err = c.check(res)
	}
	if o.err == nil && c.commits > 0 {
		o.err = k.readStrikes(res.Lines, &hit)
		o.strikes = hit
	}
	if o.err == nil && c.drivers > 0 {
		o.err = k.checkResumed(res)
	}
	if o.err == nil {
		o.err = os.RemoveAll(dir)
	} else {
		o.err = errors.Join(o.err, os.WriteFile(filepath.Join(dir, "story"), []byte(res.Story()), 0o666))
	}
	return o
}

// outcome is the result of a run.
type outcome struct {
	took       time.Duration
	kills      []kill
	asked      int
	resets     int
	recoveries report.Spread
	drivers    int           // kills of hvdrun
	controls   report.Spread // from resume to control of the job
	strikes    strikes
	err        error
}

func (o outcome) String() string {
	verdict := "ok"
	if o.err != nil {
		verdict = "FAILED: " + o.err.Error()
	}
	resumed := ""
	if o.drivers > 0 {
		resumed = fmt.Sprintf(", %d of hvdrun, slowest resume %6.1f ms", o.drivers, report.Milliseconds(o.controls.Quantile(1)))
	}
	return fmt.Sprintf("%5.2f s, %2d kills, %2d asked to leave, %2d resets, slowest recovery %6.1f ms%s: %s",
		o.took.Seconds(), len(o.kills), o.asked, o.resets, report.Milliseconds(o.recoveries.Quantile(1)), resumed, verdict)
}

// summary is the result of all runs.
type summary struct {
	runs, failed, kills, resets int
	asked                       int
	zeros, newcomers, bursts    int
	drivers                     int
	recoveries, controls        report.Spread
	strikes                     strikes
	took                        time.Duration
}

func (s *summary) add(o outcome) {
	s.runs++
	if o.err != nil {
		s.failed++
	}
	s.kills += len(o.kills)
	s.asked += o.asked
	s.resets += o.resets
	s.recoveries = slices.Concat(s.recoveries, o.recoveries)
	s.drivers += o.drivers
	s.controls = slices.Concat(s.controls, o.controls)
	s.strikes.add(o.strikes)
	for i, k := range o.kills {
		if k.rank == 0 {
			s.zeros++
		}
		if k.rank < 0 {
			s.newcomers++
		}
		if i > 0 && k.at.Sub(o.kills[i-1].at) < 20*time.Millisecond {
			s.bursts++
		}
	}
}

func (s *summary) print(w io.Writer) {
	if s.drivers > 0 {
		report.Rows(w, fmt.Sprintf("%d kills of hvdrun; from the start of resume to control of the job:", s.drivers), nil,
			report.Row{Name: "resume", Spread: s.controls})
	}
	fmt.Fprint(w, s.strikes.report())
	fmt.Fprintf(w, "\n%d runs in %v, %d failed; %d kills (%d of rank 0, %d of newcomers, %d within 20 ms of another), %d asked to leave, %d resets\n",
		s.runs, s.took.Round(time.Second), s.failed, s.kills, s.zeros, s.newcomers, s.bursts, s.asked, s.resets)
	report.Rows(w, "From a member's death to the next completed step in a later world, including further deaths in between:", nil,
		report.Row{Name: "recovery", Spread: s.recoveries})
}
