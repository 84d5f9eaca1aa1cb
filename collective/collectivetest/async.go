package collectivetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func testAsync(t *testing.T, newGroups NewGroups) {
	t.Run("Orders", func(t *testing.T) { testAsyncOrders(t, newGroups) })
	t.Run("Beside", func(t *testing.T) { testAsyncBeside(t, newGroups) })
	t.Run("Moves", func(t *testing.T) { testAsyncMoves(t, newGroups) })
	t.Run("Names", func(t *testing.T) { testAsyncNames(t, newGroups) })
	t.Run("Grouped", func(t *testing.T) { testGrouped(t, newGroups) })
	t.Run("Scales", func(t *testing.T) { testScales(t, newGroups) })
	t.Run("Compression", func(t *testing.T) { testCompression(t, newGroups) })
	t.Run("Join", func(t *testing.T) { testJoin(t, newGroups) })
	t.Run("Mismatch", func(t *testing.T) { testAsyncMismatch(t, newGroups) })
	t.Run("Death", func(t *testing.T) { testAsyncDeath(t, newGroups) })
	t.Run("Cancel", func(t *testing.T) { testAsyncCancel(t, newGroups) })
	t.Run("Close", func(t *testing.T) { testAsyncClose(t, newGroups) })
	t.Run("Leaks", func(t *testing.T) { testAsyncLeaks(t, newGroups) })
}

// tensor is a tensor that the ranks submit.
type tensor struct {
	name   string
	start  func(ctx context.Context, g *collective.Group) *collective.Handle
	finish func(rank int) error // checks the result of a rank
}

// tensorOf makes a tensor whose results over n ranks are checked.
func tensorOf[T collective.Element](name string, n, length int, op collective.Op) tensor {
	got, want := make([][]T, n), expect[T](n, length, op)
	return tensor{name,
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			got[g.Rank()] = input[T](g.Rank(), length, op)
			return collective.AllReduceAsync(ctx, g, name, got[g.Rank()], op)
		},
		func(rank int) error {
			if i := differ(got[rank], want); i >= 0 {
				return fmt.Errorf("%s, %T (%v), rank %d: element %d is %v, want %v", name, want[i], op, rank, i, got[rank][i], want[i])
			}
			return nil
		}}
}

func tensors(n int) []tensor {
	set := []tensor{
		tensorOf[float32]("empty", n, 0, collective.Sum),
		tensorOf[float32]("a", n, 1, collective.Sum),
		tensorOf[float32]("b", n, 100_001, collective.Sum),
		tensorOf[float32]("c", n, 500, collective.Average),
		tensorOf[float64]("d", n, 5003, collective.Max),
		tensorOf[int8]("e", n, 77, collective.Product),
		tensorOf[int64]("f", n, 3000, collective.Min),
		tensorOf[uint16]("g", n, 9, collective.Average),
		tensorOf[collective.Float16]("h", n, 999, collective.Sum),
		tensorOf[collective.BFloat16]("i", n, 4, collective.Average),
	}
	for i := range 20 {
		set = append(set, tensorOf[float32](fmt.Sprint("layer", i), n, 10*i, collective.Sum))
	}
	set = append(set, moved[float32]("m", n, 5003)...)
	return append(set, moved[int16]("s", n, 3)...)
}

// step makes a rank submit tensors in its own order and wait for them in another.
func step(ctx context.Context, g *collective.Group, set []tensor, r *rand.Rand) error {
	handles := make([]*collective.Handle, len(set))
	for _, i := range r.Perm(len(set)) {
		handles[i] = set[i].start(ctx, g)
		if r.IntN(8) == 0 {
			runtime.Gosched()
		}
	}
	for _, i := range r.Perm(len(set)) {
		if err := handles[i].Wait(); err != nil {
			return err
		}
		if !handles[i].Done() {
			return errors.New("not done after Wait")
		}
		if err := set[i].finish(g.Rank()); err != nil {
			return err
		}
	}
	return nil
}

