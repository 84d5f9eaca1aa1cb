package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// note is a line of a worker's steplog: the start or end of an operation.
type note struct {
	Generation uint64 `json:"g"`
	Time       int64  `json:"t"` // nanoseconds since 1970
	Ended      bool   `json:"e"`
}

// asWorker runs a worker that repeats an operation until the job is ended.
func asWorker(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("worker", flag.ContinueOnError)
	dir := flags.String("dir", ".", "folder of the step logs")
	driver := flags.String("driver", cuda.DefaultLibrary, "library of the driver")
	backend := flags.String("backend", "", "that is to be used; empty: the best")
	library := flags.String("nccl", "", "library of NCCL")
	n := flags.Int("n", 1<<20, "float32s of an operation")
	if err := flags.Parse(args); err != nil {
		return err
	}
	log, err := os.OpenFile(stepLogPath(*dir, os.Getpid()), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	devices, err := cuda.Devices(*driver)
	if err != nil {
		return err
	}
	config := cuda.Config{Library: *driver, NCCL: *library, Backend: *backend}
	if *backend == cuda.BackendNCCL { // every version of NCCL supports one rank per device
		config.Device = w.Slot() % len(devices)
	}
	d, err := cuda.Open(config)
	if err != nil {
		return err
	}
	defer d.Close()
	ones, err := cuda.Alloc[float32](d, *n)
	if err != nil {
		return err
	}
	v, err := cuda.Alloc[float32](d, *n)
	if err != nil {
		return err
	}
	if err := ones.CopyFrom(ctx, slices.Repeat([]float32{1}, *n)); err != nil {
		return err
	}
	steps := 0
	state := elastic.NewState(w, elastic.Value("steps", &steps))
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for {
			if err := operation(ctx, w, log, v, ones); err != nil {
				return err
			}
			steps++
			if err := state.Commit(); err != nil {
				return err
			}
		}
	})
}

func stepLogPath(dir string, pid int) string {
	return filepath.Join(dir, "operations."+strconv.Itoa(pid))
}

// operation sums ones and records the times.
func operation(ctx context.Context, w *elastic.Worker, log io.Writer, v, ones *cuda.Slice[float32]) error {
	if err := v.CopySlice(ctx, ones); err != nil {
		return err
	}
	say := func(ended bool) error {
		_, err := fmt.Fprintf(log, `{"g":%d,"t":%d,"e":%v}`+"\n", w.Generation(), time.Now().UnixNano(), ended)
		return err
	}
	if err := say(false); err != nil {
		return err
	}
	if err := cuda.AllReduce(ctx, w.Group(), v, collective.Sum); err != nil {
		return err
	}
	if err := say(true); err != nil {
		return err
	}
	end := make([]float32, 1)
	if err := v.Slice(v.Len()-1, v.Len()).CopyTo(ctx, end); err != nil {
		return err
	}
	if end[0] != float32(w.Size()) {
		return fmt.Errorf("the sum of %d ones is %v", w.Size(), end[0])
	}
	return nil
}

// kill is a kill of a worker.
type kill struct {
	generation uint64
	pid        int
	others     []int
	at         int64 // nanoseconds since 1970
}

const workers = 4

// kills is the check that runs a job of four workers on one device under the real driver and kills
// them one after the other during an operation. The time is from the kill to the end of the last
// survivor's first operation in a later world.
func kills(backend string) func(context.Context, *options) ([]figure, error) {
	return func(ctx context.Context, o *options) ([]figure, error) {
		dir, err := os.MkdirTemp(o.Temp, "kills")
		if err != nil {
			return nil, err
		}
		all, res, err := killSome(ctx, o, dir, backend)
		if _, why, found := strings.Cut(res.Output, " wants the backend "+cuda.BackendNCCL+": "); found {
			why, _, _ = strings.Cut(why, "\n")
			return nil, skipped{why}
		}
		if err != nil {
			return nil, err
		}
		return killFigures(o, dir, all, res)
	}
}

// killSome runs the job.
func killSome(ctx context.Context, o *options, dir, backend string) ([]kill, follow.Result, error) {
	n, count := 64<<20, 12
	switch {
	case o.Quick:
		n, count = 64<<10, 2
	case backend == cuda.BackendNCCL: // creating communicators takes time
		count = 6
	}
	self, err := os.Executable()
	if err != nil {
		return nil, follow.Result{}, err
	}
	command := []string{self, "worker", "-dir", dir, "-driver", o.Driver, "-n", strconv.Itoa(n), "-backend", backend, "-nccl", o.NCCL}
	if backend == cuda.BackendNCCL {
		command = append(append([]string{"env"}, sharing()...), command...)
	}
	job, err := follow.Programs{Hvdrun: filepath.Join(o.Bin, "hvdrun")}.Start(follow.Job{Dir: dir, Still: 2 * time.Minute,
		Flags: []string{"-np", strconv.Itoa(workers), "--min-np", "1", "-H", "localhost:" + strconv.Itoa(workers),
			"--blacklist-cooldown-range", "0.3,0.3", "--orphan-timeout", "20s"},
		Command: command})
	if err != nil {
		return nil, follow.Result{}, err
	}
	w := &watch{job: job, dir: dir, dice: rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0)), backend: backend,
		stepLogs: map[int]*steplog.Follower[note]{}, done: map[place]int{}}
	var all []kill
	var failed error
	for generation := uint64(0); len(all) < count && failed == nil; {
		var k kill
		if k, failed = w.settled(ctx, workers, generation); failed != nil {
			break
		}
		if failed = struck(ctx, dir, &k); failed == nil {
			all, generation = append(all, k), k.generation
		}
	}
	if failed == nil && len(all) > 0 { // the last survivors also enter their next world
		_, failed = w.settled(ctx, workers-1, all[len(all)-1].generation)
	}
	_ = syscall.Kill(job.PID, syscall.SIGINT) // fails if it has ended
	res, err := job.Wait()
	switch {
	case failed != nil:
		err = fmt.Errorf("%w: %s", failed, tail(res.Output))
	case err == nil && res.Status != 128+int(syscall.SIGINT):
		err = fmt.Errorf("the job ended with status %d: %s", res.Status, tail(res.Output))
	}
	return all, res, err
}

