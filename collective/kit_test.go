package collective_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
	"github.com/hvdrun/hvdrun/internal/identity"
)

func TestLocal(t *testing.T) {
	collectivetest.RunAgain(t, func(_ *testing.T, n int) []*collective.Group { return collective.Local(n) })
}

func TestTCP(t *testing.T) {
	collectivetest.Run(t, newWorkers(t, collective.Config{}, 8).connect)
}

// TestStrands makes several connections share all frames that can be divided.
func TestStrands(t *testing.T) {
	t.Run("plain", func(t *testing.T) {
		if testing.Short() {
			t.Skip("encrypted frames are divided alike; make test runs this one too")
		}
		collectivetest.RunOps(t, shared(newWorkers(t, collective.Config{Connections: 3}, 8)))
	})
	t.Run("encrypted", func(t *testing.T) {
		collectivetest.RunOps(t, shared(newWorkers(t, collective.Config{Connections: 3, Encrypt: true}, 8)))
	})
}

// TestAlgorithms runs the reductions of the kit with every algorithm, over both transports, with
// segments of several sizes.
func TestAlgorithms(t *testing.T) {
	for a := collective.Auto; a.String() != fmt.Sprintf("algorithm(%d)", a); a++ {
		t.Run(a.String(), func(t *testing.T) {
			t.Parallel()
			local, tcp := forced(t, a)
			if !testing.Short() {
				t.Run("local", func(t *testing.T) { collectivetest.RunReductions(t, local(1000)) })
				t.Run("tcp", func(t *testing.T) { collectivetest.RunReductions(t, tcp(0)) })
			}
			t.Run("segments", func(t *testing.T) { collectivetest.RunReductions(t, tcp(4096)) })
		})
	}
}

// TestSameBits: with any forced algorithm, neither segments nor transports change the bits. The
// strict algorithm gives the bits of the order of the ranks.
func TestSameBits(t *testing.T) {
	for a := collective.Strict; a.String() != fmt.Sprintf("algorithm(%d)", a); a++ {
		t.Run(a.String(), func(t *testing.T) {
			local, tcp := forced(t, a)
			ways := []collectivetest.NewGroups{local(0), tcp(1000)}
			if !testing.Short() {
				ways = append(ways, local(24), local(4096), tcp(0))
			}
			collectivetest.CheckSameBits(t, a == collective.Strict, ways...)
		})
	}
}

// forced returns functions that connect groups with one algorithm, for a given size of segments.
func forced(t *testing.T, a collective.Algorithm) (local, tcp func(segment int) collectivetest.NewGroups) {
	w := newWorkers(t, collective.Config{}, 8)
	local = func(segment int) collectivetest.NewGroups {
		return func(_ *testing.T, n int) []*collective.Group {
			return collective.Force(collective.Local(n), a, segment)
		}
	}
	tcp = func(segment int) collectivetest.NewGroups {
		return func(t *testing.T, n int) []*collective.Group { return collective.Force(w.connect(t, n), a, segment) }
	}
	return local, tcp
}

func TestTCPEncrypted(t *testing.T) {
	newGroups := newWorkers(t, collective.Config{Encrypt: true}, 8).connect
	if testing.Short() {
		collectivetest.RunOps(t, newGroups)
		return
	}
	collectivetest.RunAgain(t, newGroups)
}

func TestShared(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 8)
	w.hosts = "aaaaaaaa"
	collectivetest.Run(t, w.connect)
}

// TestHosts runs the kit with ranks on several hosts.
func TestHosts(t *testing.T) {
	for name, c := range map[string]struct {
		hosts  string
		shares []int
		run    func(*testing.T, collectivetest.NewGroups)
	}{
		"aabbccdd":         {"aabbccdd", nil, collectivetest.RunBrief},
		"aabbccdd unequal": {"aabbccdd", unequal, collectivetest.RunOps},
		"aaabaaac":         {"aaabaaac", nil, collectivetest.RunOps},
		"abababab":         {"abababab", nil, collectivetest.RunOps},
		"abbbbbbb":         {"abbbbbbb", nil, collectivetest.RunOps},
	} {
		t.Run(name, func(t *testing.T) {
			if (c.hosts == "abababab" || c.hosts == "abbbbbbb") && testing.Short() {
				t.Skip("the proving ground makes such worlds; make test runs this one")
			}
			w := newWorkers(t, collective.Config{}, 8)
			w.hosts, w.shares = c.hosts, c.shares
			c.run(t, w.connect)
		})
	}
}