// testAsyncOrders: every rank submits the same tensors in its own order, over several steps.
func testAsyncOrders(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{1, 2, 3, 4, 5, 8}, 1, 5, 8) {
		groups := newGroups(t, n)
		set := tensors(n)
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			r := rand.New(rand.NewPCG(uint64(n), uint64(g.Rank())))
			for range repeat(12) {
				if err := step(ctx, g, set, r); err != nil {
					return err
				}
			}
			return nil
		}))
		closeAll(t, groups)
	}
}

// testAsyncBeside: asynchronous operations of a group and of a subset run concurrently with
// ordinary ones.
func testAsyncBeside(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 4)
	defer closeAll(t, groups)
	subs := subset(t, groups, 3, 1)
	whole, part := tensors(4), tensors(2)
	var running sync.WaitGroup
	run := func(groups []*collective.Group, f func(ctx context.Context, g *collective.Group, r *rand.Rand) error) {
		running.Go(func() {
			for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				r := rand.New(rand.NewPCG(8, uint64(g.Rank())))
				for range repeat(8) {
					if err := f(ctx, g, r); err != nil {
						return err
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
	run(groups, func(ctx context.Context, g *collective.Group, r *rand.Rand) error { return step(ctx, g, whole, r) })
	run(subs, func(ctx context.Context, g *collective.Group, r *rand.Rand) error { return step(ctx, g, part, r) })
	run(groups, func(ctx context.Context, g *collective.Group, _ *rand.Rand) error { return all(ctx, g, 5000) })
	running.Wait()
}

// testAsyncNames: a name can be used again once its operation is done, also for another shape; many
// names are forgotten; a name that is in use, empty or too long is refused.
func testAsyncNames(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	for _, length := range []int{5, 5, 7, 5} {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			set := []tensor{tensorOf[float32]("x", 3, length, collective.Sum)}
			r := rand.New(rand.NewPCG(1, 1))
			return step(ctx, g, set, r)
		}))
	}
	refused := make(chan struct{}) // until then the first one of rank 0 cannot end
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		if g.Rank() == 0 {
			first := collective.AllReduceAsync(ctx, g, "twice", []int32{1}, collective.Sum)
			second := collective.AllReduceAsync(ctx, g, "twice", []int32{1}, collective.Sum)
			close(refused)
			if err := second.Wait(); err == nil ||
				!strings.Contains(err.Error(), "twice") || errors.Is(err, collective.ErrAborted) {
				return fmt.Errorf("a name that is taken: %v", err)
			}
			for _, name := range []string{"", strings.Repeat("x", 256)} {
				if err := collective.AllReduceAsync(ctx, g, name, []int32{1}, collective.Sum).Wait(); err == nil {
					return fmt.Errorf("name %q", name)
				}
			}
			return first.Wait()
		}
		<-refused
		return collective.AllReduceAsync(ctx, g, "twice", []int32{1}, collective.Sum).Wait()
	}))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		for range 2 { // all refuse it
			if err := collective.AllReduceAsync(ctx, g, "op", []int32{1}, 77).Wait(); err == nil || errors.Is(err, collective.ErrAborted) {
				return fmt.Errorf("no operation: %v", err)
			}
		}
		return collective.AllReduceAsync(ctx, g, "op", []int32{1}, collective.Sum).Wait()
	}))
	if short() {
		return
	}
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		data := make([]uint16, 5000)
		for round := range repeat(4) {
			handles := make([]*collective.Handle, len(data))
			for i := range data {
				data[i] = uint16(i)
				handles[i] = collective.AllReduceAsync(ctx, g, fmt.Sprint(round, ".", i), data[i:i+1], collective.Sum)
			}
			for i, h := range handles {
				if err := h.Wait(); err != nil || data[i] != 3*uint16(i) {
					return fmt.Errorf("%d: %d, %v", i, data[i], err)
				}
			}
		}
		return nil
	}))
}

