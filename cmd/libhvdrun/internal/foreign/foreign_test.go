package foreign

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
)

// world connects n ranks of this process through a library, and returns their groups by rank.
func world(t *testing.T, n int, options string) (l *Library, groups []*Group) {
	t.Helper()
	l = new(Library)
	endpoints, members := make([]int64, n), make([]member, n)
	for r := range n {
		var err error
		if endpoints[r], err = l.Listen(options); err != nil {
			t.Fatal(err)
		}
		addresses, err := l.Addresses(endpoints[r])
		if err != nil {
			t.Fatal(err)
		}
		members[r] = member{Host: "here", Addresses: addresses}
	}
	groups = make([]*Group, n)
	each(n, func(r int) {
		text, _ := json.Marshal(World{Generation: 1, Rank: r, Members: members, DataKey: strings.Repeat("5a", 32)})
		number, err := l.Connect(endpoints[r], string(text), 0, nil)
		if err != nil {
			t.Error(err)
			return
		}
		groups[r], _ = l.Group(number)
		t.Cleanup(func() { l.Close(number) })
	})
	for _, e := range endpoints {
		t.Cleanup(func() { l.Close(e) })
	}
	if t.Failed() {
		t.FailNow()
	}
	return l, groups
}

// each calls a function for n ranks concurrently.
func each(n int, do func(rank int)) {
	var ranks sync.WaitGroup
	for r := range n {
		ranks.Go(func() { do(r) })
	}
	ranks.Wait()
}

const (
	loopback = `{"listen": "127.0.0.1:0"}`
	sockets  = `{"listen": "127.0.0.1:0", "only_sockets": true}`
)

// with returns the call with these slices as its data and result.
func with[T any](c Call, data, result []T) Call {
	c.Data, c.Result = unsafe.Pointer(unsafe.SliceData(data)), unsafe.Pointer(unsafe.SliceData(result))
	return c
}

// do performs a call: it starts the call and waits if started is set, and blocks otherwise.
func (s *Group) do(c Call, started bool) error {
	if !started {
		return s.Run(c, nil)
	}
	ticket, err := s.Start(c)
	if err == nil {
		_, err = s.Wait(ticket, -1, nil)
	}
	return err
}

// TestKinds: each kind of call computes the same as package collective, whether it blocks or is
// started.
func TestKinds(t *testing.T) {
	sum, highest := int32(collective.Sum), int32(collective.Max)
	for _, options := range []string{loopback, sockets} {
		_, groups := world(t, 3, options)
		for _, started := range []bool{false, true} {
			each(3, func(r int) {
				expect := func(c Call, data, result, want []int32) {
					t.Helper()
					c.Type = Int32
					if err := groups[r].do(with(c, data, result), started); err != nil {
						t.Errorf("rank %d: %v", r, err)
						return
					}
					if result == nil {
						result = data
					}
					if !slices.Equal(result, want) {
						t.Errorf("rank %d: %s gives %d, not %d", r, kindNames[c.Kind], result, want)
					}
				}
				x := int32(r + 1)
				data := []int32{x, 10 * x, 100, x}
				expect(Call{Kind: ReduceScatter, Count: 4, Arg: sum}, data, make([]int32, []int{2, 1, 1}[r]), [][]int32{{6, 60}, {300}, {6}}[r])
				expect(Call{Kind: AllGather, Count: 4}, data, make([]int32, 12), []int32{1, 10, 100, 1, 2, 20, 100, 2, 3, 30, 100, 3})
				expect(Call{Kind: AllReduce, Count: 4, Arg: highest}, data, nil, []int32{3, 30, 100, 3})
				expect(Call{Kind: Barrier}, data, nil, data)
				data[0] = x
				expect(Call{Kind: Broadcast, Count: 1, Arg: 2}, data, nil, []int32{3, 30, 100, 3})
				sent := []int32{10 * x, 10*x + 1, 10*x + 2}
				expect(Call{Kind: AllToAll, Count: 1}, sent, make([]int32, 3), []int32{10 + int32(r), 20 + int32(r), 30 + int32(r)})
				// Rank 0 scatters parts of 1, 0 and 2 elements.
				counts, got := make([]int64, 6), make([]int32, []int{1, 0, 2}[r])
				if counts[3] = int64(len(got)); r == 0 {
					copy(counts, []int64{1, 0, 2})
				}
				expect(Call{Kind: AllToAll, Counts: counts}, sent, got, [][]int32{{10}, {}, {11, 12}}[r])
				// Of five leaves, rank 0 has the first two as one node, rank 1 has the third, and
				// rank 2 has the last two as two nodes.
				nodes := [][]int32{{1 + 2}, {3}, {4, 5}}[r]
				expect(Call{Kind: ReduceTree, Count: 1, Arg: sum, Counts: []int64{0, 2, 3, 5}}, nodes, make([]int32, 1), []int32{15})
			})
		}
	}
}