// watch is an observed job.
type watch struct {
	job      *follow.Running
	dir      string
	backend  string // required backend of a world; empty: any
	dice     *rand.Rand
	stepLogs map[int]*steplog.Follower[note] // by process
	done     map[place]int                   // number of completed operations
}

type place struct {
	pid        int
	generation uint64
}

// count returns the number of completed operations of a process in a generation.
func (w *watch) count(pid int, generation uint64) int {
	if w.stepLogs[pid] == nil {
		w.stepLogs[pid] = steplog.Follow[note](stepLogPath(w.dir, pid))
	}
	notes, _ := w.stepLogs[pid].Next()
	for _, of := range notes {
		if of.Ended {
			w.done[place{pid, of.Generation}]++
		}
	}
	return w.done[place{pid, generation}]
}

// settled waits for a world after a generation, with at least this number of workers and some
// completed operations, and selects one of its workers.
func (w *watch) settled(ctx context.Context, workers int, after uint64) (kill, error) {
	var k kill
	err := w.job.AwaitEvents(ctx, func(events []follow.Event) bool {
		k = kill{}
		for _, e := range events {
			if e.Name == "world_published" && e.Generation > after && e.Size >= workers {
				k = kill{generation: e.Generation}
				for _, s := range e.Slots {
					k.others = append(k.others, s.PID)
				}
			}
		}
		if w.backend != "" && len(k.others) > 1 && !slices.ContainsFunc(events, func(e follow.Event) bool {
			return e.Name == "backend" && e.Generation == k.generation && e.Backend == w.backend
		}) {
			return false
		}
		return k.generation > 0 && !slices.ContainsFunc(k.others, func(pid int) bool { return w.count(pid, k.generation) < 5 })
	})
	if err != nil {
		return k, err
	}
	i := w.dice.IntN(len(k.others))
	k.pid = k.others[i]
	k.others = slices.Delete(k.others, i, i+1)
	return k, nil
}

// struck kills the victim while it is in an operation, as far as its steplog shows.
func struck(ctx context.Context, dir string, k *kill) error {
	f := steplog.Follow[note](stepLogPath(dir, k.pid))
	for {
		notes, err := f.Next()
		if err != nil {
			return err
		}
		if len(notes) > 0 && !notes[len(notes)-1].Ended {
			break
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	k.at = time.Now().UnixNano()
	return syscall.Kill(k.pid, syscall.SIGKILL)
}

// killFigures determines from the step logs how the survivors continued.
func killFigures(o *options, dir string, all []kill, res follow.Result) ([]figure, error) {
	var times report.Spread
	inside := 0
	for _, k := range all {
		notes, err := steplog.Follow[note](stepLogPath(dir, k.pid)).Next()
		if err != nil {
			return nil, err
		}
		if len(notes) > 0 && !notes[len(notes)-1].Ended {
			inside++
		}
		last := int64(0)
		for _, pid := range k.others {
			notes, err := steplog.Follow[note](stepLogPath(dir, pid)).Next()
			if err != nil {
				return nil, err
			}
			i := slices.IndexFunc(notes, func(of note) bool { return of.Ended && of.Generation > k.generation })
			if i < 0 {
				return nil, fmt.Errorf("process %d has done nothing after the death of %d", pid, k.pid)
			}
			last = max(last, notes[i].Time)
		}
		times = append(times, time.Duration(last-k.at))
	}
	exits := 0
	for _, e := range res.Events {
		if e.Name == "worker_exited" && e.Cause == "failed" {
			exits++
		}
	}
	if exits > len(all) {
		return nil, errors.New("of the survivors some had to be restarted: " + tail(res.Output))
	}
	median := times.Quantile(0.5)
	return []figure{
		{Name: "workers killed, of 4", Value: float64(len(all))},
		{Name: "of these in the middle of an operation", Value: float64(inside)},
		figure{Name: "to the survivors' next operation, median", Value: report.Milliseconds(median), Unit: "ms"}.judged(o, "< 500 ms",
			median < 500*time.Millisecond),
		{Name: "to the survivors' next operation, worst", Value: report.Milliseconds(times.Quantile(1)), Unit: "ms"},
		{Name: "survivors restarted", Value: 0},
	}, nil
}