func testGrouped(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	lengths := []int{0, 3, 70_000, 12, 1}
	for range 5 {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			data := make([][]float64, len(lengths))
			for i, length := range lengths {
				data[i] = input[float64](g.Rank(), length, collective.Average)
			}
			if err := collective.GroupedAllReduce(ctx, g, "all", data, collective.Average); err != nil {
				return err
			}
			for i, length := range lengths {
				if !equal(data[i], expect[float64](3, length, collective.Average)) {
					return fmt.Errorf("slice %d is wrong", i)
				}
			}
			return nil
		}))
	}
}

// testScales: data is scaled before and after.
func testScales(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	for _, length := range []int{1, 50_000} {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			a, b := make([]float32, length), make([]float64, length)
			for i := range a {
				a[i], b[i] = float32(g.Rank()+1), float64(g.Rank()+1)
			}
			first := collective.AllReduceAsyncWith(ctx, g, "a", a, collective.Max, collective.AsyncOptions{Prescale: -2})
			second := collective.AllReduceAsyncWith(ctx, g, "b", b, collective.Sum, collective.AsyncOptions{Prescale: 2, Postscale: 0.25})
			if err := errors.Join(first.Wait(), second.Wait()); err != nil {
				return err
			}
			for i := range a {
				if a[i] != -2 || b[i] != 3 {
					return fmt.Errorf("element %d: %v, %v", i, a[i], b[i])
				}
			}
			return nil
		}))
	}
}

// testCompression: the results are those of the narrow type.
func testCompression(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	for _, length := range []int{1, 3000, 70_001} {
		for _, c := range []collective.Compression{collective.CompressFloat16, collective.CompressBFloat16} {
			want := repeated(length, func(i int) float32 {
				if c == collective.CompressFloat16 {
					return expect[collective.Float16](3, period, collective.Average)[i].Float32()
				}
				return expect[collective.BFloat16](3, period, collective.Average)[i].Float32()
			})
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				data := [4][]float32{}
				for i := range data {
					data[i] = input[float32](g.Rank(), length, collective.Average)
				}
				if err := collective.AllReduceCompressed(ctx, g, data[0], collective.Average, c); err != nil {
					return err
				}
				o := collective.AsyncOptions{Compression: c}
				for i, h := range []*collective.Handle{
					collective.AllReduceAsyncWith(ctx, g, "1", data[1], collective.Average, o),
					collective.AllReduceAsyncWith(ctx, g, "2", data[2], collective.Average, o),
					collective.AllReduceAsync(ctx, g, "3", data[3], collective.Average),
				} {
					if err := h.Wait(); err != nil {
						return fmt.Errorf("tensor %d: %w", i+1, err)
					}
				}
				for i, d := range data[:3] {
					if !equal(d, want) {
						return fmt.Errorf("%v, way %d: it is wrong", c, i)
					}
				}
				if !equal(data[3], expect[float32](3, length, collective.Average)) {
					return errors.New("the one that is not compressed is wrong")
				}
				return nil
			}))
		}
	}
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		if err := collective.AllReduceCompressed(ctx, g, []float32{1}, collective.Sum, 9); err == nil || errors.Is(err, collective.ErrAborted) {
			return fmt.Errorf("no compression: %v", err)
		}
		o := collective.AsyncOptions{Compression: collective.CompressFloat16}
		if err := collective.AllReduceAsyncWith(ctx, g, "i", []int32{1}, collective.Sum, o).Wait(); err == nil {
			return errors.New("compressed integers")
		}
		return nil
	}))
}