// TestTypes: every element type is summed correctly.
func TestTypes(t *testing.T) {
	_, groups := world(t, 2, loopback)
	each(2, func(r int) {
		g := groups[r]
		adds[float32](t, g, Float32, 1.5, 3)
		adds[float64](t, g, Float64, 1.5, 3)
		adds(t, g, Float16, collective.ToFloat16(1.5), collective.ToFloat16(3))
		adds(t, g, BFloat16, collective.ToBFloat16(1.5), collective.ToBFloat16(3))
		adds[int8](t, g, Int8, 100, -56)
		adds[int16](t, g, Int16, -3, -6)
		adds[int32](t, g, Int32, -3, -6)
		adds[int64](t, g, Int64, -3, -6)
		adds[uint8](t, g, Uint8, 200, 144)
		adds[uint16](t, g, Uint16, 40000, 14464)
		adds[uint32](t, g, Uint32, 1<<31+1, 2)
		adds[uint64](t, g, Uint64, 1<<63+1, 2)
	})
}

func adds[T collective.Element](t *testing.T, g *Group, kind Type, x, twice T) {
	data := []T{x, x, x}
	if err := g.Run(with(Call{Kind: AllReduce, Count: 3, Type: kind, Arg: int32(collective.Sum)}, data, nil), nil); err != nil {
		t.Error(err)
	}
	if !slices.Equal(data, []T{twice, twice, twice}) {
		t.Errorf("type %d: twice %v is %v", kind, x, data)
	}
}

// TestOrder: started calls and blocking calls run in one order, in whatever order a caller waits
// for them.
func TestOrder(t *testing.T) {
	_, groups := world(t, 2, loopback)
	each(2, func(r int) {
		const many = 200
		data := make([]int64, many)
		tickets := make([]uint64, many)
		var errs []error
		for i := range data {
			data[i] = int64(i + 1)
			c := with(Call{Kind: AllReduce, Count: int64(i + 1), Type: Int64, Arg: int32(collective.Sum)}, data, nil)
			if i%17 == 16 {
				errs = append(errs, groups[r].Run(c, nil))
				continue
			}
			ticket, err := groups[r].Start(c)
			tickets[i], errs = ticket, append(errs, err)
			if i%50 == 49 {
				_, err := groups[r].Wait(tickets[i-3], -1, nil)
				errs = append(errs, err)
			}
		}
		errs = append(errs, groups[r].Run(Call{Kind: Barrier}, nil))
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
		for i, got := range data { // element i was added by all calls from number i on, once it had its value
			if want := int64(i+1) << (many - i); many-i < 50 && got != want {
				t.Errorf("rank %d: element %d is %d, not %d", r, i, got, want)
			}
		}
		if done, err := groups[r].Wait(tickets[many-1], 0, nil); !done || err != nil {
			t.Errorf("a call that has ended is waited for: %v, %v", done, err)
		}
	})
}

// TestWrongArguments: a call whose arguments a rank can recognise as invalid has no effect on the
// group.
func TestWrongArguments(t *testing.T) {
	l, groups := world(t, 2, loopback)
	data := make([]float32, 4)
	sum := int32(collective.Sum)
	for _, c := range []struct {
		call Call
		says string
	}{
		{Call{Kind: 99}, "there is no operation 99"},
		{Call{Kind: AllReduce, Type: 13, Arg: sum}, "there is no type 13"},
		{Call{Kind: AllReduce, Type: Float32, Arg: 7}, "there is no reduction 7"},
		{Call{Kind: AllReduce, Type: Int8, Arg: int32(collective.Adasum)}, "floating point"},
		{Call{Kind: AllReduce, Type: Float32, Arg: sum, Count: -1}, "-1 elements"},
		{Call{Kind: AllReduce, Type: Float64, Arg: sum, Count: 1 << 60}, "elements"},
		{Call{Kind: AllReduce, Type: Float32, Arg: sum, Count: 1}, "is null"},
		{with(Call{Kind: AllGather, Type: Float32, Count: 1}, data, nil), "is null"},
		{with(Call{Kind: Broadcast, Type: Float32, Count: 1, Arg: 2}, data, nil), "rank 2 is out of range"},
		{with(Call{Kind: Send, Type: Float32, Count: 1}, data, nil), "to itself"},
		{with(Call{Kind: Recv, Type: Float32, Count: 1, Arg: -1}, data, nil), "rank -1 is out of range"},
		{with(Call{Kind: AllToAll, Type: Float32, Counts: []int64{1, 1, 1}}, data, data), "3 counts"},
		{with(Call{Kind: AllToAll, Type: Float32, Counts: []int64{1, -1, 1, 1}}, data, data), "-1 elements"},
		{with(Call{Kind: ReduceTree, Type: Float32, Arg: sum, Counts: []int64{0, 3, 2}}, data, data), "first leaves"},
	} {
		_, err := groups[0].Start(c.call)
		if err == nil || !strings.Contains(err.Error(), c.says) || Code(err) != codeFailed {
			t.Errorf("%+v: %v, not %q", c.call, err, c.says)
		}
	}
	if _, err := groups[0].Wait(1, 0, nil); err == nil {
		t.Error("a call that was never made is waited for")
	}
	for _, world := range []string{"", "{}", `{"data_key": "zz"}`, `{"data_key": "` + strings.Repeat("0", 64) + `", "rank": 1}`} {
		e, err := l.Listen(loopback)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Connect(e, world, 0, nil); err == nil {
			t.Errorf("connected to the world %q", world)
		}
		l.Close(e)
	}
	each(2, func(r int) {
		if err := groups[r].Run(Call{Kind: Barrier}, nil); err != nil {
			t.Error(err)
		}
	})
}

