package elastic

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// disturbed runs a loop in a world of one. Each call of at ends the loop's current run in the next
// of the given ways, until all have been used. disturbed returns how often the state says that each
// step was done.
func disturbed(t *testing.T, ways string, parts []Part, train func(at func(place byte) error, s *State, done map[string]int) error) map[string]int {
	t.Helper()
	m, done := newScript(), map[string]int{}
	m.joins = make([]error, len(ways)+1)
	w := start(t, m)
	state := NewState(w, append(parts, Value("done", &done))...)
	err := Run(t.Context(), state, func(context.Context) error {
		return train(func(place byte) error {
			if ways == "" || ways[0] != place {
				return nil
			}
			ways = ways[1:]
			if place == 'h' { // the next Commit or CheckHostUpdates reports a change of hosts
				m.update = notify.Update{Seq: m.update.Seq + 1, Change: plan.Added}
				return nil
			}
			return errGone
		}, state, done)
	})
	if err != nil || ways != "" {
		t.Fatalf("%v, left %q", err, ways)
	}
	return done
}

func eachOnce(t *testing.T, name string, done map[string]int, want int) {
	t.Helper()
	for step, n := range done {
		if n != 1 {
			t.Errorf("%s: step %s was done %d times", name, step, n)
		}
	}
	if len(done) != want {
		t.Errorf("%s: %d steps, want %d: %v", name, len(done), want, done)
	}
}

// TestCount: the natural loop does each step once, whether it is interrupted before a step's
// commit, after it, or by a change of hosts.
func TestCount(t *testing.T) {
	for _, ways := range []string{"", "b", "a", "h", "hbaahhbab", "c", "cch"} {
		eachOnce(t, ways, disturbed(t, ways, []Part{Value("step", new(int))}, func(at func(byte) error, s *State, done map[string]int) error {
			for step := range s.Count("step", 20) {
				if err := errors.Join(at('b'), at('h')); err != nil {
					return err
				}
				done[fmt.Sprint(step)]++
				if step%3 == 2 { // not every step has its own commit
					if err := s.CheckHostUpdates(); err != nil {
						return err
					}
					if err := at('c'); err != nil {
						return err
					}
					continue
				}
				if err := s.Commit(); err != nil {
					return err
				}
				if err := at('a'); err != nil {
					return err
				}
			}
			return nil
		}), 20)
	}
}

// TestCountNested: an outer loop over epochs and an inner loop over batches. After the batches of
// an epoch follow a step with its own commit and a break out of the inner loop.
func TestCountNested(t *testing.T) {
	for _, ways := range []string{"", "b", "a", "h", "e", "f", "g", "bahefbahefg"} {
		parts := []Part{Value("epoch", new(int)), Value("batch", new(int))}
		eachOnce(t, ways, disturbed(t, ways, parts, func(at func(byte) error, s *State, done map[string]int) error {
			for epoch := range s.Count("epoch", 4) {
				for batch := range s.Count("batch", 5) {
					if epoch == 2 && batch == 3 {
						break
					}
					if err := errors.Join(at('b'), at('h')); err != nil {
						return err
					}
					done[fmt.Sprint(epoch, batch)]++
					if err := s.Commit(); err != nil {
						return err
					}
					if err := at('a'); err != nil {
						return err
					}
				}
				if err := errors.Join(at('e'), at('h')); err != nil {
					return err
				}
				done[fmt.Sprint(epoch)]++
				if epoch != 1 { // otherwise the loop counts the epoch at the end of its body
					if err := s.Commit(); err != nil {
						return err
					}
				}
				if err := at('f'); err != nil {
					return err
				}
			}
			return at('g')
		}), 4*5-2+4)
	}
}

// TestCountOfNoPart: a loop over a part that the state does not have is an error, and does not
// count as the end of training.
func TestCountOfNoPart(t *testing.T) {
	for _, parts := range [][]Part{nil, {Value("step", new(int64))}, {Tensor("step", []int32{1})}} {
		s := NewState(start(t, newScript()), parts...)
		err := Run(t.Context(), s, func(context.Context) error {
			for range s.Count("step", 3) {
				t.Error("a step was done")
			}
			return nil
		})
		if err == nil || !strings.Contains(err.Error(), `no part elastic.Value("step", …) of an int`) {
			t.Error(err)
		}
	}
}

// TestTensorVar: if the program has assigned another slice to the variable of a tensor, the next
// commit returns an error.
func TestTensorVar(t *testing.T) {
	for name, assign := range map[string]func(*[]float32){
		"append": func(w *[]float32) { *w = append(*w, 1) },
		"make":   func(w *[]float32) { *w = make([]float32, 4) },
		"less":   func(w *[]float32) { *w = (*w)[:3] },
		"nil":    func(w *[]float32) { *w = nil },
	} {
		weights := make([]float32, 4, 8)
		s := NewState(start(t, newScript()), TensorVar("weights", &weights))
		err := Run(t.Context(), s, func(context.Context) error {
			weights[0], weights = 7, append(weights[:2], 3, 4) // the same slice
			if err := s.Commit(); err != nil {
				t.Error(err)
			}
			assign(&weights)
			return s.Commit()
		})
		if err == nil || !strings.Contains(err.Error(), `tensor "weights": the program has assigned another slice`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s := NewState(start(t, newScript()), TensorVar[int8]("none", nil)); s.Commit() == nil {
		t.Error("a commit of a nil tensor")
	}
}

// TestMainStatus: only some errors of train count as a failure of the program.
func TestMainStatus(t *testing.T) {
	for err, want := range map[error]int{
		nil: 0, ErrRemoved: 0, ErrFinished: 0, fmt.Errorf("training: %w", ErrRemoved): 0,
		errors.New("no data"): 1, context.Canceled: 1, &collective.AbortedError{}: 1, &CheckpointError{}: 1,
	} {
		if got := exitStatus(err); got != want {
			t.Errorf("%v: status %d, want %d", err, got, want)
		}
	}
}