// testJoin: ranks have differently many batches.
func testJoin(t *testing.T, newGroups NewGroups) {
	const n = 4
	groups := newGroups(t, n)
	defer closeAll(t, groups)
	batches := [n]int{3, 7, 1, 5}
	for round := range repeat(5) {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			me := g.Rank()
			for batch := range batches[me] {
				var sum, least, most, contributors int
				least = math.MaxInt
				for rank, has := range batches {
					if has > batch {
						v := rank + batch + 1
						contributors++
						sum, least, most = sum+v, min(least, v), max(most, v)
					}
				}
				v := me + batch + 1
				a, b, c := []float32{float32(v), float32(math.Copysign(0, -1))}, []int32{int32(v)}, []float64{float64(v)}
				d := []uint16{uint16(v)}
				handles := []*collective.Handle{
					collective.AllReduceAsync(ctx, g, "average", a, collective.Average),
					collective.AllReduceAsync(ctx, g, "min", b, collective.Min),
					collective.AllReduceAsync(ctx, g, "max", c, collective.Max),
					collective.AllReduceAsync(ctx, g, "sum", d, collective.Sum),
				}
				if batch == 2 { // new ones while some have joined
					handles = append(handles, collective.AllReduceAsync(ctx, g, fmt.Sprint("new", round), []int8{1}, collective.Product))
				}
				for _, h := range handles {
					if err := h.Wait(); err != nil {
						return err
					}
				}
				if a[0] != float32(sum)/float32(contributors) || !math.Signbit(float64(a[1])) || b[0] != int32(least) ||
					c[0] != float64(most) || d[0] != uint16(sum) {
					return fmt.Errorf("batch %d: %v %v %v %v", batch, a, b, c, d)
				}
			}
			last, err := collective.Join(ctx, g)
			if err == nil && last != 1 {
				err = fmt.Errorf("rank %d was the last", last)
			}
			return err
		}))
	}
}

// testAsyncMismatch: if the length, type, operation or option under one name differs, every rank
// gets an error with the name.
func testAsyncMismatch(t *testing.T, newGroups NewGroups) {
	type start func(ctx context.Context, g *collective.Group) *collective.Handle
	usual := func(ctx context.Context, g *collective.Group) *collective.Handle {
		return collective.AllReduceAsync(ctx, g, "the tensor", make([]float32, 10), collective.Sum)
	}
	for i, odd := range []start{
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			return collective.AllReduceAsync(ctx, g, "the tensor", make([]float32, 11), collective.Sum)
		},
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			return collective.AllReduceAsync(ctx, g, "the tensor", make([]int32, 10), collective.Sum)
		},
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			return collective.AllReduceAsync(ctx, g, "the tensor", make([]float32, 10), collective.Max)
		},
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			return collective.AllReduceAsyncWith(ctx, g, "the tensor", make([]float32, 10), collective.Sum,
				collective.AsyncOptions{Compression: collective.CompressBFloat16})
		},
		func(ctx context.Context, g *collective.Group) *collective.Handle {
			return collective.AllReduceAsyncWith(ctx, g, "the tensor", make([]float32, 10), collective.Sum,
				collective.AsyncOptions{Prescale: 3})
		},
	} {
		for _, known := range []bool{false, true} {
			groups := newGroups(t, 3)
			for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				if known {
					if err := usual(ctx, g).Wait(); err != nil {
						return err
					}
				}
				if g.Rank() == i%3 {
					return odd(ctx, g).Wait()
				}
				return usual(ctx, g).Wait()
			}) {
				checkMismatch(t, err, rank)
				var m *collective.MismatchError
				if errors.As(err, &m); m.Tensor != "the tensor" || m.Calls[0] == m.Calls[1] {
					t.Fatalf("rank %d: %v", rank, err)
				}
			}
			if err := collective.Barrier(context.Background(), groups[0]); !sameMismatch(err) {
				t.Fatalf("an operation after a mismatch: %v", err)
			}
			closeAll(t, groups)
		}
	}
}

// testAsyncDeath: a rank dies at a random moment; every handle of every other rank returns an error
// that names it.
func testAsyncDeath(t *testing.T, newGroups NewGroups) {
	CheckAsyncDeath(t, repeat(30), newGroups, func(g *collective.Group) { g.Abort(errors.New("killed")) })
}

