package collective_test

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

func TestAsyncSevered(t *testing.T) {
	collectivetest.CheckAsyncDeath(t, collectivetest.Rounds(30), newWorkers(t, collective.Config{}, 5).connect, collective.Sever)
}

func TestMessagesSevered(t *testing.T) {
	collectivetest.CheckPointDeath(t, collectivetest.Rounds(30), newWorkers(t, collective.Config{}, 4).connect, collective.Sever)
}

// TestStallWarning: if some ranks do not submit a tensor, the first rank logs its name and these
// ranks.
func TestStallWarning(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	warned := make(chan struct{})
	hook := &warnings{words: `"the late one" has waited for ranks [0 3]`, seen: warned}
	log.AddHook(hook)
	w := newWorkers(t, collective.Config{Log: log, StallWarning: 20 * time.Millisecond}, 4)
	groups := w.meet(t, 4)
	for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		var late *collective.Handle
		if g.Rank() == 1 || g.Rank() == 2 {
			late = collective.AllReduceAsync(ctx, g, "the late one", []float32{1}, collective.Sum)
		} else {
			<-warned
		}
		if late == nil {
			late = collective.AllReduceAsync(ctx, g, "the late one", []float32{1}, collective.Sum)
		}
		return late.Wait()
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	for _, g := range groups {
		g.Abort(nil)
	}
	for _, text := range hook.all { // before and after that, it can wait for others
		if !strings.HasPrefix(text, `collective: "the late one" has waited for ranks [`) {
			t.Error(text)
		}
	}
}

// warnings collects logged warnings, and closes seen when the first one with the words comes.
type warnings struct {
	words string
	seen  chan struct{}
	mu    sync.Mutex
	all   []string
	over  bool
}

func (*warnings) Levels() []logrus.Level { return []logrus.Level{logrus.WarnLevel} }

func (w *warnings) Fire(e *logrus.Entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, e.Message)
	if !w.over && strings.Contains(e.Message, w.words) {
		w.over = true
		close(w.seen)
	}
	return nil
}
