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

// lives counts the workers of two nodes, two on each, by the number of restarts that they were
// given.
type lives struct {
	mu     sync.Mutex
	told   map[int]int
	all    [4]chan struct{} // by number of restarts: closed once all four workers run
	places map[string]bool  // paths of error files
}

func newLives() *lives {
	l := &lives{told: map[int]int{}, places: map[string]bool{}}
	for n := range l.all {
		l.all[n] = make(chan struct{})
	}
	return l
}

// begin returns a worker's rank and number of restarts once all workers of the round have begun: a
// node that has not started its workers when those of the other fail would skip the round.
func (l *lives) begin(t *testing.T, s *launch.Spec) (rank string, restarts int) {
	rank, _ = lookup(s.Env, "RANK")
	text, _ := lookup(s.Env, "TORCHELASTIC_RESTART_COUNT")
	n, err := strconv.Atoi(text)
	if err != nil || n >= len(l.all) {
		t.Errorf("%s restarts, %v", text, err)
		return rank, n
	}
	file, _ := lookup(s.Env, "TORCHELASTIC_ERROR_FILE")
	l.mu.Lock()
	l.places[file] = true
	if l.told[n]++; l.told[n] == 4 {
		close(l.all[n])
	}
	l.mu.Unlock()
	<-l.all[n]
	return rank, n
}

// TestOneRestartCount: after one node's worker has died, and after workers of both nodes have, all
// workers of the next round get the same number of restarts, and a failed round counts once.
func TestOneRestartCount(t *testing.T) {
	for name, nodes := range map[string]func(*testing.T, launch.Launcher) []*Agent{
		"static":  func(t *testing.T, f launch.Launcher) []*Agent { return static(t, []int{2, 2}, f) },
		"dynamic": func(t *testing.T, f launch.Launcher) []*Agent { return pair(t, f) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLives()
			f := &fake{}
			f.life = func(ctx context.Context, s *launch.Spec) error {
				switch rank, restarts := l.begin(t, s); {
				case restarts == 0 && rank == "3" || restarts == 1:
					return &launch.ExitError{Code: 1}
				case restarts == 2:
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

// TestOneBudget: the nodes share their restarts.
func TestOneBudget(t *testing.T) {
	l := newLives()
	f := &fake{}
	f.life = func(ctx context.Context, s *launch.Spec) error {
		// The nodes fail in turns.
		if rank, restarts := l.begin(t, s); restarts%2 == 0 && rank == "0" || restarts%2 == 1 && rank == "2" {
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

// pair returns the agents of two nodes with two workers each and three restarts.
func pair(t *testing.T, f launch.Launcher) []*Agent {
	s := new(storetest.Memory)
	return []*Agent{meeting(t, s, 2, 2, 2, f), meeting(t, s, 2, 2, 2, f)}
}