// CheckAsyncDeath is like CheckDeath, for asynchronous operations.
func CheckAsyncDeath(t *testing.T, seeds int, newGroups NewGroups, kill func(g *collective.Group)) {
	t.Helper()
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 5))
		n := 2 + r.IntN(4)
		m := murder{t: t, seed: seed, groups: newGroups(t, n), victim: r.IntN(n), after: r.IntN(5000), kill: kill}
		set, orders := tensors(n), make([]*rand.Rand, n)
		for rank := range orders {
			orders[rank] = rand.New(rand.NewPCG(seed, uint64(rank)))
		}
		m.check(func(ctx context.Context, g *collective.Group) error { return step(ctx, g, set, orders[g.Rank()]) },
			func(g *collective.Group) error {
				return collective.AllReduceAsync(context.Background(), g, "later", []int8{1}, collective.Sum).Wait()
			})
	}
}

// testAsyncCancel: the end of the context of one operation ends the group; that operation returns
// the context's error.
func testAsyncCancel(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	ctx, cancel := context.WithCancel(context.Background())
	errs := Each(t, groups, func(bounded context.Context, g *collective.Group) error {
		one := collective.AllReduceAsync(bounded, g, "one", []int8{1}, collective.Sum)
		if err := one.Wait(); err != nil {
			return err
		}
		if g.Rank() == 1 {
			h := collective.AllReduceAsync(ctx, g, "two", []int8{1}, collective.Sum)
			cancel()
			return h.Wait()
		}
		return collective.AllReduceAsync(bounded, g, "three", []int8{1}, collective.Sum).Wait()
	})
	if !errors.Is(errs[1], context.Canceled) || errors.Is(errs[1], collective.ErrAborted) {
		t.Fatalf("rank 1: %v", errs[1])
	}
	checkAborted(t, errs[0], 1, "rank 0")
	checkAborted(t, errs[2], 1, "rank 2")
	closeAll(t, groups)
}

// testAsyncClose: a rank that closes after its last operation leaves without an error; an operation
// that needs it fails, and so does its own operation that is in progress when it closes.
func testAsyncClose(t *testing.T, newGroups NewGroups) {
	for i := range repeat(20) {
		groups := newGroups(t, 3)
		leaver := i % 3
		var finished sync.WaitGroup
		finished.Add(3)
		errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			if err := collective.AllReduceAsync(ctx, g, "last", make([]float32, 1000), collective.Sum).Wait(); err != nil {
				return fmt.Errorf("the last one of all: %v", err)
			}
			finished.Done()
			if g.Rank() == leaver {
				if i%4 != 1 {
					finished.Wait()
				}
				if i%4 == 3 {
					defer collective.AllReduceAsync(ctx, g, "left behind", []int8{1}, collective.Sum).Wait()
				}
				return g.Close()
			}
			finished.Wait()
			return collective.AllReduceAsync(ctx, g, "too late", []int8{1}, collective.Sum).Wait()
		})
		for rank, err := range errs {
			if rank != leaver {
				checkAborted(t, err, leaver, fmt.Sprintf("rank %d", rank))
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if err := collective.AllReduceAsync(context.Background(), groups[leaver], "x", []int8{1}, collective.Sum).Wait(); !errors.Is(err, collective.ErrClosed) {
			t.Fatal(err)
		}
		closeAll(t, groups)
	}
	if err := collective.AllReduceAsync(context.Background(), nil, "x", []int8{1}, collective.Sum).Wait(); err == nil {
		t.Fatal("an operation of no group")
	}
	if _, err := collective.Join(context.Background(), nil); err == nil {
		t.Fatal("joined no group")
	}
	unused := newGroups(t, 2) // one rank has closed before the other begins
	if err := unused[0].Close(); err != nil {
		t.Fatal(err)
	}
	errs := Each(t, unused[1:], func(ctx context.Context, g *collective.Group) error {
		return collective.AllReduceAsync(ctx, g, "x", []int8{1}, collective.Sum).Wait()
	})
	checkAborted(t, errs[0], 0, "the one that is left")
	closeAll(t, unused)
}

