package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// dataKey is the key of all generations of these tests.
var dataKey = identity.NewDataKey()

// meetings returns a function that connects n endpoints in the next generation. The endpoints are
// on one host, or each on its own.
func meetings(t *testing.T, n int, oneHost bool) func() []*collective.Group {
	t.Helper()
	return meetingsWith(t, n, oneHost, collective.Config{})
}

// listen returns n endpoints of one job, which are closed when the test ends.
func listen(t *testing.T, n int, config collective.Config) []*collective.Endpoint {
	t.Helper()
	authority, err := identity.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	var endpoints []*collective.Endpoint
	for i := range n {
		c, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: i, Incarnation: fmt.Sprint("i", i)})
		if err != nil {
			t.Fatal(err)
		}
		config.Credentials, config.ListenAddr = c, "127.0.0.1:0"
		e, err := collective.Listen(config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		endpoints = append(endpoints, e)
	}
	return endpoints
}

// meetingsWith is like meetings, with the given config of the endpoints.
func meetingsWith(t *testing.T, n int, oneHost bool, config collective.Config) func() []*collective.Group {
	t.Helper()
	endpoints := listen(t, n, config)
	var addrs [][]string
	var hosts []string
	for _, e := range endpoints {
		addrs = append(addrs, e.Addrs())
		if oneHost {
			hosts = append(hosts, "a")
		}
	}
	generation := uint64(0)
	return func() []*collective.Group {
		generation++
		groups, errs := make([]*collective.Group, n), make([]error, n)
		var all sync.WaitGroup
		for i, e := range endpoints {
			all.Go(func() {
				groups[i], errs[i] = e.Connect(context.Background(),
					collective.Peers{Key: dataKey, Generation: generation, Rank: i, Addrs: addrs, Hosts: hosts})
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		return groups
	}
}

// TestGenerations: after many worlds, closed or aborted, device memory is held only for the last of
// them. No memory is freed while other ranks have it open.
func TestGenerations(t *testing.T) {
	for name, config := range configs {
		for _, oneHost := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, one host %v", name, oneHost), func(t *testing.T) {
				const n = 3
				w := newWorld(t, n, 1, config)
				w.node.unseen = oneHost
				meet := meetings(t, n, oneHost)
				var used []uint64
				rounds := 13
				if testing.Short() {
					rounds = 7
				}
				for generation := range rounds {
					w.groups = meet()
					errs := w.each(func(rank int, d *Device, g *collective.Group) error {
						s, err := Alloc[float32](d, 500+generation)
						if err != nil {
							return err
						}
						defer s.Free()
						if err := s.CopyFrom(t.Context(), slices.Repeat([]float32{1}, s.Len())); err != nil {
							return err
						}
						if generation%3 == 2 && rank == 1 {
							g.Abort(errors.New("lost"))
						}
						if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
							return err
						}
						h := AllReduceAsync(t.Context(), g, "s", s, collective.Max, Options{})
						if err := h.Wait(); err != nil {
							return err
						}
						if got := values(t, s); !slices.Equal(got, slices.Repeat([]float32{n}, s.Len())) {
							return fmt.Errorf("the sum is %v", got[:1])
						}
						return nil
					})
					for rank, err := range errs {
						if (err != nil) != (generation%3 == 2) || err != nil && !errors.Is(err, collective.ErrAborted) {
							t.Fatalf("generation %d, rank %d: %v", generation, rank, err)
						}
					}
					for _, g := range w.groups {
						g.Close()
					}
					w.node.mu.Lock()
					used = append(used, w.node.used)
					w.node.mu.Unlock()
				}
				if most := slices.Max(used[3:]); most > n*(4<<10) {
					t.Errorf("%d bytes are held", most)
				}
				w.node.mu.Lock()
				defer w.node.mu.Unlock()
				if w.node.early > 0 {
					t.Errorf("%d allocations were freed while others had them open", w.node.early)
				}
			})
		}
	}
}

// TestFreedWhileOpen: memory that is freed while other ranks have it open is kept. New memory at
// its address is opened again.
func TestFreedWhileOpen(t *testing.T) {
	w := newWorld(t, 2, 1, Config{})
	w.node.limit = 1 << 31
	for i := range 8 {
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s, err := Alloc[float64](d, 400<<10/8)
			if err != nil {
				return err
			}
			defer s.Free()
			part := s.Slice(i, i+100)
			if err := part.CopyFrom(t.Context(), slices.Repeat([]float64{float64(i)}, 100)); err != nil {
				return err
			}
			if err := AllReduce(t.Context(), g, part, collective.Sum); err != nil {
				return err
			}
			if got := values(t, part); !slices.Equal(got, slices.Repeat([]float64{float64(2 * i)}, 100)) {
				return fmt.Errorf("round %d gives %v", i, got[0])
			}
			return nil
		})
	}
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	if w.node.early > 0 || w.node.used > 2*uint64(maxDeferred+bankSize+4<<20) {
		t.Errorf("%d allocations were freed early, %d bytes are held", w.node.early, w.node.used)
	}
}

// TestSomeWantStaging: if one rank requires staging, all ranks use it.
func TestSomeWantStaging(t *testing.T) {
	w := newWorld(t, 3, 1, Config{})
	w.devices[1].config.Backend = BackendStaging
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		return AllReduce(t.Context(), g, vector(t, d, []int32{1, 2}), collective.Sum)
	})
	for rank, f := range w.drivers {
		if f.calls["cuLaunchKernel"] != 0 {
			t.Errorf("rank %d has launched a kernel", rank)
		}
	}
}

// TestOtherHost: if a rank's handles cannot be opened, or lead to other memory, all ranks use
// staging.
func TestOtherHost(t *testing.T) {
	elsewhere := newNode(t)
	elsewhere.address += 1 << 40
	for _, lead := range []string{"nowhere", "elsewhere"} {
		w := newWorld(t, 2, 1, Config{})
		if lead == "nowhere" {
			w.drivers[1].node = elsewhere
		} else {
			w.drivers[1].elsewhere = true
		}
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s := vector(t, d, []int32{1, 2})
			if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
				return err
			}
			if got := values(t, s); !slices.Equal(got, []int32{2, 4}) {
				return fmt.Errorf("the sum is %v", got)
			}
			return nil
		})
		if n := w.drivers[0].calls["cuLaunchKernel"]; n != 0 {
			t.Errorf("%s: %d kernels were launched", lead, n)
		}
	}
}
