package torchrun

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// lives counts the lives of each rank, and the workers that were told each number of restarts.
type lives struct {
	mu     sync.Mutex
	of     map[string]int
	told   map[int]int
	places map[string]bool // error files
}

// begin returns the rank of a worker, and how many lives it has had before.
func (l *lives) begin(t *testing.T, s *launch.Spec) (rank string, before int) {
	rank, _ = lookup(s.Env, "RANK")
	text, _ := lookup(s.Env, "TORCHELASTIC_RESTART_COUNT")
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Error(err)
	}
	file, _ := lookup(s.Env, "TORCHELASTIC_ERROR_FILE")
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told[n]++
	l.places[file] = true
	before = l.of[rank]
	l.of[rank]++
	return rank, before
}

// TestOneRestartCount: after a worker of one node has died, and after workers of both have, all
// workers of the next round are told the same number of restarts, and a round counts once.
func TestOneRestartCount(t *testing.T) {
	for name, nodes := range map[string]func(*testing.T, launch.Launcher) []*Agent{
		"static":  func(t *testing.T, f launch.Launcher) []*Agent { return static(t, []int{2, 2}, f) },
		"dynamic": func(t *testing.T, f launch.Launcher) []*Agent { return pair(t, f) },
	} {
		t.Run(name, func(t *testing.T) {
			l := &lives{of: map[string]int{}, told: map[int]int{}, places: map[string]bool{}}
			f := &fake{}
			f.life = func(ctx context.Context, s *launch.Spec) error {
				switch rank, before := l.begin(t, s); {
				case before == 0 && rank == "3" || before == 1:
					return &launch.ExitError{Code: 1}
				case before == 2:
					return nil
				}
				<-ctx.Done()
				return &launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
			}
			var wg sync.WaitGroup
			for _, a := range nodes(t, f) {
				wg.Go(func() {
					if err := a.Run(t.Context()); err != nil {
						t.Error(err)
					}
					if a.machine.left != 1 {
						t.Errorf("%d restarts are left", a.machine.left)
					}
				})
			}
			wg.Wait()
			if want := map[int]int{0: 4, 1: 4, 2: 4}; !maps.Equal(l.told, want) {
				t.Errorf("workers that were told each number of restarts: %v", l.told)
			}
			if len(l.places) != 12 {
				t.Errorf("%d error files of 12 workers", len(l.places))
			}
		})
	}
}

// TestOneBudget: restarts that one node has used up are left on no other.
func TestOneBudget(t *testing.T) {
	l := &lives{of: map[string]int{}, told: map[int]int{}, places: map[string]bool{}}
	f := &fake{}
	f.life = func(ctx context.Context, s *launch.Spec) error {
		// The nodes fail in turns.
		if rank, before := l.begin(t, s); before%2 == 0 && rank == "0" || before%2 == 1 && rank == "2" {
			return &launch.ExitError{Code: 1}
		}
		<-ctx.Done()
		return &launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
	}
	var wg sync.WaitGroup
	ends := make([]error, 2)
	for i, a := range pair(t, f) {
		wg.Go(func() { ends[i] = a.Run(t.Context()) })
	}
	wg.Wait()
	failed, closed := 0, 0
	for _, err := range ends {
		var f *FailedError
		if errors.As(err, &f) {
			failed++
		} else if errors.Is(err, ErrClosed) {
			closed++
		}
	}
	if want := map[int]int{0: 4, 1: 4, 2: 4, 3: 4}; !maps.Equal(l.told, want) || failed != 1 || closed != 1 {
		t.Errorf("%v: %v", ends, l.told)
	}
}

// pair returns the agents of two nodes with two workers each, which may start again three times.
func pair(t *testing.T, f launch.Launcher) []*Agent {
	s := new(storetest.Memory)
	return []*Agent{meeting(t, s, 2, 2, 2, f), meeting(t, s, 2, 2, 2, f)}
}
