package collective_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestUnsentFrames: a rank does not wait in shared memory for data that another rank of its host
// has not yet sent because it waits for a rank of another host; that would be a deadlock. The
// connections listed in slow have very small buffers.
func TestUnsentFrames(t *testing.T) {
	for _, test := range []struct {
		hosts string
		slow  [][2]int
		cfg   collective.Config
	}{
		{"aabb", [][2]int{{0, 2}, {3, 1}}, collective.Config{}},
		{"aabb", [][2]int{{1, 3}, {2, 0}}, collective.Config{Connections: 3}},
		{"aabb", [][2]int{{0, 2}, {3, 1}}, collective.Config{Encrypt: true}},
		{"aabbcc", [][2]int{{0, 2}, {3, 5}, {4, 0}, {1, 3}}, collective.Config{}},
		{"aaab", [][2]int{{0, 3}, {3, 0}}, collective.Config{}},
	} {
		t.Run(fmt.Sprint(test.hosts, test.cfg.Connections, test.cfg.Encrypt), func(t *testing.T) {
			t.Parallel()
			w := newWorkers(t, test.cfg, len(test.hosts))
			w.hosts = test.hosts
			groups := w.meet(t, len(test.hosts))
			for _, s := range test.slow {
				collective.Squeeze(t, groups, s[0], s[1])
			}
			ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
			defer cancel()
			for rank, err := range collectivetest.Each(t, groups, func(_ context.Context, g *collective.Group) error {
				defer g.Close()
				data := make([]float32, 256<<10)
				for i := range data {
					data[i] = float32(g.Rank())
				}
				if err := collective.AllReduce(ctx, g, data, collective.Max); err != nil {
					return err
				}
				for i, v := range data {
					if v != float32(g.Size()-1) {
						return fmt.Errorf("element %d is %v", i, v)
					}
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
		})
	}
}
