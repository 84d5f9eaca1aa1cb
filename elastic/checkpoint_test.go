package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/line"
)

// logs collects the workers' logs.
type logs struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.String()
}

// trained is one rank of a job with checkpoints.
type trained struct {
	weights []float32
	half    []int16
	step    int
	tags    map[string]int
	flag    bool
	sampler *Sampler
	user    *imaged
	state   *State
}

func (m *trained) at(n int) bool {
	return m.step == n && m.weights[len(m.weights)-1] == float32(n) && m.half[0] == int16(n) && m.tags["n"] == n && m.flag == (n%2 == 1) &&
		m.user.live == n
}

func (m *trained) advance() {
	m.state.Settle()
	m.step++
	m.weights[len(m.weights)-1], m.half[0], m.tags["n"], m.flag = float32(m.step), int16(m.step), m.step, m.step%2 == 1
	m.user.live = m.step
	m.sampler.Next()
}

// durableJob trains new ranks for some steps, with checkpoints in one folder per rank.
func durableJob(t *testing.T, log *logs, steps int, dirs ...string) ([]*trained, []error) {
	t.Helper()
	all := make([]*trained, len(dirs))
	workers := stillWorld(t, len(dirs), 0)
	errs := errorsOf(len(dirs), func(r int) error {
		w := workers[r]
		l := logrus.New()
		l.SetOutput(log)
		w.log = l
		m := &trained{weights: make([]float32, snapshot.ChunkSize/2), half: make([]int16, 3), tags: map[string]int{"n": 0}, user: &imaged{},
			sampler: NewSampler(1000, SamplerOptions{Shuffle: true})}
		all[r] = m
		c := Checkpoint(dirs[r])
		c.Interval = -1
		m.state = NewState(w, Tensor("weights", m.weights), c, Tensor("half", m.half), Value("step", &m.step), Value("tags", &m.tags),
			Value("flag", &m.flag), m.sampler, m.user)
		return Run(t.Context(), m.state, func(context.Context) error {
			if !m.at(m.step) || m.state.Commits() != uint64(m.step) {
				return fmt.Errorf("rank %d: a mix at step %d, commit %d", r, m.step, m.state.Commits())
			}
			for range steps {
				m.advance()
				if err := []func() error{m.state.Commit, m.state.CommitAsync}[m.step%2](); err != nil {
					return err
				}
			}
			return nil
		})
	})
	return all, errs
}

func ok(t *testing.T, errs []error) {
	t.Helper()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// All ranks of a new job continue from the newest intact checkpoint, whichever rank has it.
func TestCheckpoints(t *testing.T) {
	shared, other := t.TempDir(), t.TempDir()
	log := &logs{}
	all, errs := durableJob(t, log, 10, shared, shared)
	if ok(t, errs); !all[1].at(10) || all[1].sampler.Position() != 20 {
		t.Errorf("at step %d", all[1].step)
	}
	kept, err := checkpoint.List(shared)
	if err != nil || len(kept) == 0 || len(kept) > 3 || kept[0] != 10 {
		t.Fatal(kept, err)
	}
	if all, errs = durableJob(t, log, 5, shared, shared); !all[0].at(15) || !all[1].at(15) || all[1].sampler.Position() != 30 {
		t.Errorf("%v: at step %d, position %d", errs, all[1].step, all[1].sampler.Position())
	}
	ok(t, errs)
	// Rank 0 is on a host without checkpoints.
	if all, errs = durableJob(t, log, 1, other, shared, other); !all[0].at(16) || !all[2].at(16) || all[2].sampler.Position() != 33 {
		t.Errorf("%v: at step %d and %d, position %d", errs, all[0].step, all[2].step, all[2].sampler.Position())
	}
	ok(t, errs)
	text := log.String()
	for _, want := range []string{"there is no checkpoint in " + shared, "training goes on from commit 10, of " + checkpoint.Path(shared, 10), "commit 15"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %s", want, text)
		}
	}
}