// TestAbort: whatever ends the group of one rank also ends the calls of the others, both blocking
// and started ones.
func TestAbort(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(g *Group, c Call) error
		code int32
	}{
		{"abort", func(g *Group, _ Call) error { g.Abort("because"); return g.Err() }, codeAborted},
		{"close", func(g *Group, _ Call) error { g.Close(); return g.Err() }, codeAborted},
		{"check", func(g *Group, c Call) error { return g.Run(c, func() bool { return true }) }, codeInterrupted},
		{"limit", func(g *Group, c Call) error { g.Limit(1); return g.Run(c, nil) }, codeTimeout},
		{"limit of a started call", func(g *Group, c Call) error { g.Limit(1); return g.do(c, true) }, codeTimeout},
	} {
		for _, options := range []string{loopback, sockets} {
			t.Run(c.name+" "+options, func(t *testing.T) {
				_, groups := world(t, 3, options)
				ended := make(chan struct{})
				each(3, func(r int) {
					data := make([]float32, 1000)
					call := with(Call{Kind: AllReduce, Count: 1000, Type: Float32, Arg: int32(collective.Sum)}, data, nil)
					switch r {
					case 0: // too late for the call
						<-ended
					case 1:
						defer close(ended)
						if err := c.end(groups[r], call); Code(err) != c.code {
							t.Errorf("its own rank: %v", err)
						}
						return
					}
					err := groups[r].do(call, r == 2)
					if err == nil { // the data that the other rank had sent before was enough for one call
						err = groups[r].do(call, r == 2)
					}
					if Code(err) != codeAborted {
						t.Errorf("rank %d: %v", r, err)
					}
					if again := groups[r].do(call, r == 0); again != err || groups[r].Err() != err {
						t.Errorf("rank %d: %v is followed by %v", r, err, again)
					}
				})
			})
		}
	}
}

