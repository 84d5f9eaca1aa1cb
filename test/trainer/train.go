package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// waitPause is the polling interval of waits in which all workers take part.
const waitPause = 10 * time.Millisecond

// progress is the training state other than the weights.
type progress struct {
	Step  int
	Chain uint64
}

// own is the state that only this worker has.
type own struct {
	Place int // the first rank of its first owner
	Step  int
}

// training is the training of one worker.
type training struct {
	set     *settings
	worker  *elastic.Worker
	state   *elastic.State
	first   int // rank in the first world; -1: there was none yet
	log     *os.File
	weights []float32
	sum     []float32
	at      progress
	own     own
	held    int // the Place of own that was last used in training; -1: none yet
	since   int // the step after which own was taken over
	entered int // the step after which the world was entered
	said    int // lines of chatter so far
	lines   int // lines of print so far
	resets  int
	ballast []uint64 // the first element is the number of steps, unless no step changes it
	strikes strikes
	micro   *microbatches // nil: each step is one AllReduce
}

func newTraining(s *settings, w *elastic.Worker) (*training, error) {
	log, err := s.openLog()
	if err != nil {
		return nil, err
	}
	t := &training{
		set: s, worker: w, first: -1, log: log,
		weights: make([]float32, s.size), sum: make([]float32, s.size),
		own: own{Place: w.Rank()}, held: -1,
	}
	if s.struck {
		t.strikes.dir = s.dir
	}
	// A sync reaches the trap after the progress and before the weights: a worker that dies there
	// has sent its peers only half of the state.
	parts := []elastic.Part{elastic.Value("progress", &t.at)}
	if s.checkpoints != "" {
		parts = append(parts, &elastic.Checkpoints{Dir: s.checkpoints, Interval: s.pause})
	} else if s.microbatches == 0 || s.struck || s.faults.any() { // Steps cannot follow a state with such a part
		parts = append(parts, &trap{faults: &s.faults, at: &t.at, strikes: &t.strikes})
	}
	parts = append(parts, elastic.Tensor("weights", t.weights))
	if s.ballast > 0 {
		t.ballast = make([]uint64, s.ballast*1_000_000/8)
		for i := range t.ballast {
			t.ballast[i] = uint64(i) * 0x9e3779b97f4a7c15
		}
		t.ballast[0] = 0
		parts = append(parts, elastic.Tensor("ballast", t.ballast))
	}
	if s.local {
		parts = append(parts, elastic.Local("own", &t.own))
	}
	if s.microbatches > 0 {
		t.micro = newMicrobatches(t)
		parts = append(parts, t.micro.steps)
	}
	t.state = elastic.NewState(w, parts...)
	if s.faults.have("reset") {
		t.state.OnReset(func() error {
			t.resets++
			return s.faults.at("reset", t.resets)
		})
	}
	return t, nil
}

// train runs the remaining steps.
func (t *training) train(ctx context.Context) error {
	t.entered = t.at.Step
	if err := t.checkOwn(); err != nil {
		return err
	}
	if err := t.checkBallast(); err != nil {
		return err
	}
	if err := t.write(t.line(steplog.Enter)); err != nil {
		return err
	}
	for {
		if err := t.set.faults.at("step", t.at.Step); err != nil {
			return err
		}
		if err := t.wait(ctx); err != nil {
			return err
		}
		if t.at.Step >= t.set.steps {
			return nil
		}
		if err := t.step(ctx); err != nil {
			return err
		}
	}
}

// How a step changes the ballast.
const (
	changeNone = "none"
	changeAll  = "all"
)

// changeBallast changes the ballast in a step.
func (t *training) changeBallast(step int) {
	switch {
	case t.ballast == nil || t.set.change == changeNone:
	case t.set.change == changeAll:
		for i := range t.ballast {
			t.ballast[i]++
		}
	default:
		t.ballast[0] = uint64(step)
		t.ballast[uint64(step)*0x9e3779b97f4a7c15%uint64(len(t.ballast)-1)+1]++
	}
}

// checkBallast checks that the ballast belongs to the same step as the rest of the state.
func (t *training) checkBallast() error {
	if t.ballast == nil {
		return nil
	}
	step := t.at.Step
	if t.set.change == changeNone {
		step = 0
	}
	last := len(t.ballast) - 1
	switch {
	case t.ballast[0] != uint64(step):
		return fmt.Errorf("the ballast is of step %d, and the rest of step %d", t.ballast[0], step)
	case t.set.change == changeAll && last > 0 && t.ballast[last] != uint64(last)*0x9e3779b97f4a7c15+uint64(step):
		return fmt.Errorf("the end of the ballast is not of step %d", step)
	}
	return nil
}

