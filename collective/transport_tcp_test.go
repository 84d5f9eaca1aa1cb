package collective_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestSevered: the connections of a rank end at a random moment without a message, and all others
// report it as dead.
func TestSevered(t *testing.T) {
	collectivetest.CheckDeath(t, collectivetest.Rounds(60), newWorkers(t, collective.Config{}, 5).connect, collective.Sever)
}

// TestSubsetSevered does the same with groups of a generation that work at the same time.
func TestSubsetSevered(t *testing.T) {
	collectivetest.CheckSubsetDeath(t, collectivetest.Rounds(30), newWorkers(t, collective.Config{}, 5).connect, collective.Sever)
}

func TestStrandsSevered(t *testing.T) {
	collectivetest.CheckDeath(t, collectivetest.Rounds(20), newWorkers(t, collective.Config{Connections: 4}, 5).connect, collective.Sever)
}

// TestStrandSevered: one of several connections between two ranks is lost. Each reports the other
// or itself as dead in an operation that needs that connection.
func TestStrandSevered(t *testing.T) {
	groups := newWorkers(t, collective.Config{Connections: 3}, 2).connect(t, 2)
	collective.SeverConn(groups[0], 1, 1)
	var wg sync.WaitGroup
	for rank, g := range groups {
		wg.Go(func() {
			err := collective.AllReduce(t.Context(), g, make([]float32, 1<<20), collective.Sum)
			var a *collective.AbortedError
			if !errors.As(err, &a) || !slices.Equal(a.Dead, []int{0}) && !slices.Equal(a.Dead, []int{1}) {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

// TestBetweenTwoThatLive: something other than the two ranks closes a connection between them. The
// group ends because one rank tells the other, without waiting for a timeout.
func TestBetweenTwoThatLive(t *testing.T) {
	for _, cfg := range []collective.Config{{}, {Connections: 3}, {Encrypt: true}} {
		groups := newWorkers(t, cfg, 2).connect(t, 2)
		collective.CloseConn(groups[0], 1)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for rank, g := range groups {
			wg.Go(func() { errs[rank] = collective.AllReduce(t.Context(), g, make([]float32, 1<<20), collective.Sum) })
		}
		wg.Wait()
		if !slices.ContainsFunc(errs, func(err error) bool { return err != nil && strings.Contains(err.Error(), "both ranks live") }) {
			t.Errorf("%+v: %v", cfg, errs)
		}
	}
}

// TestConnectionsUnequal: ranks that are configured with different numbers of connections detect
// that.
func TestConnectionsUnequal(t *testing.T) {
	w := newWorkers(t, collective.Config{Connections: 2}, 2)
	few := newWorkers(t, collective.Config{}, 2)
	w.endpoints[0], w.addrs[0] = few.endpoints[0], few.addrs[0]
	if errs := w.try(1, 0, 1); !slices.ContainsFunc(errs, func(err error) bool {
		return err != nil && strings.Contains(err.Error(), "expects no channel")
	}) {
		t.Error(errs)
	}
}

func TestSeveredEncrypted(t *testing.T) {
	collectivetest.CheckDeath(t, collectivetest.Rounds(10), newWorkers(t, collective.Config{Encrypt: true}, 5).connect, collective.Sever)
}

// TestConnectDead: if nothing listens at a peer's address, every rank gets the error at once,
// without waiting for a timeout.
func TestConnectDead(t *testing.T) {
	for dead := range 3 {
		w := newWorkers(t, collective.Config{}, 3)
		w.endpoints[dead].Close()
		begun := time.Now()
		for rank, err := range w.try(1, 0, 1, 2) {
			var a *collective.AbortedError
			if rank != dead && (!errors.As(err, &a) || !slices.Equal(a.Dead, []int{dead}) || a.Generation != 1) {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		if took := time.Since(begun); took > 25*time.Second { // the limit is 30 s
			t.Errorf("it took %v", took)
		}
	}
}

// TestConnectAbsent: if a rank is alive but does not come, an error names it when the context ends.
// Its connections of that generation are refused later.
func TestConnectAbsent(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 3)
	ctx, cancel := context.WithCancel(context.Background())
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			_, errs[i] = w.endpoints[i].Connect(ctx, collective.Peers{Key: dataKey, Generation: 1, Rank: i, Addrs: w.addrs})
		})
	}
	cancel()
	wg.Wait()
	for i, err := range errs {
		var a *collective.AbortedError
		if !errors.As(err, &a) || a.Cause == nil || len(a.Dead) == 0 {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	for rank, err := range w.try(2, 0, 1, 2) {
		if err != nil {
			t.Errorf("generation 2, rank %d: %v", rank, err)
		}
	}
}

// try connects the given ranks concurrently, and closes the resulting groups.
func (w *workers) try(generation uint64, ranks ...int) []error {
	errs := make([]error, len(w.endpoints))
	groups := make([]*collective.Group, len(w.endpoints))
	var wg sync.WaitGroup
	for _, rank := range ranks {
		wg.Go(func() {
			groups[rank], errs[rank] = w.endpoints[rank].Connect(context.Background(),
				collective.Peers{Key: dataKey, Generation: generation, Rank: rank, Addrs: w.addrs})
		})
	}
	wg.Wait()
	for _, g := range groups {
		wg.Go(func() { g.Close() })
	}
	wg.Wait()
	return errs
}

// TestOneIsLate: connections of a newer generation wait for the rank that has not entered it yet.
func TestOneIsLate(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 3)
	for generation := uint64(1); generation < 20; generation++ {
		late := int(generation) % 3
		groups, errs := make([]*collective.Group, 3), make([]error, 3)
		var wg sync.WaitGroup
		connect := func(i int) {
			groups[i], errs[i] = w.endpoints[i].Connect(context.Background(),
				collective.Peers{Key: dataKey, Generation: generation, Rank: i, Addrs: w.addrs})
		}
		for i := range groups {
			if i != late {
				wg.Go(func() { connect(i) })
			}
		}
		waiting(t, w.endpoints[late])
		connect(late)
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for _, g := range groups {
			wg.Go(func() { g.Close() })
		}
		wg.Wait()
	}
}

// waiting blocks until a connection to e waits for a newer generation.
func waiting(t *testing.T, e *collective.Endpoint) {
	t.Helper()
	deadline := sandbox.Limit()
	for collective.Waiting(e) == 0 {
		if time.Now().After(deadline) {
			t.Fatal("no connection waits")
		}
		runtime.Gosched()
	}
}

// TestOlderGeneration: connections of an older generation are refused, and Connect accepts only
// newer generations.
func TestOlderGeneration(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 2)
	for _, generation := range []uint64{6, 7} {
		if err := errors.Join(w.try(generation, 0, 1)...); err != nil {
			t.Fatalf("generation %d: %v", generation, err)
		}
	}
	for _, generation := range []uint64{6, 7} {
		if err := w.try(generation, 0)[0]; err == nil || errors.Is(err, collective.ErrAborted) {
			t.Errorf("generation %d after 7: %v", generation, err)
		}
	}
	conn, err := net.Dial("tcp", w.addrs[0][0])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(sandbox.Limit())
	var refused *identity.RefusedError
	err = credentials(t, 1).ProveDial(conn, dataKey, identity.Hello{Generation: 6, From: 1, To: 0})
	if !errors.As(err, &refused) || !strings.Contains(refused.Reason, "generation 6 is over") {
		t.Fatal(err)
	}
	stranger, err := net.Dial("tcp", w.addrs[0][0])
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if err := credentials(t, 1).ProveDial(stranger, dataKey, identity.Hello{Generation: 5, From: 1}); err == nil {
		t.Error("a generation that this rank was never in is let in")
	}
}

// TestStrangers: connections that prove nothing, belong to another job, or claim a place that is
// not theirs do not disturb a group, however many they are.
func TestStrangers(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 2)
	foreign, err := identity.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	other, err := foreign.Issue(identity.Subject{Role: identity.Worker})
	if err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	for range 200 { // they send nothing
		c, err := net.Dial("tcp", w.addrs[0][0])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	if _, err := conns[0].Write(make([]byte, 1000)); err != nil {
		t.Log(err) // it has been replaced already
	}
	groups := w.meet(t, 2)
	for i, h := range []identity.Hello{
		{Generation: 1, From: 1, To: 0},
		{Generation: 1, From: 1, To: 0, Channel: 1},
		{Generation: 1, From: 1, To: 1},
		{Generation: 1, From: 2, To: 0},
		{Generation: 1, From: 1, To: 0, Channel: 5},
	} {
		for c, key := range map[*identity.Credentials]identity.DataKey{credentials(t, 1): dataKey, other: identity.NewDataKey()} {
			conn, err := net.Dial("tcp", w.addrs[0][0])
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(sandbox.Limit())
			if err := c.ProveDial(conn, key, h); err == nil {
				t.Errorf("hello %d is welcome", i)
			}
			conn.Close()
		}
	}
	for _, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		return errors.Join(collective.Barrier(ctx, g), g.Close())
	}) {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestNarrowDoor: a connection that is dropped in favour of newer ones is dialled again, and
// accepted.
func TestNarrowDoor(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 12)
	for _, e := range w.endpoints {
		collective.Narrow(e, 3)
	}
	for _, g := range w.meet(t, 12) {
		t.Cleanup(func() { g.Abort(nil) })
	}
}

// TestPlaceTaken: a rank whose place another connection has taken tries again until the place is
// free.
func TestPlaceTaken(t *testing.T) {
	refused := make(chan struct{}, 100)
	log := logrus.New()
	log.SetOutput(io.Discard)
	log.SetLevel(logrus.DebugLevel)
	log.AddHook(hook(func(e *logrus.Entry) {
		if err, _ := e.Data[logrus.ErrorKey].(error); err != nil && strings.Contains(err.Error(), "connected already") {
			refused <- struct{}{}
		}
	}))
	w := newWorkers(t, collective.Config{Log: log}, 2)
	var wg sync.WaitGroup
	errs := make([]error, 2)
	connect := func(rank int) {
		var g *collective.Group
		g, errs[rank] = w.endpoints[rank].Connect(t.Context(), collective.Peers{Key: dataKey, Generation: 1, Rank: rank, Addrs: w.addrs})
		g.Close()
	}
	wg.Go(func() { connect(0) })
	free := collective.Occupy(w.endpoints[0], 1, 0)
	wg.Go(func() { connect(1) })
	for range 2 {
		<-refused
	}
	free()
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

type hook func(*logrus.Entry)

func (hook) Levels() []logrus.Level { return logrus.AllLevels }

func (h hook) Fire(e *logrus.Entry) error {
	h(e)
	return nil
}

// TestCandidates: a peer has many addresses, of which some work, some do not answer, and some
// belong to other workers. The result is one connection per channel.
func TestCandidates(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 4)
	gone := newWorkers(t, collective.Config{}, 1)
	gone.endpoints[0].Close()
	all := slices.Concat(w.addrs...)
	for i, a := range w.addrs {
		w.addrs[i] = slices.Concat(gone.addrs[0], a, a, all)
	}
	groups := w.meet(t, 4)
	for _, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		return errors.Join(collective.Barrier(ctx, g), g.Close())
	}) {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestListen(t *testing.T) {
	if _, err := collective.Listen(collective.Config{}); err == nil {
		t.Error("an endpoint without credentials")
	}
	c := credentials(t, 0)
	if _, err := collective.Listen(collective.Config{Credentials: c, ListenAddr: "nowhere"}); err == nil {
		t.Error("an endpoint nowhere")
	}
	if _, err := collective.Listen(collective.Config{Credentials: c, Interfaces: []string{"none such"}}); err == nil {
		t.Error("an endpoint on no interface")
	}
	e, err := collective.Listen(collective.Config{Credentials: c, Interfaces: []string{"lo"}})
	if err != nil {
		t.Fatal(err)
	}
	if a := e.Addrs(); len(a) == 0 || !strings.HasPrefix(a[0], "127.") {
		t.Errorf("the addresses of lo are %q", a)
	}
	g, err := e.Connect(context.Background(), collective.Peers{Key: dataKey, Generation: 3, Addrs: [][]string{nil}})
	if err != nil || g.Size() != 1 || g.Generation() != 3 {
		t.Errorf("alone: %v", err)
	}
	if _, err := e.Connect(context.Background(), collective.Peers{Key: dataKey, Generation: 4, Rank: 1, Addrs: [][]string{nil}}); err == nil {
		t.Error("rank 1 of 1")
	}
	if err := errors.Join(e.Close(), e.Close()); err != nil {
		t.Error(err)
	}
	if _, err := e.Connect(context.Background(), collective.Peers{Key: dataKey, Generation: 5, Addrs: [][]string{nil}}); err == nil {
		t.Error("a closed endpoint connects")
	}
}

// TestDeathWhileConnecting: if a rank dies at a random moment while the ranks connect, Connect or
// the first operation of every other rank reports it as dead.
func TestDeathWhileConnecting(t *testing.T) {
	for seed := range 60 {
		r := rand.New(rand.NewPCG(uint64(seed), 3))
		n := 2 + r.IntN(3)
		victim, after, comes := r.IntN(n), r.IntN(400), r.IntN(3) > 0
		w := newWorkers(t, collective.Config{}, n)
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			if i == victim && !comes {
				continue
			}
			wg.Go(func() {
				var g *collective.Group
				g, errs[i] = w.endpoints[i].Connect(context.Background(),
					collective.Peers{Key: dataKey, Generation: 1, Rank: i, Addrs: w.addrs})
				if errs[i] == nil && i == victim {
					collective.Sever(g)
				} else if errs[i] == nil {
					errs[i] = collective.Barrier(context.Background(), g)
				}
				g.Close()
			})
		}
		for range after {
			runtime.Gosched()
		}
		w.endpoints[victim].Close()
		wg.Wait()
		for rank, err := range errs {
			var a *collective.AbortedError
			if rank != victim && (!errors.As(err, &a) || !slices.Equal(a.Dead, []int{victim})) {
				t.Fatalf("seed %d: rank %d of %d got %v, want an abort because of rank %d", seed, rank, n, err, victim)
			}
		}
	}
}
