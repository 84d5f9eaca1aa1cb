package notify

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

func update(seq uint64) Update { return Update{Seq: seq, Change: plan.Added, Generation: 3} }

func TestServiceKeepsTheHighest(t *testing.T) {
	s := NewService()
	for _, step := range []struct{ heard, want uint64 }{{0, 0}, {3, 3}, {2, 3}, {3, 3}, {7, 7}, {1, 7}} {
		s.Update(update(step.heard))
		if got := s.Latest().Seq; got != step.want {
			t.Errorf("after %d: %d, want %d", step.heard, got, step.want)
		}
	}
	s.Update(Update{Seq: 7})
	if s.Latest() != update(7) {
		t.Error("the same number again has changed the update")
	}
	var wg sync.WaitGroup
	for i := range uint64(8) {
		wg.Go(func() {
			var last uint64
			for n := range uint64(100) {
				s.Update(update(n*8 + i))
				got := s.Latest().Seq
				if got < max(last, n*8+i) {
					t.Errorf("%d after %d", got, last)
				}
				last = got
			}
		})
	}
	wg.Wait()
	if got := s.Latest(); got != update(799) {
		t.Errorf("in the end %+v", got)
	}
}

func TestServiceKeepsTheLatestLoss(t *testing.T) {
	s := NewService()
	for n, step := range []struct {
		heard Loss
		news  bool
	}{
		{Loss{}, false},
		{Loss{3, []int{1}}, true},
		{Loss{3, []int{1}}, false},
		{Loss{3, []int{1, 2}}, true},
		{Loss{3, []int{1}}, false},
		{Loss{2, []int{0, 1, 2}}, false},
		{Loss{4, []int{0}}, true},
		{Loss{3, []int{1, 2, 4}}, false},
	} {
		before, more := s.Loss()
		told := s.Lose(step.heard)
		news := false
		select {
		case <-more:
			news = true
		default:
		}
		want := before
		if step.news {
			want = step.heard
		}
		if got, _ := s.Loss(); news != step.news || told != step.news || got.Generation != want.Generation || !slices.Equal(got.Ranks, want.Ranks) {
			t.Errorf("step %d: %+v, news %v; want %+v, %v", n, got, news, want, step.news)
		}
	}
}

// told is a pusher that records its lines.
type told struct {
	*Pusher
	lines     []string
	delivered int
}

func newTold() *told {
	p := &told{}
	p.Pusher = NewPusher(PusherConfig{
		Update: func(workers []string, u Update) { p.lines = append(p.lines, fmt.Sprint(workers, " update ", u.Seq)) },
		Loss: func(workers []string, l Loss) {
			p.lines = append(p.lines, fmt.Sprint(workers, " loss ", l.Generation, l.Ranks))
		},
		Delivered: func(after time.Duration) { p.delivered++ },
	})
	return p
}

// is checks the lines since the last call.
func (p *told) is(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(p.lines, want) {
		t.Errorf("told %s; want %s", strings.Join(p.lines, "; "), strings.Join(want, "; "))
	}
	p.lines = nil
}

// TestPush: each worker gets an update and a loss once, and again if it reports that it lacks them.
// The answers of one worker do not affect the others. An update and a loss do not replace each
// other.
func TestPush(t *testing.T) {
	p := newTold()
	p.Push([]string{"a", "b"}, update(1))
	p.PushLoss([]string{"b"}, Loss{3, []int{1}})
	p.is(t, "[a b] update 1", "[b] loss 3 [1]")
	p.Heard("a", 1, Known{}, false)
	p.Heard("b", 0, Known{}, false) // an answer to something earlier
	p.is(t)
	if p.delivered != 1 {
		t.Errorf("%d were delivered", p.delivered)
	}
	p.Heard("a", 1, Known{}, true)
	p.Heard("b", 0, Known{}, true)
	p.is(t, "[b] update 1", "[b] loss 3 [1]")
	p.Heard("b", 1, Known{3, 1}, false)
	p.Heard("b", 1, Known{3, 1}, true)
	p.Heard("b", 1, Known{4, 0}, true)
	p.is(t)
	if p.delivered != 2 {
		t.Errorf("%d were delivered", p.delivered)
	}
	p.Heard("stranger", 0, Known{}, true)
	p.is(t)
}

// TestOvertakenUpdatesAreNotSent: a worker gets only the newest update and loss.
func TestOvertakenUpdatesAreNotSent(t *testing.T) {
	p := newTold()
	p.Push([]string{"a"}, update(2))
	p.Push([]string{"a", "b"}, update(1))
	p.Push([]string{"a", "b"}, update(3))
	p.is(t, "[a] update 2", "[b] update 1", "[a b] update 3")
	p.PushLoss([]string{"a"}, Loss{4, []int{1, 2}})
	p.PushLoss([]string{"a"}, Loss{4, []int{1}})
	p.PushLoss([]string{"a"}, Loss{3, []int{1, 2, 3}})
	p.is(t, "[a] loss 4 [1 2]")
	p.Heard("a", 2, Known{4, 1}, true)
	p.is(t, "[a] update 3", "[a] loss 4 [1 2]")
}

// TestForget: nothing is sent to a forgotten worker.
func TestForget(t *testing.T) {
	p := newTold()
	p.Push([]string{"a"}, update(2))
	p.Forget("a")
	p.is(t, "[a] update 2")
	p.Heard("a", 0, Known{}, true)
	p.is(t)
}
