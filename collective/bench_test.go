package collective_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
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

// BenchmarkConnections makes the kernel limit the rate of each connection, as networks do that
// limit single connections; 0 is unlimited.
func BenchmarkConnections(b *testing.B) {
	const gbit = 1e9 / 8
	for _, rate := range []int{0, gbit, 2 * gbit} {
		for _, n := range []int{1, 2, 4, 8} {
			for _, bytes := range []int{1 << 20, 16 << 20} {
				b.Run(fmt.Sprintf("gbit=%d/connections=%d/bytes=%d", rate/gbit, n, bytes), func(b *testing.B) {
					groups := newWorkers(b, collective.Config{Connections: n}, 2).meet(b, 2)
					if rate > 0 {
						collective.Pace(b, groups, rate)
					}
					benchmark(b, groups, bytes)
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

// TestNoAllocation: only the first operations of a size allocate memory.
func TestNoAllocation(t *testing.T) {
	const each = 10
	w := newWorkers(t, collective.Config{}, 4)
	for a := collective.Auto; a.String() != fmt.Sprintf("algorithm(%d)", a); a++ {
		for _, n := range []int{2, 3, 4} {
			groups := collective.Force(w.connect(t, n), a, 0)
			for _, c := range []struct {
				op     collective.Op
				length int
			}{{collective.Sum, 1}, {collective.Sum, 5000}, {collective.Sum, 100_000}, {collective.Adasum, 5000}} {
				// The runtime also allocates memory, more on a busy machine, but not in every
				// round. An operation's allocations occur in every round.
				taken := uint64(math.MaxUint64)
				for round := 0; round < 5 && taken > each; round++ {
					taken = min(taken, allocations(t, groups, each, c.op, c.length))
				}
				if taken > each {
					t.Errorf("%v, %v, %d ranks, %d elements: %d allocations in %d operations", a, c.op, n, c.length, taken, each)
				}
			}
			for _, g := range groups {
				g.Close()
			}
		}
	}
}

// allocations returns how many allocations all ranks make in a number of operations, measured after
// the same number of operations.
func allocations(t *testing.T, groups []*collective.Group, operations int, op collective.Op, length int) (taken uint64) {
	t.Helper()
	for _, err := range collectivetest.Each(t, groups, func(_ context.Context, g *collective.Group) error {
		ctx, data := context.Background(), make([]float32, length)
		var before, after runtime.MemStats
		for i := range 2 * operations {
			if i == operations && g.Rank() == 0 {
				runtime.ReadMemStats(&before)
			}
			if err := collective.AllReduce(ctx, g, data, op); err != nil {
				return err
			}
		}
		if g.Rank() == 0 {
			runtime.ReadMemStats(&after)
			taken = after.Mallocs - before.Mallocs
		}
		return nil
	}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	return taken
}

// BenchmarkConnect measures one generation: all ranks, in one process, connect. Leaving is not
// measured.
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

// BenchmarkReduceTree measures the sum of 24 and of 32 leaves, and an AllReduce of the same number
// of bytes: on one host, on hosts with different numbers of ranks, and with one rank per host. Each
// letter is the host of a rank.
func BenchmarkReduceTree(b *testing.B) {
	for _, memory := range []struct {
		name string
		of   func(b *testing.B, n, elements int) [][]float32
	}{{"alloc", allocated}, {"slices", ordinary}} {
		for _, hosts := range []string{"aa", "aaa", "aaaa", "aab", "abc"} {
			for _, bytes := range []int{4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20} {
				n := len(hosts)
				w := newWorkers(b, collective.Config{}, n)
				w.hosts = hosts
				b.Run(fmt.Sprintf("AllReduce/%s/hosts=%s/bytes=%d", memory.name, hosts, bytes), func(b *testing.B) {
					data := memory.of(b, n, bytes/4)
					inRanks(b, w.meet(b, n), func(g *collective.Group) error {
						return collective.AllReduce(context.Background(), g, data[g.Rank()], collective.Sum)
					})
				})
				for _, leaves := range []int{24, 32} {
					b.Run(fmt.Sprintf("ReduceTree/%s/hosts=%s/bytes=%d/leaves=%d", memory.name, hosts, bytes, leaves), func(b *testing.B) {
						held, parts := fewestNodes(leaves, n), make([][][]float32, n)
						for r := range n {
							parts[r] = memory.of(b, len(held[r]), bytes/4)
						}
						p, err := collective.NewPartials(leaves, held)
						if err != nil {
							b.Fatal(err)
						}
						results := memory.of(b, n, bytes/4)
						inRanks(b, w.meet(b, n), func(g *collective.Group) error {
							return collective.ReduceTree(context.Background(), g, p, parts[g.Rank()], results[g.Rank()], collective.Sum)
						})
					})
				}
			}
		}
	}
}

// fewestNodes divides the leaves of a tree among ranks as elastic.Steps does.
func fewestNodes(leaves, ranks int) [][]collective.Node {
	held, first := make([][]collective.Node, ranks), 0
	for level := collective.Root(leaves).Level; level >= 0; level-- {
		for r := range held {
			if share := leaves*(r+1)/ranks - leaves*r/ranks; share>>level&1 != 0 {
				held[r] = append(held[r], collective.Node{Level: level, Index: first >> level})
				first += 1 << level
			}
		}
	}
	return held
}

func ordinary(_ *testing.B, n, elements int) [][]float32 {
	all := make([][]float32, n)
	for i := range all {
		all[i] = make([]float32, elements)
	}
	return all
}

func allocated(b *testing.B, n, elements int) [][]float32 {
	all := make([][]float32, n)
	for i := range all {
		var err error
		if all[i], err = collective.Alloc[float32](elements); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { collective.Free(all[i]) })
	}
	return all
}

// inRanks measures operations of all ranks.
func inRanks(b *testing.B, groups []*collective.Group, do func(*collective.Group) error) {
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() {
			if err := do(g); err != nil {
				b.Error(err)
			}
			if i == 0 {
				b.ResetTimer()
			}
			for range b.N {
				if err := do(g); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	closeGroups(groups)
}

// BenchmarkAverage compares averages with sums, in shared memory.
func BenchmarkAverage(b *testing.B) {
	benchmarkAverage[float32](b)
	benchmarkAverage[collective.Float16](b)
	benchmarkAverage[uint8](b)
	benchmarkAverage[int32](b)
	benchmarkAverage[int64](b)
}

func benchmarkAverage[T collective.Element](b *testing.B) {
	const bytes = 16 << 20
	for _, op := range []collective.Op{collective.Sum, collective.Average} {
		b.Run(fmt.Sprintf("%T/%v", *new(T), op), func(b *testing.B) {
			w := newWorkers(b, collective.Config{}, 2)
			w.hosts = "aa"
			groups := w.meet(b, 2)
			b.SetBytes(bytes)
			var wg sync.WaitGroup
			for _, g := range groups {
				wg.Go(func() {
					data := make([]T, bytes/int(unsafe.Sizeof(*new(T))))
					for range b.N {
						if err := collective.AllReduce(context.Background(), g, data, op); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			closeGroups(groups)
		})
	}
}
