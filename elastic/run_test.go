package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// script is a meeting of worlds of one with given outcomes.
type script struct {
	joins    []error // of the second join and later ones; then ErrFinished
	connects []error // of each connect; then nil
	done     error   // result of a report of Done

	update   notify.Update
	joinings []line.Joining
	reports  chan report // buffered
	failure  string
	closed   int
}

type report struct {
	what                line.Report
	generation, commits uint64
}

func newScript() *script { return &script{reports: make(chan report, 100)} }

func (m *script) join(ctx context.Context, j line.Joining) (line.World, error) {
	m.joinings = append(m.joinings, j)
	if n := len(m.joinings) - 2; n >= 0 {
		err := line.ErrFinished
		if n < len(m.joins) {
			err = m.joins[n]
		}
		if err != nil {
			return line.World{}, err
		}
	}
	w, err := solo{}.join(ctx, j)
	w.Seq = m.update.Seq
	return w, err
}

func (m *script) connect(ctx context.Context, w line.World) (*collective.Group, error) {
	if len(m.connects) > 0 {
		err := m.connects[0]
		if m.connects = m.connects[1:]; err != nil {
			return nil, err
		}
	}
	return solo{}.connect(ctx, w)
}

func (m *script) Report(_ context.Context, r line.Report, generation, commits uint64) error {
	m.reports <- report{r, generation, commits}
	if r == line.Done {
		return m.done
	}
	return nil
}

func (m *script) ReportFailure(_ context.Context, text string) error {
	m.failure = text
	return nil
}

func (m *script) Connected(context.Context) bool       { return true }
func (m *script) Latest() notify.Update                { return m.update }
func (m *script) Loss() (notify.Loss, <-chan struct{}) { return notify.Loss{}, nil }

func (m *script) close() error {
	m.closed++
	return nil
}

// said closes the reports, and returns them. The worker must be closed.
func (m *script) said() []report {
	close(m.reports)
	var said []report
	for r := range m.reports {
		said = append(said, r)
	}
	return said
}

func start(t *testing.T, m meeting) *Worker {
	t.Helper()
	w, err := newWorker(t.Context(), m).arrive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

var errGone error = &collective.AbortedError{Dead: []int{1}}

// TestRunNamesHiddenErrors: if an error of train hides the reason why the world has ended, Run's
// error and the report to the driver name the mistake. Other errors are returned unchanged.
func TestRunNamesHiddenErrors(t *testing.T) {
	for want, train := range map[string]func(w *Worker, m *script, s *State) error{
		"step 3: collective: generation 0 aborted: rank 0 is gone: no route (the world was aborted during this step: return collective's errors as they are, or wrap them with %w)": func(w *Worker, _ *script, _ *State) error {
			w.group().Abort(errors.New("no route"))
			return fmt.Errorf("step 3: %v", collective.Barrier(t.Context(), w.Group()))
		},
		"elastic: hosts updated: added (the hosts have changed: return Commit's error as it is, or wrap it with %w)": func(_ *Worker, m *script, s *State) error {
			m.update = notify.Update{Seq: 1, Change: plan.Added}
			return errors.New(s.Commit().Error())
		},
		"no data": func(*Worker, *script, *State) error { return errors.New("no data") },
	} {
		m := newScript()
		w := start(t, m)
		s := NewState(w, Value("step", new(int)))
		err := Run(t.Context(), s, func(context.Context) error { return train(w, m, s) })
		if err == nil || err.Error() != want || m.failure != want {
			t.Errorf("%v, and the driver hears %q, want %s", err, m.failure, want)
		}
	}
	m := newScript()
	func() {
		defer func() { _ = recover() }()
		_ = Run(t.Context(), NewState(start(t, m)), func(context.Context) error { panic("a mistake") })
	}()
	if !regexp.MustCompile(`^panic \(run_test.go:\d+\)$`).MatchString(m.failure) {
		t.Errorf("the driver hears %q", m.failure)
	}
}

// TestEarlyReturnIsNamed: if one rank's training function has returned while another rank waits in
// an operation, the error says so. It names no operation that the program has not called.
func TestEarlyReturnIsNamed(t *testing.T) {
	workers := stillWorld(t, 2, 0)
	errs := errorsOf(2, func(r int) error {
		return Run(t.Context(), NewState(workers[r]), func(ctx context.Context) error {
			if r == 1 {
				return nil
			}
			return collective.AllReduce(ctx, workers[r].Group(), make([]float32, 10), collective.Sum)
		})
	})
	want := "rank 0 calls AllReduce of 10 float32 (sum), rank 1 calls nothing, as its training function has returned"
	for r, err := range errs {
		if err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("rank %d: %v, want %s", r, err, want)
		}
	}
}

