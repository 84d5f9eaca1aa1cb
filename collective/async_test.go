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
	hook := &warnings{first: warned}
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
	for i, text := range hook.all {
		// If several ranks are late, one of them may submit the tensor before the others.
		left := i > 0 && (strings.Contains(text, "for ranks [0] ") || strings.Contains(text, "for ranks [3] "))
		if !left && !strings.Contains(text, `"the late one" waits for ranks [0 3]`) {
			t.Error(text)
		}
	}
}

// warnings collects logged warnings.
type warnings struct {
	mu    sync.Mutex
	all   []string
	first chan struct{}
}

func (*warnings) Levels() []logrus.Level { return []logrus.Level{logrus.WarnLevel} }

func (w *warnings) Fire(e *logrus.Entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all = append(w.all, e.Message); len(w.all) == 1 {
		close(w.first)
	}
	return nil
}
