package elastictest_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/plan"
)

// scribbled is a part that another rank writes to after each first Restore.
type scribbled struct {
	live, saved int64
	again       bool
	hit         *atomic.Int64
}

func (p *scribbled) Save() error {
	p.saved, p.again = p.live, false
	return nil
}

func (p *scribbled) Restore() error {
	if p.live = p.saved; !p.again {
		p.live, p.again = -1, true
		p.hit.Add(1)
	}
	return nil
}

func (p *scribbled) Exposed() bool { return true }

func (p *scribbled) Sync(ctx context.Context, g *collective.Group, root int) error {
	v := []int64{p.live}
	err := collective.Broadcast(ctx, g, v, root)
	p.live = v[0]
	return err
}

// What other ranks write to a part after it was restored is undone before training continues.
func TestExposed(t *testing.T) {
	inTime(t, func(t *testing.T) {
		const steps = 20
		var hit atomic.Int64
		job := begin(elastictest.Config{
			Hosts:  []plan.Host{{Name: "a", Slots: 1}, {Name: "b", Slots: 1}, {Name: "c", Slots: 1}},
			Deaths: []elastictest.Moment{{Rank: 0, Phase: elastictest.Committed, Commit: 7}},
			Worker: func(ctx context.Context) error {
				w, err := elastic.Init(ctx)
				if err != nil {
					return err
				}
				defer w.Close()
				part, step := &scribbled{hit: &hit}, int64(0)
				state := elastic.NewState(w, part, elastic.Value("step", &step))
				state.OnReset(func() error {
					if part.live != part.saved {
						return fmt.Errorf("on a reset the part is %d, and saved %d", part.live, part.saved)
					}
					return nil
				})
				return elastic.Run(ctx, state, func(ctx context.Context) error {
					for step < steps {
						if part.live != step {
							return fmt.Errorf("the part is %d in step %d", part.live, step)
						}
						if err := collective.Barrier(ctx, w.Group()); err != nil {
							return err
						}
						step, part.live = step+1, part.live+1
						if err := state.Commit(); err != nil {
							return err
						}
					}
					return nil
				})
			},
		})
		if err := job.Wait(); err != nil {
			t.Error(err)
		}
		if hit.Load() == 0 {
			t.Error("nobody restored")
		}
	})
}