// checkOwn checks that this worker's own state belongs to the same step as the shared state. The
// two can differ while the others wait for this worker.
func (t *training) checkOwn() error {
	switch {
	case t.held != t.own.Place:
		t.held, t.since = t.own.Place, t.at.Step
	case t.set.local && t.own.Step != t.at.Step && t.at.Step != t.since:
		return fmt.Errorf("what this worker alone has is of step %d, and the rest of step %d", t.own.Step, t.at.Step)
	}
	return nil
}

// chat prints a numbered line, in two pieces.
func (t *training) chat() {
	if t.set.chatter {
		t.said++
		fmt.Printf("chatter of %d: ", os.Getpid())
		fmt.Printf("line %d\n", t.said)
	}
}

func (t *training) step(ctx context.Context) error {
	t.chat()
	if err := t.print(); err != nil {
		return err
	}
	if t.set.stepTime < 0 {
		compute(-t.set.stepTime)
	} else if t.set.stepTime > 0 {
		time.Sleep(t.set.stepTime) // simulates computation
	}
	// The collective gets state that belongs to no step, so that its failure requires a rollback.
	next := t.at.Step + 1
	t.at.Step, t.at.Chain = next, steplog.Chain(t.at.Chain, next)
	t.own.Step = next
	t.state.Settle()
	steplog.Begin(t.weights)
	steplog.Share(t.sum, next, t.worker.Rank(), t.worker.Size())
	if err := collective.AllReduce(ctx, t.worker.Group(), t.sum, collective.Sum); err != nil {
		return err
	}
	if !steplog.IsTotal(t.sum, next) {
		return fmt.Errorf("the reduction of step %d in generation %d is wrong", next, t.worker.Generation())
	}
	steplog.Complete(t.weights, t.sum)
	t.changeBallast(next)

	l := t.line(steplog.Step)
	if next%t.set.commitEvery != 0 && next != t.set.steps {
		l.Outcome = steplog.None
		return t.write(l)
	}
	err := t.commit()
	l.Time = time.Now().UnixNano()
	var updated *elastic.HostsUpdatedError
	switch {
	case err == nil:
		l.Outcome = steplog.OK
	case errors.As(err, &updated):
		l.Outcome = steplog.Updated
	case errors.Is(err, collective.ErrAborted):
		l.Outcome = steplog.Aborted
	default:
		return err
	}
	return errors.Join(err, t.write(l))
}

// printed is the number of bytes of a line of print.
const printed = 1000

// print prints this step's share of the lines.
func (t *training) print() error {
	lines := t.set.print * 1_000_000 / printed / max(1, t.set.steps)
	out := bufio.NewWriterSize(os.Stdout, 1<<16)
	for range lines {
		t.lines++
		head := fmt.Sprintf("print of %d: line %d ", os.Getpid(), t.lines)
		fmt.Fprintf(out, "%s%s\n", head, strings.Repeat("x", printed-1-len(head)))
	}
	return out.Flush()
}

func (t *training) commit() error {
	if err := t.strikes.begin(t); err != nil {
		return err
	}
	defer t.strikes.end()
	if t.set.async {
		return t.state.CommitAsync()
	}
	return t.state.Commit()
}

// wait blocks until what the flags require after this step has happened.
func (t *training) wait(ctx context.Context) error {
	gate := t.set.gates[t.at.Step]
	hold := t.set.holds[t.at.Step] && t.at.Step > t.entered // a new world means that the change has happened
	for gate != "" || hold {
		if err := t.state.CheckHostUpdates(); err != nil {
			return err
		}
		if gate != "" {
			open := []uint8{0}
			if _, err := os.Stat(filepath.Join(t.set.dir, gate)); err == nil {
				open[0] = 1
			}
			if err := collective.AllReduce(ctx, t.worker.Group(), open, collective.Min); err != nil {
				return err
			}
			if open[0] == 1 {
				gate = ""
			}
		}
		time.Sleep(waitPause)
	}
	return nil
}

// finish records and prints the result.
func (t *training) finish() error {
	l := t.line(steplog.End)
	l.Digest = steplog.Digest(t.weights)
	if t.set.local {
		fmt.Printf("own=%d step=%d\n", t.own.Place, t.own.Step)
	}
	fmt.Printf("rank=%d size=%d step=%d chain=%s weights=%s\n", l.Rank, l.Size, l.Step, l.Chain, l.Digest)
	return l.Append(t.log)
}

// compute uses a processor for the time d. This takes longer if others use the processor too.
func compute(d time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	used := func() time.Duration {
		var t unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // a thread has one
		return time.Duration(t.Nano())
	}
	for began := used(); used()-began < d; {
	}
}