// TestCheckRuns: a waiting caller's check is called repeatedly, and the call continues.
func TestCheckRuns(t *testing.T) {
	for _, options := range []string{loopback, sockets} {
		_, groups := world(t, 2, options)
		var asked atomic.Int32
		enough := make(chan struct{})
		each(2, func(r int) {
			check := func() bool {
				if asked.Add(1) == 2 {
					close(enough)
				}
				return false
			}
			if r == 1 {
				check = nil
				<-enough
			}
			if err := groups[r].Run(Call{Kind: Barrier}, check); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestEndInCheck: the check of a call can end the call's group, or the parent of that group; this
// ends the call too.
func TestEndInCheck(t *testing.T) {
	for name, end := range map[string]func(g *Group){
		"abort":  func(g *Group) { g.Abort("because") },
		"close":  (*Group).Close,
		"parent": func(g *Group) { g.parent.Abort("because") },
	} {
		for _, options := range []string{loopback, sockets} {
			t.Run(name+" "+options, func(t *testing.T) {
				_, groups := world(t, 2, options)
				ended := make(chan struct{})
				each(2, func(r int) {
					g, err := groups[r].Subset([]int{0, 1}, nil)
					if err != nil {
						t.Error(err)
					} else if r == 1 {
						<-ended
						if err = g.Run(Call{Kind: Barrier}, nil); err == nil { // as in TestAbort
							err = g.Run(Call{Kind: Barrier}, nil)
						}
					} else {
						err = g.Run(Call{Kind: Barrier}, func() bool { end(g); return false })
						close(ended)
					}
					if Code(err) != codeAborted {
						t.Errorf("rank %d: %v", r, err)
					}
				})
			})
		}
	}
}

// TestMessages: messages of two ranks to each other run beside collectives, in order, whether they
// block or are started, and do not otherwise wait for each other.
func TestMessages(t *testing.T) {
	for _, options := range []string{loopback, sockets} {
		_, groups := world(t, 3, options)
		each(3, func(r int) {
			g, to, from := groups[r], int32(r+1)%3, int32(r+2)%3
			message := func(kind Kind, peer int32, data []int64) Call {
				return with(Call{Kind: kind, Count: int64(len(data)), Type: Int64, Arg: peer}, data, nil)
			}
			const large = 100_000
			sent, got := make([]int64, large), make([]int64, large)
			sent[large-1] = int64(r)
			started, err := g.Start(message(Send, to, sent)) // before its receiver is ready: it blocks nobody
			if err != nil {
				t.Error(err)
			}
			if err := g.Run(Call{Kind: Barrier}, nil); err != nil {
				t.Error(err)
			}
			if err := g.Run(message(Recv, from, got), nil); err != nil || got[large-1] != int64(from) {
				t.Errorf("rank %d: %d, %v", r, got[large-1], err)
			}
			if _, err := g.Wait(started, -1, nil); err != nil {
				t.Error(err)
			}
			small := make([]int64, 100)
			tickets := make([]uint64, len(small))
			for i := range small {
				var err error
				if tickets[i], err = g.Start(message(Recv, from, small[i:i+1])); err != nil {
					t.Error(err)
				}
			}
			for i := range small {
				if err := g.Run(message(Send, to, []int64{int64(i)}), nil); err != nil {
					t.Error(err)
				}
			}
			for i := range slices.Backward(small) {
				if _, err := g.Wait(tickets[i], -1, nil); err != nil || small[i] != int64(i) {
					t.Errorf("message %d is %d, %v", i, small[i], err)
				}
			}
		})
	}
}

// TestSubset: calls on a subset do not wait for calls on other groups.
func TestSubset(t *testing.T) {
	_, groups := world(t, 3, loopback)
	each(3, func(r int) {
		subset, err := groups[r].Subset([]int{2, 0}, nil)
		if err != nil || (subset == nil) != (r == 1) {
			t.Errorf("rank %d: %v, %v", r, subset, err)
			return
		}
		if subset == nil {
			return
		}
		data := []int32{int32(r)}
		if err := subset.Run(with(Call{Kind: Broadcast, Count: 1, Type: Int32}, data, nil), nil); err != nil || data[0] != 2 || subset.Size() != 2 {
			t.Errorf("rank %d: %d, %v", r, data[0], err)
		}
		subset.Close()
	})
}

// TestPanic: a panic in an operation ends the group with an error.
func TestPanic(t *testing.T) {
	_, groups := world(t, 2, loopback)
	asked := make(chan struct{})
	each(2, func(r int) {
		if r == 1 {
			<-asked
			err := groups[r].Run(Call{Kind: Barrier}, nil)
			if err == nil { // the data that the other rank had sent before was enough for one call
				err = groups[r].Run(Call{Kind: Barrier}, nil)
			}
			if Code(err) != codeAborted {
				t.Error(err)
			}
			return
		}
		check := func() bool {
			close(asked)
			panic("no")
		}
		if err := groups[r].Run(Call{Kind: Barrier}, check); err == nil || !strings.Contains(err.Error(), "panic: no") {
			t.Error(err)
		}
	})
}

// BenchmarkRun measures the overhead of a call, with an operation of a single rank.
func BenchmarkRun(b *testing.B) {
	l := new(Library)
	e, err := l.Listen(loopback)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close(e)
	text, _ := json.Marshal(World{Generation: 1, Members: make([]member, 1), DataKey: strings.Repeat("5a", 32)})
	number, err := l.Connect(e, string(text), 0, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close(number)
	g, _ := l.Group(number)
	data := make([]float32, 1)
	b.Run("call", func(b *testing.B) {
		c := with(Call{Kind: AllReduce, Count: 1, Type: Float32, Arg: int32(collective.Sum)}, data, nil)
		for b.Loop() {
			if err := g.Run(c, func() bool { return false }); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("operation", func(b *testing.B) {
		for b.Loop() {
			if err := collective.AllReduce(b.Context(), g.g, data, collective.Sum); err != nil {
				b.Fatal(err)
			}
		}
	})
}