// Truncated and damaged files are renamed on every rank, and the previous checkpoint is used.
func TestCheckpointsThatAreDamaged(t *testing.T) {
	dir, log := t.TempDir(), &logs{}
	_, errs := durableJob(t, log, 2, dir, dir)
	ok(t, errs)
	whole, err := os.ReadFile(checkpoint.Path(dir, 2))
	if err != nil {
		t.Fatal(err)
	}
	for range 6 {
		for n := range 3 { // newer ones, none of them intact
			b := slices.Clone(whole)
			if at := rand.IntN(len(b)); n == 0 {
				b = b[:at]
			} else {
				b[at] ^= 1 << rand.IntN(8)
			}
			if err := os.WriteFile(checkpoint.Path(dir, uint64(10+n)), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		all, errs := durableJob(t, log, 0, dir, dir)
		if ok(t, errs); !all[0].at(2) || !all[1].at(2) || all[0].state.Commits() != 2 {
			t.Fatalf("at step %d and %d", all[0].step, all[1].step)
		}
	}
	aside, _ := filepath.Glob(filepath.Join(dir, "*.damaged"))
	if left, err := checkpoint.List(dir); err != nil || !slices.Equal(left, []uint64{2, 1}) && !slices.Equal(left, []uint64{2}) || len(aside) != 3 {
		t.Errorf("%v, %v; aside %v", left, err, aside)
	}
	if n := strings.Count(log.String(), "it is set aside"); n != 18 {
		t.Errorf("%d lines about damage, want 18", n)
	}
}

// If no checkpoint is intact, no run of the job starts from the beginning before a user has removed
// the damaged files. An intact file with the name of another commit does not count as damaged: the
// error says which name it needs.
func TestCheckpointsOfWhichNoneIsIntact(t *testing.T) {
	dir, none, log := t.TempDir(), t.TempDir(), &logs{}
	_, errs := durableJob(t, log, 4, dir, dir)
	ok(t, errs)
	whole, err := os.ReadFile(checkpoint.Path(dir, 4))
	if err != nil {
		t.Fatal(err)
	}
	all, err := checkpoint.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(want ...string) {
		t.Helper()
		_, errs := durableJob(t, log, 4, none, dir)
		for r, err := range errs {
			if err == nil || !strings.Contains(err.Error(), want[r]) {
				t.Fatalf("rank %d: %v, want %s", r, err, want[r])
			}
		}
	}
	for _, n := range all {
		if err := os.WriteFile(checkpoint.Path(dir, n), whole[:len(whole)-1], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		refused("no checkpoint of rank 1 is intact", "to start from the beginning: "+checkpoint.Path(dir, all[len(all)-1])+".damaged")
	}
	if err := os.WriteFile(checkpoint.Path(dir, 999), whole, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("rank 1 cannot continue from its checkpoint of commit 999", "has commit 4, not that of its name: give it the name commit-00000000000000000004.safetensors")
	if err := os.Rename(checkpoint.Path(dir, 999), checkpoint.Path(dir, 4)); err != nil {
		t.Fatal(err)
	}
	if got, errs := durableJob(t, log, 0, none, dir); !got[0].at(4) {
		t.Error(got[0].step, errs)
	}
	aside, err := checkpoint.Aside(dir)
	if err != nil || len(aside) != len(all) {
		t.Fatal(aside, err)
	}
	for _, path := range append(aside, checkpoint.Path(dir, 4)) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if got, errs := durableJob(t, log, 3, dir, dir); !got[0].at(3) {
		t.Error(got[0].step, errs)
	}
}

// An unwritable disk is logged during training, and is an error at its end.
func TestCheckpointsThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	log := &logs{}
	dir := filepath.Join(file, "below")
	workers := stillWorld(t, 1, 0)
	l := logrus.New()
	l.SetOutput(log)
	workers[0].log = l
	step := 0
	c := Checkpoint(dir)
	c.Interval = -1
	s := NewState(workers[0], Value("step", &step), c)
	s.holds = true // the folder is unreadable too
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		step++
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	var missing *CheckpointError
	if err := s.finish(nil); !errors.As(err, &missing) || missing.Commit != 100 || missing.Dir != dir || !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("%v", err)
	}
	if n := strings.Count(log.String(), "no checkpoint of commit"); n < 1 || n > 3 {
		t.Errorf("%d lines: %s", n, log)
	}
}

// A checkpoint of another program ends a new job and is not overwritten.
func TestCheckpointsThatDoNotFit(t *testing.T) {
	dir, step, name := t.TempDir(), 4, "x"
	run := func(parts ...Part) error {
		w := stillWorld(t, 1, 0)[0]
		w.log = quiet()
		c := Checkpoint(dir)
		s := NewState(w, append(parts, c)...)
		return Run(t.Context(), s, func(context.Context) error { return s.Commit() })
	}
	if err := run(Value("step", &step), Tensor("t", make([]int8, 4))); err != nil {
		t.Fatal(err)
	}
	for want, parts := range map[string][]Part{
		"has 2 parts, the state has 1":            {Value("step", &step)},
		`has "t", a tensor "t": []int8 of 4`:      {Value("step", &step), Tensor("t", make([]int8, 5))},
		`where the state has "step", a value`:     {Value("step", &name), Tensor("t", make([]int8, 4))},
		`a tensor "u": []int8 of 4`:               {Value("step", &step), Tensor("u", make([]int8, 4))},
		"part 1 (*elastic.userPart) cannot be in": {Value("step", &step), &userPart{}},
	} {
		if err := run(parts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if left, err := checkpoint.List(dir); err != nil || !slices.Equal(left, []uint64{1}) {
		t.Error(left, err)
	}
	if err := run(Value("step", &step), Tensor("t", make([]int8, 4))); err != nil {
		t.Error(err)
	}
}

// told is a meeting that records reports.
type told struct {
	meeting
	reports chan line.Report
}

func (m told) Report(_ context.Context, r line.Report, _, _ uint64) error {
	if r != line.Committed {
		m.reports <- r
	}
	return nil
}

// The driver learns that the last checkpoint is not on disk even while an earlier one is being
// written: a worker that is killed then has failed.
func TestLastCheckpointBehindAnother(t *testing.T) {
	m := told{solo{}, make(chan line.Report, 10)}
	w, err := newWorker(t.Context(), m).arrive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	c := Checkpoint(t.TempDir())
	s := NewState(w, Value("step", new(int)), c)
	s.holds = true
	if err := s.Commit(); err != nil {
		t.Fatal(err)
	}
	c.writing.Wait()
	if err := s.Commit(); err != nil {
		t.Fatal(err)
	}
	slow := make(chan struct{})
	c.mu.Lock()
	c.busy = true
	c.mu.Unlock()
	c.writing.Go(func() {
		<-slow
		c.end(1, nil)
	})
	ended := make(chan error)
	go func() { ended <- s.finish(nil) }()
	if r := <-m.reports; r != line.Writing {
		t.Error(r)
	}
	close(slow)
	if err := <-ended; err != nil || !c.has(2) {
		t.Error(err)
	}
	if r := <-m.reports; r != line.Written {
		t.Error(r)
	}
}

// Training continues while a checkpoint is written, and the next one does not begin too early.
func TestCheckpointsAreDue(t *testing.T) {
	c := Checkpoint("x")
	hurry := false
	c.hurry = func() bool { return hurry }
	if !c.due(1) || c.due(2) {
		t.Error("one at a time")
	}
	c.end(1, nil)
	if c.due(2) {
		t.Error("no pause")
	}
	if hurry = true; c.due(1) || !c.due(2) || c.due(3) {
		t.Error("the same twice, or a pause for who is in a hurry, or two at a time")
	}
	hurry = false
	c.end(2, errors.New("full"))
	if c.pause() != 30*time.Second {
		t.Error(c.pause())
	}
	for range 10 {
		c.end(3, errors.New("full"))
	}
	if c.Interval = -1; c.pause() != time.Minute {
		t.Error(c.pause())
	}
	c.end(3, nil)
	if c.pause() > 0 || !c.due(4) {
		t.Error(c.pause())
	}
}

// If two jobs use one folder at the same time, all ranks of the second end before it has changed
// anything. When the first has ended, the second continues from its checkpoint.
func TestTwoJobsInOneFolder(t *testing.T) {
	dir := t.TempDir()
	run := func(job string, train func(*State, *int) error) []error {
		workers := stillWorld(t, 2, 0)
		return errorsOf(2, func(r int) error {
			workers[r].log, workers[r].job = quiet(), job
			step := 0
			s := NewState(workers[r], Value("step", &step), Checkpoint(dir))
			return Run(t.Context(), s, func(context.Context) error { return train(s, &step) })
		})
	}
	count := func(s *State, step *int) error { *step++; return s.Commit() }
	began := 0
	ok(t, run("first", func(s *State, step *int) error {
		if s.worker.Rank() == 0 {
			errs := run("second", func(*State, *int) error { began++; return nil })
			var locked *checkpoint.LockedError
			if !errors.As(errs[0], &locked) || locked.Owner.Job != "first" || !strings.Contains(errs[0].Error(), "the job first writes into "+dir) {
				t.Errorf("rank 0: %v", errs[0])
			}
			if errs[1] == nil || errors.As(errs[1], &locked) || !strings.Contains(errs[1].Error(), "another job writes") {
				t.Errorf("rank 1: %v", errs[1])
			}
			ok(t, run("first", count)) // the previous rank 0 still holds the lock
		}
		return count(s, step)
	}))
	ok(t, run("second", func(s *State, step *int) error {
		if *step != 1 {
			t.Errorf("goes on at step %d", *step)
		}
		return count(s, step)
	}))
	if began > 0 {
		t.Error("the second has begun")
	}
}

// A running job that finds the folder locked continues without checkpoints, and returns an error at
// its end.
func TestFolderLockedLater(t *testing.T) {
	dir, log := t.TempDir(), &logs{}
	w := stillWorld(t, 1, 0)[0]
	l := logrus.New()
	l.SetOutput(log)
	w.log, w.job = l, "mine"
	lock, err := checkpoint.Acquire(dir, false, checkpoint.Owner{Job: "theirs", Process: "process 1 on b"})
	if err != nil {
		t.Fatal(err)
	}
	s := NewState(w, Value("step", new(int)), Checkpoint(dir))
	s.holds = true
	err = Run(t.Context(), s, func(context.Context) error { return s.Commit() })
	var locked *checkpoint.LockedError
	if !errors.As(err, new(*CheckpointError)) || !errors.As(err, &locked) || !strings.Contains(log.String(), "no checkpoint of commit 1: checkpoint: the job theirs writes into") {
		t.Errorf("%v\n%s", err, log)
	}
	lock.Release()
}

// After a save that failed, the state can still be read from a checkpoint.
func TestCheckpointAfterAFailedSave(t *testing.T) {
	dir := t.TempDir()
	_, errs := durableJob(t, &logs{}, 3, dir)
	ok(t, errs)
	w := stillWorld(t, 1, 0)[0]
	w.log = quiet()
	m := &trained{weights: make([]float32, snapshot.ChunkSize/2), half: make([]int16, 3), tags: map[string]int{"n": 0}, user: &imaged{},
		sampler: NewSampler(1000, SamplerOptions{Shuffle: true})}
	broken := errors.New("no room")
	s := NewState(w, Tensor("weights", m.weights), Checkpoint(dir), Tensor("half", m.half), Value("step", &m.step), Value("tags", &m.tags),
		Value("flag", &m.flag), m.sampler, m.user)
	if err := s.Save(); err != nil {
		t.Fatal(err)
	}
	m.user.fail = broken
	if err := s.Save(); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	m.user.fail = nil
	if err := s.Sync(t.Context()); err != nil || s.Commits() != 3 || !m.at(3) {
		t.Errorf("%v, commit %d, step %d", err, s.Commits(), m.step)
	}
}
