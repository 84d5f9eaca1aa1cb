// Command recovery measures for how long training is interrupted when a worker is killed and when
// workers are added.
//
//	go run ./test/recovery -kills 200 -joins 40
//
// A death is timed from right before kill(2) of a worker until every survivor has completed a step
// in a later world. The dead worker's slot returns, and the next worker is killed some time later,
// with -spares once that many wait again, and have followed the others for a while.
//
// Growth is timed by the discovery script, from right before it first prints a second host with as
// many slots as the first, until the first step in the larger world. The pause is the longest time
// in between from one step of an old worker to its next, less a median step. Because a first step
// may be slow for other reasons, the time outside the training function is reported too.
//
// -beside does the same with jobs whose spares run tasks meanwhile, in turns with jobs whose spares
// only wait, and reports the steps between deaths of both.
//
// -ballast adds a large state, of which -change says how much a step changes. The most memory that
// any worker has had is reported with it, in all and for each byte of the state.
//
// An arrival is timed from right before another `hvdrun agent` is started in the cluster of the
// job, until Commit has returned a HostsUpdatedError in every worker, while a new worker waits to
// join.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var b bench
	flag.IntVar(&b.kills, "kills", 200, "workers to kill")
	flag.IntVar(&b.joins, "joins", 40, "times to add a host")
	flag.IntVar(&b.arrivals, "arrivals", 20, "times to start an agent on another host")
	flag.IntVar(&b.workers, "workers", 4, "workers of the job; at least 2")
	flag.IntVar(&b.size, "size", 256, "weights of the model, of 4 bytes each")
	flag.IntVar(&b.ballast, "ballast", 0, "MB of other state")
	flag.StringVar(&b.change, "change", "few", "what a step changes of that: none, few (numbers) or all")
	flag.IntVar(&b.microbatches, "microbatches", 0, "train by elastic.Steps of so many microbatches, a power of two")
	flag.IntVar(&b.spares, "spares", 0, "spare workers that wait when one is killed, on another host")
	flag.DurationVar(&b.beside, "beside", 0, "with -spares: kill as many again in jobs whose spares run tasks that take so long, in turns with the others; negative: that compute for so long")
	flag.BoolVar(&b.late, "late", false, "give elastic.Init the option Late")
	flag.DurationVar(&b.stepTime, "step-time", time.Millisecond, "time of a step besides communication; negative: a step computes for so long")
	flag.DurationVar(&b.interval, "discovery-interval", 50*time.Millisecond, "pause between two runs of the discovery script")
	flag.Uint64Var(&b.seed, "seed", 1, "of the dice that say who is killed when")
	flag.StringVar(&b.tsv, "tsv", "", "file for a line of times for each kill and join")
	flag.StringVar(&b.built, "programs", "", "directory of hvdrun, trainer and tasker, so that trees can be measured in turns; empty: built from this tree")
	flag.BoolVar(&b.keep, "keep", false, "keep the jobs' step logs, events and logs")
	flag.Parse()
	if err := b.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "recovery:", err)
		stop()
		os.Exit(1)
	}
}

// bench is the flags and the directory of the jobs.
type bench struct {
	kills, joins, arrivals int
	workers, size, ballast int
	change                 string
	late                   bool
	microbatches, spares   int
	beside                 time.Duration
	tasks                  bool                   // of the job that is being measured
	ran                    int                    // tasks so far, in whole fifties
	steps                  map[bool]report.Spread // time of a step, without tasks and with them
	stepTime, interval     time.Duration
	seed                   uint64
	tsv, built             string
	keep                   bool

	programs follow.Programs
	dir      string
	resident map[string]int64 // most bytes of a worker, by kind of job
}

// killsPerJob keeps the step logs short.
const killsPerJob = 20

func (b *bench) run(ctx context.Context) (err error) {
	if b.workers < 2 {
		return errors.New("at least 2 workers are needed")
	}
	b.steps = make(map[bool]report.Spread)
	if b.dir, err = os.MkdirTemp("", "hvdrun-recovery-"); err != nil {
		return err
	}
	if b.built != "" {
		b.programs = follow.Programs{Hvdrun: filepath.Join(b.built, "hvdrun"), Trainer: filepath.Join(b.built, "trainer"), Tasker: filepath.Join(b.built, "tasker")}
	} else if b.programs, err = follow.Build(ctx, b.dir); err != nil {
		return errors.Join(err, os.RemoveAll(b.dir))
	}
	if !slices.Contains([]string{"none", "few", "all"}, b.change) {
		return fmt.Errorf("-change %s: none, few or all", b.change)
	}
	if b.beside != 0 && b.spares == 0 {
		return errors.New("-beside needs -spares, which run the tasks")
	}
	var deaths, busy, growths, arrivals []sample
	for left := b.kills; left > 0; left -= killsPerJob {
		more, err := b.killSome(ctx, min(left, killsPerJob))
		if err != nil {
			return err
		}
		deaths = append(deaths, more...)
		fmt.Fprintf(os.Stderr, "\r%d of %d kills ", len(deaths), b.kills)
		if b.beside == 0 {
			continue
		}
		b.tasks = true
		more, err = b.killSome(ctx, min(left, killsPerJob))
		if b.tasks = false; err != nil {
			return err
		}
		busy = append(busy, more...)
	}
	for left := b.joins; left > 0; left -= killsPerJob {
		more, err := b.growSome(ctx, min(left, killsPerJob))
		if err != nil {
			return err
		}
		growths = append(growths, more...)
		fmt.Fprintf(os.Stderr, "\r%d of %d joins ", len(growths), b.joins)
	}
	if b.arrivals > 0 {
		if arrivals, err = b.arriveSome(ctx, b.arrivals); err != nil {
			return err
		}
	}
	fmt.Fprintln(os.Stderr)
	fmt.Printf("%d workers of %d weights, %v a step besides communication; %d CPUs\n", b.workers, b.size, b.stepTime, runtime.NumCPU())
	if b.ballast > 0 {
		fmt.Printf("%d MB of other state, of which each step changes %s\n", b.ballast, b.change)
	}
	for _, k := range []struct {
		samples []sample
		report  func(io.Writer, []sample)
	}{{deaths, b.reportDeaths}, {busy, b.reportBusy}, {growths, b.reportGrowths}, {arrivals, b.reportArrivals}} {
		if len(k.samples) > 0 {
			k.report(os.Stdout, k.samples)
		}
	}
	b.reportMemory(os.Stdout)
	return errors.Join(b.writeTSV(deaths, growths, arrivals), b.remove(b.dir))
}

// remove removes a directory, or reports that it is kept.
func (b *bench) remove(dir string) error {
	if b.keep {
		fmt.Fprintln(os.Stderr, "kept:", dir)
		return nil
	}
	return os.RemoveAll(dir)
}
