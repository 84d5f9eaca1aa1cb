package collective_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func BenchmarkAllReduce(b *testing.B) {
	tcp := func(b *testing.B, n int) []*collective.Group { return newWorkers(b, collective.Config{}, n).meet(b, n) }
	encrypted := func(b *testing.B, n int) []*collective.Group {
		return newWorkers(b, collective.Config{Encrypt: true}, n).meet(b, n)
	}
	for _, way := range []struct {
		name string
		make func(b *testing.B, n int) []*collective.Group
	}{
		{"local", func(_ *testing.B, n int) []*collective.Group { return collective.Local(n) }},
		{"tcp", tcp},
		{"encrypted", encrypted},
	} {
		for _, n := range []int{2, 4} {
			for _, bytes := range []int{8, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20} {
				b.Run(fmt.Sprintf("%s/ranks=%d/bytes=%d", way.name, n, bytes), func(b *testing.B) {
					benchmark(b, way.make(b, n), bytes)
				})
			}
		}
	}
}

func benchmark(b *testing.B, groups []*collective.Group, bytes int) {
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() {
			data := make([]float32, bytes/4)
			collective.Barrier(context.Background(), g)
			if i == 0 {
				b.ResetTimer()
			}
			for range b.N {
				if err := collective.AllReduce(context.Background(), g, data, collective.Sum); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	for _, g := range groups {
		wg.Go(func() { g.Close() })
	}
	wg.Wait()
}

// BenchmarkConnect is one generation: all ranks of one process connect, and leave again outside the measured time.
func BenchmarkConnect(b *testing.B) {
	for _, cfg := range []collective.Config{{}, {Encrypt: true}} {
		for _, n := range []int{2, 4, 8} {
			b.Run(fmt.Sprintf("encrypted=%t/ranks=%d", cfg.Encrypt, n), func(b *testing.B) {
				w := newWorkers(b, cfg, n)
				for range b.N {
					groups := w.meet(b, n)
					b.StopTimer()
					var wg sync.WaitGroup
					for _, g := range groups {
						wg.Go(func() { g.Close() })
					}
					wg.Wait()
					b.StartTimer()
				}
			})
		}
	}
}