func testAsyncLeaks(t *testing.T, newGroups NewGroups) {
	leaks(t, newGroups, 60, func(_ int, groups, subs []*collective.Group) {
		must(t, Each(t, slices.Concat(groups, subs), func(ctx context.Context, g *collective.Group) error {
			return collective.AllReduceAsync(ctx, g, "x", make([]float32, 100), collective.Sum).Wait()
		}))
	})
}

// leaks is like checkLeaks, for work of groups of three ranks and their subsets. In one of three
// generations a group is aborted, and in another one the subset is closed before the group.
func leaks(t *testing.T, newGroups NewGroups, n int, work func(i int, groups, subs []*collective.Group)) {
	checkLeaks(t, n, func(t *testing.T, i int) {
		groups := newGroups(t, 3)
		subs := subset(t, groups, 2, 0)
		work(i, groups, subs)
		switch i % 3 {
		case 1:
			groups[i/3%3].Abort(nil)
		case 2:
			closeAll(t, subs)
		}
		closeAll(t, groups)
	})
}

// Way is a way of making groups. Hosts has one letter for each rank: ranks with the same letter
// share the memory of one host. If it is empty, no ranks share memory.
type Way struct {
	NewGroups
	Hosts string
}

// InOrder adds the ranks' vectors in the order of fused operations: first the ranks of each host,
// then the hosts.
func (w *Way) InOrder(inputs [][]float32) []float32 {
	var hosts [][]float32
	at := map[byte]int{}
	for rank, data := range inputs {
		i, known := len(hosts), false
		if rank < len(w.Hosts) {
			i, known = at[w.Hosts[rank]]
		}
		if known {
			addTo(hosts[i], data)
			continue
		}
		if hosts = append(hosts, slices.Clone(data)); rank < len(w.Hosts) {
			at[w.Hosts[rank]] = len(hosts) - 1
		}
	}
	for _, data := range hosts[1:] {
		addTo(hosts[0], data)
	}
	return hosts[0]
}

func addTo(sum, data []float32) {
	for i, v := range data {
		sum[i] += v
	}
}

// CheckFusedBits checks that tensors reduced together, and each alone, have the bits of a reduction
// in the order of the ranks of each host and then of the hosts, in all ways of making groups.
func CheckFusedBits(t *testing.T, ways ...Way) {
	t.Helper()
	lengths := []int{1, 3, 500, 2049, 20_011, 100_003, 1<<18 + 5}
	for _, n := range sizes([]int{2, 3, 4, 8}, 3, 8) {
		inputs := make([][][]float32, len(lengths)) // by tensor, by rank
		for i, length := range lengths {
			for rank := range n {
				r := rand.New(rand.NewPCG(uint64(rank), uint64(i)))
				data := make([]float32, length)
				for k := range data {
					data[k] = r.Float32() - 0.5
				}
				inputs[i] = append(inputs[i], data)
			}
		}
		for k, way := range ways {
			want := make([][]float32, len(lengths))
			for i := range lengths {
				want[i] = way.InOrder(inputs[i])
			}
			groups := way.NewGroups(t, n)
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				together, alone := make([][]float32, len(lengths)), make([][]float32, len(lengths))
				for i := range lengths {
					together[i], alone[i] = slices.Clone(inputs[i][g.Rank()]), slices.Clone(inputs[i][g.Rank()])
				}
				if err := collective.GroupedAllReduce(ctx, g, "together", together, collective.Sum); err != nil {
					return err
				}
				for i := range lengths {
					if err := collective.AllReduceAsync(ctx, g, fmt.Sprint("alone", i), alone[i], collective.Sum).Wait(); err != nil {
						return err
					}
					if !equal(together[i], want[i]) || !equal(alone[i], want[i]) {
						return fmt.Errorf("%d ranks, way %d: %d elements have other bits", n, k, lengths[i])
					}
				}
				return nil
			}))
			closeAll(t, groups)
		}
	}
}
