package gradient_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/gradient"
	"github.com/hvdrun/hvdrun/internal/identity"
)

var _ gradient.Worker = (*elastic.Worker)(nil)

// seat is a worker with a given group.
type seat struct{ group *collective.Group }

func (s *seat) Group() *collective.Group { return s.group }

// connected returns groups of ranks connected by TCP, or by shared memory between ranks on the same
// host.
func connected(tb testing.TB, hosts string) []*collective.Group {
	tb.Helper()
	a, err := identity.NewAuthority("test")
	if err != nil {
		tb.Fatal(err)
	}
	n := len(hosts)
	endpoints, addrs := make([]*collective.Endpoint, n), make([][]string, n)
	for i := range n {
		c, err := a.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: i, Incarnation: fmt.Sprint("i", i)})
		if err != nil {
			tb.Fatal(err)
		}
		if endpoints[i], err = collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0"}); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { endpoints[i].Close() })
		addrs[i] = endpoints[i].Addrs()
	}
	key, groups := identity.NewDataKey(), make([]*collective.Group, n)
	each(tb, n, func(rank int) (err error) {
		groups[rank], err = endpoints[rank].Connect(context.Background(),
			collective.Peers{Generation: 1, Key: key, Rank: rank, Addrs: addrs, Hosts: strings.Split(hosts, "")})
		return err
	})
	return groups
}