// workers are endpoints that connect in successive generations.
type workers struct {
	endpoints  []*collective.Endpoint
	addrs      [][]string
	hosts      string // a letter for the host of each rank; empty: each has its own
	shares     []int  // of waves, if all the hosts are present; nil: by speed
	generation atomic.Uint64
}

// dataKey is the key of all generations of these tests.
var dataKey = identity.NewDataKey()

var authority = sync.OnceValues(func() (*identity.Authority, error) { return identity.NewAuthority("test") })

func credentials(t testing.TB, index int) *identity.Credentials {
	t.Helper()
	a, err := authority()
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: index, Incarnation: fmt.Sprint("i", index)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newWorkers(t testing.TB, cfg collective.Config, n int) *workers {
	t.Helper()
	w := new(workers)
	for i := range n {
		cfg.Credentials = credentials(t, i)
		cfg.ListenAddr = "127.0.0.1:0"
		e, err := collective.Listen(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		w.endpoints = append(w.endpoints, e)
		w.addrs = append(w.addrs, e.Addrs())
	}
	return w
}

func (w *workers) connect(t *testing.T, n int) []*collective.Group {
	t.Helper()
	groups := w.meet(t, n)
	if w.shares != nil && n == len(w.endpoints) {
		collective.Divide(groups, w.shares...)
	}
	return groups
}

// unequal are shares of four hosts, one of which combines nothing.
var unequal = []int{0, 3, 128, 128, 256}

func (w *workers) meet(t testing.TB, n int) []*collective.Group {
	t.Helper()
	generation := w.generation.Add(1)
	groups, errs := make([]*collective.Group, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			groups[i], errs[i] = w.endpoints[i].Connect(context.Background(),
				collective.Peers{Key: dataKey, Generation: generation, Rank: i, Addrs: w.addrs[:n],
					Hosts: strings.Split(w.hosts[:min(n, len(w.hosts))], "")})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
	return groups
}

// TestFusedBits: tensors that are reduced together have the same bits as when each is reduced
// alone.
func TestFusedBits(t *testing.T) {
	ways := []collectivetest.Way{{NewGroups: func(_ *testing.T, n int) []*collective.Group { return collective.Local(n) }}}
	for _, hosts := range []string{"", "aaaaaaaa", "aabbccdd", "abababab", "aaabcccc"} {
		w := newWorkers(t, collective.Config{}, 8)
		w.hosts = hosts
		ways = append(ways, collectivetest.Way{NewGroups: w.connect, Hosts: hosts})
	}
	w := newWorkers(t, collective.Config{}, 8)
	w.hosts, w.shares = "aabbccdd", unequal
	ways = append(ways, collectivetest.Way{NewGroups: w.connect, Hosts: w.hosts})
	collectivetest.CheckFusedBits(t, ways...)
}

// TestSharesAreAgreedOn: hosts exchange the speeds of their links between operations. Operations
// with the previous shares continue meanwhile.
func TestSharesAreAgreedOn(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 6)
	w.hosts = "aabbcc"
	errs := collectivetest.Each(t, w.connect(t, 6), func(ctx context.Context, g *collective.Group) error {
		data := make([]float32, 9<<18) // 9 MiB
		for k := range 4 {
			for i := range data {
				data[i] = float32(i%1000 + g.Rank() + k)
			}
			if err := collective.AllReduce(ctx, g, data, collective.Sum); err != nil {
				return err
			}
			for i := range data {
				if want := float32(6*(i%1000+k) + 15); data[i] != want {
					return fmt.Errorf("rank %d, operation %d, element %d: %v, want %v", g.Rank(), k, i, data[i], want)
				}
			}
		}
		if !collective.SharesAgreed(g) {
			return fmt.Errorf("rank %d has agreed on no shares", g.Rank())
		}
		return nil
	})
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// TestAdasumBits: neither the hosts of the ranks nor the transports change a bit.
func TestAdasumBits(t *testing.T) {
	local := func(_ *testing.T, n int) []*collective.Group { return collective.Local(n) }
	ways := []collectivetest.Way{{NewGroups: local}}
	for _, hosts := range []string{"", "aaaaaaaa", "aabbccdd", "abababab", "aaabcccc", "aaaabbbb", "abbbbbbb"} {
		w := newWorkers(t, collective.Config{}, 8)
		w.hosts = hosts
		ways = append(ways, collectivetest.Way{NewGroups: w.connect, Hosts: hosts})
	}
	collectivetest.CheckAdasumBits(t, ways...)
}