func TestInitAlone(t *testing.T) {
	w, err := Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if w.Rank() != 0 || w.Size() != 1 || w.LocalSize() != 1 || w.CrossSize() != 1 || w.Host() == "" || w.Generation() != 1 {
		t.Errorf("%+v", *w.member.Load())
	}
	trained := 0
	if err := Run(t.Context(), NewState(w), func(context.Context) error { trained++; return nil }); err != nil || trained != 1 {
		t.Errorf("trained %d times: %v", trained, err)
	}
	for range 2 {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := Init(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Init with an ended context: %v", err)
	}
}

func TestInitJoinsAgainWhereConnectFails(t *testing.T) {
	m := newScript()
	m.connects = []error{errGone, errors.New("no route")}
	m.joins = []error{nil, nil}
	w := start(t, m)
	if w.Generation() != 3 || len(m.joinings) != 3 {
		t.Fatalf("generation %d, joined %+v", w.Generation(), m.joinings)
	}
	if last := m.joinings[2]; last.After != 2 || last.Cause != "no route" || last.HoldsState {
		t.Errorf("joined with %+v", last)
	}
	if err := w.Close(); err != nil || m.closed != 1 {
		t.Errorf("%v, closed %d times", err, m.closed)
	}
}

func TestInitDismissed(t *testing.T) {
	for _, test := range []struct{ given, want error }{
		{fmt.Errorf("dismissed: %w", line.ErrRemoved), ErrRemoved},
		{line.ErrFinished, ErrFinished},
		{errGone, errGone},
	} {
		m := newScript()
		m.connects, m.joins = []error{errGone}, []error{test.given}
		if w, err := newWorker(t.Context(), m).arrive(t.Context()); w != nil || !errors.Is(err, test.want) {
			t.Errorf("%v: %v", test.given, err)
		}
		if said := m.said(); m.closed != 1 || len(said) != 0 {
			t.Errorf("closed %d times, said %v", m.closed, said)
		}
	}
}

// After a loss of peers Run restores the last commit. After a change of hosts it keeps the live
// state. The driver receives all reports.
func TestRunGoesOn(t *testing.T) {
	m := newScript()
	m.joins = []error{nil, nil, nil, nil, nil}
	w := start(t, m)
	step, resets := 10, 0
	s := NewState(w, Value("step", &step))
	s.OnReset(func() error {
		if resets++; resets == 2 {
			return fmt.Errorf("in the callback: %w", errGone) // a failure during a reset
		}
		return nil
	})
	var began []int
	err := Run(t.Context(), s, func(context.Context) error {
		began = append(began, step)
		switch len(began) {
		case 1:
			step++
			return fmt.Errorf("before any commit: %w", errGone)
		case 2:
			for range 3 {
				step++
				if err := s.Commit(); err != nil {
					return err
				}
			}
			step += 100
			return errGone
		case 3:
			step += 10
			m.update = notify.Update{Seq: 1, Change: plan.Added}
			err := s.CheckHostUpdates()
			if err == nil {
				t.Error("the update is not heard")
			}
			return fmt.Errorf("left: %w", err)
		}
		step++
		return s.Commit()
	})
	if err != nil {
		t.Fatal(err)
	}
	// Training begins at 10, and after the first reset again at 10. Three commits follow, so resets
	// 2 and 3 restore 13. The change of hosts keeps the live 23, and the last step is 24.
	if want := []int{10, 10, 13, 23}; !slices.Equal(began, want) || step != 24 || s.Commits() != 4 || resets != 4 {
		t.Errorf("training began at %v, want %v; step %d, commit %d, %d resets", began, want, step, s.Commits(), resets)
	}
	for i, want := range []line.Joining{
		{},
		{After: 1, HoldsState: true},
		{After: 2, Commits: 3, HoldsState: true},
		{After: 3, Commits: 3, HoldsState: true},
		{After: 4, Commits: 3, HoldsState: true, Cause: "left: elastic: hosts updated: added"},
	} {
		got := m.joinings[i]
		if want.Cause == "" {
			got.Cause = ""
		}
		if got.After != want.After || got.Commits != want.Commits || got.HoldsState != want.HoldsState || got.Cause != want.Cause {
			t.Errorf("join %d: %+v, want %+v", i, got, want)
		}
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	said := m.said()
	slices.SortFunc(said, func(a, b report) int {
		return int(a.what)*100 + int(a.generation) - int(b.what)*100 - int(b.generation)
	})
	want := []report{{line.Done, 5, 4}, {line.Committed, 2, 1}, {line.Committed, 5, 4}}
	if !slices.Equal(said, want) {
		t.Errorf("said %v, want %v", said, want)
	}
}

// All results of Run, with the state and the reports of each.
func TestRunEnds(t *testing.T) {
	errUser := errors.New("user")
	for name, test := range map[string]struct {
		joins []error
		done  error
		train func(ctx context.Context, end context.CancelFunc, s *State, step *int) error
		want  error
		step  int
		said  []line.Report
	}{
		"training is done": {
			train: func(_ context.Context, _ context.CancelFunc, _ *State, step *int) error { *step = 1; return nil },
			step:  1, said: []line.Report{line.Done},
		},
		"an error of training": {
			train: func(_ context.Context, _ context.CancelFunc, _ *State, step *int) error { *step = 1; return errUser },
			want:  errUser, step: 1, said: []line.Report{line.Leaving},
		},
		"removed": {
			joins: []error{line.ErrRemoved},
			train: func(_ context.Context, _ context.CancelFunc, _ *State, step *int) error {
				*step = 1
				return &HostsUpdatedError{Change: plan.Removed}
			},
			want: ErrRemoved, step: 1,
		},
		"the job is done without it": {
			joins: []error{line.ErrFinished},
			train: func(_ context.Context, _ context.CancelFunc, _ *State, step *int) error { *step = 1; return errGone },
			want:  ErrFinished,
		},
		"the driver is gone": {
			joins: []error{errUser},
			train: func(context.Context, context.CancelFunc, *State, *int) error { return errGone },
			want:  errUser, said: []line.Report{line.Leaving},
		},
		"the driver does not hear that it is done": {
			done:  errUser,
			train: func(context.Context, context.CancelFunc, *State, *int) error { return nil },
			want:  errUser, said: []line.Report{line.Done, line.Leaving},
		},
		"the context ends": {
			joins: []error{nil, nil},
			train: func(_ context.Context, end context.CancelFunc, s *State, _ *int) error { end(); return errGone },
			want:  context.Canceled, said: []line.Report{line.Leaving},
		},
		"the last barrier breaks, and the job is done": {
			joins: []error{line.ErrFinished},
			train: func(_ context.Context, _ context.CancelFunc, s *State, step *int) error {
				*step = 1
				s.worker.Group().Abort(errUser)
				return nil
			},
			step: 1,
		},
		"the last barrier breaks, and the job goes on": {
			joins: []error{nil},
			train: func(_ context.Context, _ context.CancelFunc, s *State, step *int) error {
				if *step++; s.worker.Generation() == 1 {
					s.worker.Group().Abort(errUser)
				}
				return nil
			},
			step: 1, said: []line.Report{line.Done},
		},
		"the last barrier breaks, and there is no place": {
			joins: []error{line.ErrRemoved},
			train: func(_ context.Context, _ context.CancelFunc, s *State, _ *int) error {
				s.worker.Group().Abort(errUser)
				return nil
			},
			want: ErrRemoved,
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newScript()
			m.joins, m.done = test.joins, test.done
			w, step := start(t, m), 0
			s := NewState(w, Value("step", &step))
			ctx, end := context.WithCancel(t.Context())
			defer end()
			err := Run(ctx, s, func(ctx context.Context) error { return test.train(ctx, end, s, &step) })
			if !errors.Is(err, test.want) || step != test.step {
				t.Errorf("%v at step %d, want %v at %d", err, step, test.want, test.step)
			}
			if err != nil && collective.Barrier(t.Context(), w.Group()) == nil {
				t.Error("the group is still whole")
			}
			for range 2 {
				if err := w.Close(); err != nil {
					t.Error(err)
				}
			}
			var said []line.Report
			for _, r := range m.said() {
				said = append(said, r.what)
			}
			if !slices.Equal(said, test.said) || m.closed != 1 {
				t.Errorf("said %v, want %v; closed %d times", said, test.said, m.closed)
			}
			if err := Run(t.Context(), s, nil); err == nil || !strings.Contains(err.Error(), "after the worker was closed") {
				t.Errorf("Run after Close: %v", err)
			}
		})
	}
}

func TestRunOfOnResetThatFails(t *testing.T) {
	m, errUser := newScript(), errors.New("user")
	m.joins = []error{nil}
	w := start(t, m)
	defer w.Close()
	s := NewState(w)
	s.OnReset(func() error { return errUser })
	if err := Run(t.Context(), s, func(context.Context) error { return errGone }); err != errUser {
		t.Error(err)
	}
}

func TestRunOnce(t *testing.T) {
	w := start(t, newScript())
	defer w.Close()
	s := NewState(w)
	err := Run(t.Context(), s, func(ctx context.Context) error {
		if err := Run(ctx, s, nil); err == nil || !strings.Contains(err.Error(), "while another Run") {
			t.Errorf("Run inside Run: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := Run(t.Context(), s, nil); err == nil || !strings.Contains(err.Error(), "after the worker's job had ended") {
		t.Errorf("Run after Run: %v", err)
	}
}

// After a failed Run, the next Run first enters a new world with the live state.
func TestRunAfterAFailedRun(t *testing.T) {
	m := newScript()
	m.joins = []error{nil}
	w, step := start(t, m), 0
	defer w.Close()
	s, errUser := NewState(w, Value("step", &step)), errors.New("user")
	if err := Run(t.Context(), s, func(context.Context) error { step = 5; return errUser }); err != errUser {
		t.Fatal(err)
	}
	if err := Run(t.Context(), s, func(context.Context) error { return nil }); err != nil || step != 5 || w.Generation() != 2 {
		t.Errorf("%v at step %d in generation %d", err, step, w.Generation())
	}
}

// The peers of a rank that panics, exits or returns its own error do not wait for it.
func TestRunFreesThePeers(t *testing.T) {
	for name, leave := range map[string]func() error{
		"panic": func() error { panic("user") },
		"error": func() error { return errors.New("user") },
	} {
		workers := stillWorld(t, 2, 0)
		errs := errorsOf(2, func(r int) (err error) {
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("%v", p)
				}
			}()
			return Run(t.Context(), NewState(workers[r]), func(ctx context.Context) error {
				if r == 1 {
					return leave()
				}
				return collective.Barrier(ctx, workers[0].Group())
			})
		})
		if errs[1] == nil || errs[1].Error() != "user" || !errors.Is(errs[0], ErrFinished) {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

// slow is a meeting whose second world takes long.
type slow struct{ solo }

func (slow) join(ctx context.Context, j line.Joining) (line.World, error) {
	if j.After > 0 {
		<-time.After(17 * time.Second)
	}
	return solo{}.join(ctx, j)
}

func TestLongWaitsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, slow{})
		var out bytes.Buffer
		log := logrus.New()
		log.SetOutput(&out)
		w.log = log
		began := time.Now()
		err := Run(t.Context(), NewState(w), func(context.Context) error {
			if w.Generation() == 1 {
				return errGone
			}
			return nil
		})
		if err != nil || time.Since(began) != 17*time.Second {
			t.Fatalf("%v after %v", err, time.Since(began))
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		text := out.String()
		for _, want := range []string{"waiting for a new world since 5s", "waiting for a new world since 10s"} {
			if !strings.Contains(text, want) {
				t.Errorf("%q is not in %s", want, text)
			}
		}
		if n := strings.Count(text, "\n"); n != 2 {
			t.Errorf("%d lines: %s", n, text)
		}
	})
}

// deaf is a meeting whose driver is unreachable. It delays Close by at most closeGrace.
type deaf struct{ solo }

func (deaf) Report(ctx context.Context, _ line.Report, _, _ uint64) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestCloseDoesNotWaitForADeafDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, deaf{})
		if err := NewState(w, Tensor("x", []int8{1})).Commit(); err != nil { // the report of the commit is pending
			t.Fatal(err)
		}
		began := time.Now()
		if err := w.Close(); err != nil || time.Since(began) != closeGrace {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}