// each runs f for all ranks and fails if one does.
func each(tb testing.TB, n int, f func(rank int) error) {
	tb.Helper()
	errs := errorsOf(n, f)
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

func errorsOf(n int, f func(rank int) error) []error {
	errs := make([]error, n)
	var running sync.WaitGroup
	for rank := range n {
		running.Go(func() { errs[rank] = f(rank) })
	}
	running.Wait()
	return errs
}

func closeAll(groups []*collective.Group) {
	_ = errorsOf(len(groups), func(rank int) error { return groups[rank].Close() })
}

// kind converts between float64 and one type.
type kind[T gradient.Float] struct {
	to   func(float64) T
	from func(T) float64
	near float64 // relative tolerance
}

var (
	float32s  = kind[float32]{func(f float64) float32 { return float32(f) }, func(f float32) float64 { return float64(f) }, 1e-5}
	float64s  = kind[float64]{func(f float64) float64 { return f }, func(f float64) float64 { return f }, 1e-12}
	float16s  = kind[collective.Float16]{func(f float64) collective.Float16 { return collective.ToFloat16(float32(f)) }, func(h collective.Float16) float64 { return float64(h.Float32()) }, 1e-2}
	bfloat16s = kind[collective.BFloat16]{func(f float64) collective.BFloat16 { return collective.ToBFloat16(float32(f)) }, func(h collective.BFloat16) float64 { return float64(h.Float32()) }, 5e-2}
)

// add adds x to element i.
func (k kind[T]) add(data []T, i int, x float64) { data[i] = k.to(k.from(data[i]) + x) }

// element returns what a pass adds to an element.
func element(rank, step, pass, tensor, i int) float64 {
	return float64((rank*31+step*17+pass*13+tensor*7+i)%64) + 1
}

// lengths are the lengths of the tensors in tests: some are empty, some share a bucket of 64 bytes,
// and some are larger than one.
var lengths = []int{3, 0, 17, 1, 1, 40, 0, 5}

// backward adds the gradients of one pass, from last to first, and calls Ready for some, in various
// orders and at various times.
func backward[T gradient.Float](k kind[T], a *gradient.Averager[T], rank, step, pass int, r *rand.Rand) func() error {
	return func() error {
		quiet := r.IntN(4) == 0
		var later sync.WaitGroup
		defer later.Wait()
		for t := a.Len() - 1; t >= 0; t-- {
			for i := range a.Tensor(t) {
				k.add(a.Tensor(t), i, element(rank, step, pass, t, i))
			}
			switch {
			case quiet:
			case r.IntN(3) == 0:
				later.Go(func() { a.Ready(t) })
			default:
				a.Ready(t)
				a.Ready(t)
			}
		}
		return nil
	}
}

// check compares the averages of a step with those of all ranks' passes.
func check[T gradient.Float](k kind[T], a *gradient.Averager[T], step int, passes []int) error {
	for t := range a.Len() {
		for i, got := range a.Tensor(t) {
			sum, n := 0., 0
			for rank, made := range passes {
				for pass := range made {
					sum += element(rank, step, pass, t, i)
				}
				n += made
			}
			if want := sum / float64(n); math.Abs(k.from(got)-want) > k.near*want {
				return fmt.Errorf("step %d: element %d of tensor %d is %v, want %v", step, i, t, k.from(got), want)
			}
		}
	}
	return nil
}

func testAverages[T gradient.Float](t *testing.T, k kind[T], groups []*collective.Group, o gradient.Options) {
	t.Helper()
	n := len(groups)
	defer closeAll(groups)
	all := make([]*gradient.Averager[T], n)
	each(t, n, func(rank int) error {
		r := rand.New(rand.NewPCG(uint64(rank), 1))
		a := gradient.NewAverager[T](&seat{groups[rank]}, o, lengths...)
		defer a.Close()
		all[rank] = a
		made := make([]int, n)
		for i := range made {
			made[i] = max(o.Passes, 1)
		}
		for step := range 6 {
			for pass := range made[0] {
				averaged, err := a.Pass(t.Context(), backward(k, a, rank, step, pass, r))
				if err != nil || averaged != (pass == made[0]-1) {
					return fmt.Errorf("pass %d: %t, %w", pass, averaged, err)
				}
			}
			if err := check(k, a, step, made); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestAverages(t *testing.T) {
	for _, hosts := range []string{"a", "ab", "aa", "aab"} {
		for _, o := range []gradient.Options{{Bucket: 64}, {Passes: 3}, {Passes: 2, Bucket: 1}, {Bucket: -1, Name: "another"}} {
			t.Run(fmt.Sprintf("%s/%+v", hosts, o), func(t *testing.T) {
				t.Parallel()
				testAverages(t, float32s, connected(t, hosts), o)
				testAverages(t, float64s, collective.Local(len(hosts)), o)
				testAverages(t, float16s, collective.Local(len(hosts)), o)
				testAverages(t, bfloat16s, connected(t, hosts), o)
				coarse := float32s
				coarse.near = bfloat16s.near
				o.Compression = collective.CompressBFloat16
				testAverages(t, coarse, collective.Local(len(hosts)), o)
			})
		}
	}
}

// Ranks have different numbers of batches, some end in the middle of a step, and all get false in
// the same step.
func TestJoin(t *testing.T) {
	for _, c := range []struct {
		passes  int
		batches []int
	}{{1, []int{3, 0, 5}}, {4, []int{9, 16, 2}}, {2, []int{0, 0}}, {3, []int{7}}, {1, []int{2, 2}}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			t.Parallel()
			n := len(c.batches)
			groups := collective.Local(n)
			defer closeAll(groups)
			made := func(step int) []int {
				of := make([]int, n)
				for rank, has := range c.batches {
					of[rank] = max(0, min(c.passes, has-step*c.passes))
				}
				return of
			}
			most := 0
			for _, has := range c.batches {
				most = max(most, (has+c.passes-1)/c.passes)
			}
			each(t, n, func(rank int) error {
				r := rand.New(rand.NewPCG(uint64(rank), 2))
				a := gradient.NewAverager[float32](&seat{groups[rank]}, gradient.Options{Passes: c.passes, Bucket: 64}, lengths...)
				defer a.Close()
				steps := 0
				for batch := 0; ; {
					var averaged bool
					var err error
					joined := batch == c.batches[rank]
					if joined {
						averaged, err = a.Join(t.Context())
					} else {
						averaged, err = a.Pass(t.Context(), backward(float32s, a, rank, steps, batch%c.passes, r))
						batch++
					}
					switch {
					case err != nil:
						return err
					case averaged:
						if err := check(float32s, a, steps, made(steps)); err != nil {
							return err
						}
						steps++
					case joined:
						if steps != most {
							return fmt.Errorf("rank %d is through after %d steps, not %d", rank, steps, most)
						}
						return nil
					}
				}
			})
		})
	}
}

// A peer dies at any point in a step. The next world starts with zero gradients.
func TestOtherWorld(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			const n, passes = 3, 2
			old, next := collective.Local(n), collective.Local(n-1)
			defer closeAll(next)
			death := rand.New(rand.NewPCG(seed, 3)).IntN(3*passes*len(lengths)) / len(lengths)
			each(t, n, func(rank int) error {
				r := rand.New(rand.NewPCG(seed, uint64(rank)))
				s := &seat{old[rank]}
				a := gradient.NewAverager[float64](s, gradient.Options{Passes: passes, Bucket: 64}, lengths...)
				defer a.Close()
				dies := errors.New("dies")
				var err error
				for call := 0; err == nil; call++ {
					whole := backward(float64s, a, rank, call/passes, call%passes, r)
					_, err = a.Pass(t.Context(), func() error {
						if rank == n-1 && call == death {
							a.Ready(7, 6, 5)
							old[rank].Abort(dies)
							return dies
						}
						return whole()
					})
				}
				if rank == n-1 {
					if !errors.Is(err, dies) {
						return fmt.Errorf("the one that dies: %w", err)
					}
					return nil
				}
				if !errors.Is(err, collective.ErrAborted) {
					return fmt.Errorf("rank %d: %w, want an abort", rank, err)
				}
				if _, again := a.Pass(t.Context(), func() error { return nil }); !errors.Is(again, collective.ErrAborted) {
					return fmt.Errorf("rank %d in the same world: %w", rank, again)
				}
				old[rank].Close()
				s.group = next[rank]
				made := []int{passes, passes}
				for step := range 3 {
					for pass := range passes {
						if _, err := a.Pass(t.Context(), backward(float64s, a, rank, step, pass, r)); err != nil {
							return err
						}
					}
					if err := check(float64s, a, step, made); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

// A world that ends between the passes of a step discards what they have accumulated.
func TestOtherWorldBetweenPasses(t *testing.T) {
	s := &seat{collective.Local(1)[0]}
	a := gradient.NewAverager[float32](s, gradient.Options{Passes: 2}, 1)
	defer a.Close()
	pass := func(x float32) bool {
		averaged, err := a.Pass(t.Context(), func() error { a.Tensor(0)[0] += x; return nil })
		if err != nil {
			t.Fatal(err)
		}
		return averaged
	}
	pass(100)
	s.group = collective.Local(1)[0]
	if first, second := pass(1), pass(2); first || !second || a.Tensor(0)[0] != 1.5 {
		t.Error(first, second, a.Tensor(0))
	}
}

func TestErrors(t *testing.T) {
	mine := errors.New("mine")
	fails := func() error { return mine }
	g := &seat{collective.Local(1)[0]}
	a := gradient.NewAverager[float32](g, gradient.Options{}, 1)
	if _, err := a.Pass(t.Context(), fails); err != mine {
		t.Error(err)
	}
	if _, err := a.Join(t.Context()); !errors.Is(err, mine) || !strings.Contains(err.Error(), "an earlier pass") {
		t.Error(err)
	}
	g.group = collective.Local(1)[0]
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := a.Pass(ended, fails); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if averaged, err := a.Join(t.Context()); averaged || err != nil {
		t.Error(averaged, err)
	}
	a.Ready(0) // ignored outside of a pass
	a.Close()
	for want, a := range map[string]*gradient.Averager[float32]{
		"is closed":     a,
		"worker is nil": gradient.NewAverager[float32](nil, gradient.Options{}, 1),
		"tensor 1 has":  gradient.NewAverager[float32](g, gradient.Options{}, 1, -1),
	} {
		if _, err := a.Pass(t.Context(), fails); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	// Ranks with different options get an error.
	groups := collective.Local(2)
	defer closeAll(groups)
	for rank, err := range errorsOf(2, func(rank int) error {
		_, err := gradient.NewAverager[float32](&seat{groups[rank]}, gradient.Options{}, 1+rank).Join(t.Context())
		return err
	}) {
		var mismatch *collective.MismatchError
		if !errors.As(err, &mismatch) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}
