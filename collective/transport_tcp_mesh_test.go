package collective_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// sparse returns workers that are at first connected only to the next ranks, and to others when an
// operation needs them.
func sparse(t testing.TB, cfg collective.Config, n int) *workers {
	w := newWorkers(t, cfg, n)
	collective.Sparse(w.endpoints)
	return w
}

// TestSparse runs the kit with pairs of ranks that are connected when operations need them.
func TestSparse(t *testing.T) {
	t.Run("sockets", func(t *testing.T) { collectivetest.RunBrief(t, sparse(t, collective.Config{}, 8).connect) })
	if testing.Short() { // make test does the others
		return
	}
	t.Run("encrypted", func(t *testing.T) {
		collectivetest.RunOps(t, sparse(t, collective.Config{Encrypt: true}, 8).connect)
	})
	t.Run("several connections", func(t *testing.T) {
		collectivetest.RunOps(t, shared(sparse(t, collective.Config{Connections: 3}, 8)))
	})
	for _, hosts := range []string{"abababab", "aaaaaaaa"} {
		t.Run(hosts, func(t *testing.T) {
			w := sparse(t, collective.Config{}, 8)
			w.hosts = hosts
			collectivetest.RunOps(t, w.connect)
		})
	}
}

// shared makes the connections of data channels share all frames that can be divided.
func shared(w *workers) func(*testing.T, int) []*collective.Group {
	return func(t *testing.T, n int) []*collective.Group {
		groups := w.connect(t, n)
		if n > 1 {
			collective.ShareFrom(groups, collective.MaxConnections)
		}
		return groups
	}
}

// TestRails: if there are several routes of equal speed, each has a connection, with encryption and
// to ranks that are connected later too.
func TestRails(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		for _, cfg := range []collective.Config{{Encrypt: encrypt}, {Encrypt: encrypt, Connections: 2}} {
			t.Run(fmt.Sprint("encrypted ", encrypt, ", connections ", cfg.Connections), func(t *testing.T) {
				const n, rails = 6, 3
				w := sparse(t, cfg, n)
				collective.Railed(w.endpoints, rails)
				groups := w.meet(t, n)
				collective.ShareFrom(groups, collective.MaxConnections)
				for size := range 3 {
					each(t, groups, func(g *collective.Group) error { return allToAll(t, g, []int{1, 5_000, 300_000}[size]) })
				}
				for _, g := range groups {
					for peer := range n {
						if peer == g.Rank() {
							continue
						}
						if got := collective.Rails(g, peer); got != rails {
							t.Errorf("rank %d has %d connections for data to rank %d, not %d", g.Rank(), got, peer, rails)
						}
					}
				}
				closeGroups(groups)
			})
		}
	}
}

// allToAll checks an AllToAll with count elements per part.
func allToAll(t *testing.T, g *collective.Group, count int) error {
	parts := make([][]int32, g.Size())
	for i := range parts {
		parts[i] = make([]int32, count)
		for j := range parts[i] {
			parts[i][j] = int32(g.Rank()*g.Size()+i)*7919 + int32(j)
		}
	}
	got, err := collective.AllToAll(t.Context(), g, parts)
	if err != nil {
		return err
	}
	for i, p := range got {
		if len(p) != count {
			return fmt.Errorf("%d elements of rank %d, not %d", len(p), i, count)
		}
		for j, v := range p {
			if want := int32(i*g.Size()+g.Rank())*7919 + int32(j); v != want {
				return fmt.Errorf("element %d of rank %d is %d, not %d", j, i, v, want)
			}
		}
	}
	return nil
}

// TestSparseSevered: the connections of a rank end at a random moment without a message. All others
// report it as dead, even those that are not connected to it.
func TestSparseSevered(t *testing.T) {
	collectivetest.CheckDeath(t, collectivetest.Rounds(30), sparse(t, collective.Config{}, 7).connect, collective.Sever)
	collectivetest.CheckDeath(t, collectivetest.Rounds(10), sparse(t, collective.Config{Encrypt: true}, 7).connect, collective.Sever)
	railed := sparse(t, collective.Config{Encrypt: true}, 7)
	collective.Railed(railed.endpoints, 2)
	collectivetest.CheckDeath(t, collectivetest.Rounds(10), shared(railed), collective.Sever)
	collectivetest.CheckSubsetDeath(t, collectivetest.Rounds(10), sparse(t, collective.Config{}, 7).connect, collective.Sever)
}

// TestManyRanks: few pairs of many ranks are connected, until an operation needs all pairs.
func TestManyRanks(t *testing.T) {
	const n = 40
	w := newWorkers(t, collective.Config{}, n)
	for _, hosts := range []string{"", strings.Repeat("a", n), strings.Repeat("ab", n/2)} {
		t.Run("hosts="+hosts, func(t *testing.T) {
			w.hosts = hosts
			groups := w.connect(t, n)
			few := 10 // distances 1, 2, 4, 8, 16 and 32 in both directions, of which 8 and 32 coincide
			for _, g := range groups {
				if c := collective.Connected(g); c != few {
					t.Fatalf("rank %d is connected to %d ranks, not %d", g.Rank(), c, few)
				}
			}
			each(t, groups, func(g *collective.Group) error {
				data := []int64{int64(g.Rank()), 1}
				if err := collective.AllReduce(t.Context(), g, data, collective.Sum); err != nil {
					return err
				}
				if want := []int64{n * (n - 1) / 2, n}; !slices.Equal(data, want) {
					return fmt.Errorf("%v, not %v", data, want)
				}
				parts := make([][]int32, n)
				for i := range parts {
					parts[i] = []int32{int32(g.Rank()), int32(i)}
				}
				got, err := collective.AllToAll(t.Context(), g, parts)
				if err != nil {
					return err
				}
				for i, p := range got {
					if !slices.Equal(p, []int32{int32(i), int32(g.Rank())}) {
						return fmt.Errorf("part %d is %v", i, p)
					}
				}
				return nil
			})
			for _, g := range groups {
				if c := collective.Connected(g); hosts == "" && c != n-1 {
					t.Errorf("rank %d is connected to %d ranks after all have sent to all", g.Rank(), c)
				}
			}
			each(t, groups, func(g *collective.Group) error { return g.Close() })
		})
	}
}
