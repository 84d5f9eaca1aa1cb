package cuda

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// newHostsWorld returns a world of ranks on several hosts that share no devices or memory, with the
// given numbers of ranks. Pieces and banks are small, so vectors are processed in several.
func newHostsWorld(t *testing.T, counts []int, config Config) *world {
	w := &world{}
	piece, bank := pieceSize, bankSize
	t.Cleanup(func() { pieceSize, bankSize = piece, bank })
	pieceSize, bankSize = 1<<10, 4<<10
	for host, n := range counts {
		node := newNode(t)
		node.address += uint64(host) << 40
		config.host = fmt.Sprint("host ", host)
		for range n {
			f := node.process()
			w.drivers = append(w.drivers, f)
			w.devices = append(w.devices, open(t, f, config))
		}
	}
	w.groups = collective.Local(len(w.devices))
	t.Cleanup(func() {
		for _, g := range w.groups {
			g.Abort(errors.New("the test is over"))
		}
	})
	return w
}

// TestHosts: ranks open each other's memory within a host, and each of them exchanges its part of
// the vector with other hosts, for any numbers of ranks per host.
func TestHosts(t *testing.T) {
	for _, c := range []struct {
		counts []int
		config Config
	}{
		{[]int{2, 2}, Config{}}, {[]int{1, 3}, Config{}}, {[]int{3, 2, 1}, Config{}}, {[]int{1, 1}, Config{Backend: BackendHosts}},
		{[]int{3}, Config{Backend: BackendHosts}},
	} {
		t.Run(fmt.Sprint(c.counts), func(t *testing.T) {
			w := newHostsWorld(t, c.counts, c.config)
			n := len(w.devices)
			for _, length := range []int{1, 5, 3001} {
				testAllReduce(t, w, n, length, func(i int) collective.BFloat16 { return collective.ToBFloat16(float32(i)) })
			}
			for _, length := range []int{0, 2, 300} {
				testAllReduce(t, w, n, length, func(i int) float32 { return float32(i) })
				testAllReduce(t, w, n, length, func(i int) int32 { return int32(-i) })
				testAllReduce(t, w, n, length, func(i int) uint8 { return uint8(i) })
			}
			for rank, d := range w.devices {
				if b := d.backends[w.groups[rank]]; b.name() != BackendHosts {
					t.Errorf("rank %d has %s", rank, b.name())
				}
			}
		})
	}
}

// TestHostsBanked: on one host a vector of foreign memory is copied through a bank, one bank at a
// time, while the vectors of the other host are opened.
func TestHostsBanked(t *testing.T) {
	w := newHostsWorld(t, []int{2, 3}, Config{})
	length := 2*bankSize/4 + 301
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		s := vector(t, d, slices.Repeat([]float32{float32(rank)}, length))
		if rank == 1 {
			wrapped := foreign(t, d, make([]float32, length))
			if err := wrapped.CopySlice(t.Context(), s); err != nil {
				return err
			}
			s = wrapped
		}
		if err := AllReduce(t.Context(), g, s.Slice(1, length), collective.Average); err != nil {
			return err
		}
		want := slices.Repeat([]float32{2}, length)
		want[0] = float32(rank)
		if !slices.Equal(values(t, s), want) {
			return fmt.Errorf("rank %d has another average", rank)
		}
		return nil
	})
}

// TestHostsBits: a result combines the ranks of each host in their order, and then the results of
// the hosts in their order.
func TestHostsBits(t *testing.T) {
	w := newHostsWorld(t, []int{3, 3}, Config{})
	const length = 501
	var vectors [][]byte
	for rank := range 6 {
		v := make([]float32, length)
		for i := range v {
			v[i] = float32(1) / float32(3+rank*7+i)
		}
		vectors = append(vectors, kernel.Bytes(v))
	}
	sums := [][]byte{reduce(kernel.Float32, collective.Sum, vectors[:3]), reduce(kernel.Float32, collective.Sum, vectors[3:])}
	want := reduce(kernel.Float32, collective.Sum, sums)
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		s := vector(t, d, kernel.Elements[float32](vectors[rank]))
		if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
			return err
		}
		if d := differ(kernel.Float32, kernel.Bytes(values(t, s)), want); d != "" {
			return fmt.Errorf("rank %d: %s", rank, d)
		}
		s = vector(t, d, kernel.Elements[float32](vectors[rank]))
		before := vector(t, d, make([]float32, 77))
		var handles []*Handle
		for name, v := range map[string]*Slice[float32]{"before": before, "s": s} {
			handles = append(handles, AllReduceAsync(t.Context(), g, name, v, collective.Sum, Options{}))
		}
		for _, h := range handles {
			if err := h.Wait(); err != nil {
				return err
			}
		}
		if d := differ(kernel.Float32, kernel.Bytes(values(t, s)), want); d != "" {
			return fmt.Errorf("rank %d, asynchronously: %s", rank, d)
		}
		return nil
	})
	for rank, d := range w.devices {
		if len(d.backends) != 2 {
			t.Errorf("rank %d has made %d choices", rank, len(d.backends))
		}
		for _, b := range d.backends {
			if b.name() != BackendHosts {
				t.Errorf("rank %d has %s", rank, b.name())
			}
		}
	}
}

// TestHostsBytes: with the hosts backend, only a rank's part of the vector is copied over the bus
// of its device, once in each direction.
func TestHostsBytes(t *testing.T) {
	const length = 3000
	for _, c := range []struct {
		counts  []int
		backend string
		carried []int // elements, by rank
	}{
		{[]int{2, 2}, BackendStaging, slices.Repeat([]int{2 * length}, 4)},
		{[]int{2, 2}, BackendHosts, slices.Repeat([]int{2 * length / 2}, 4)},
		{[]int{4, 4}, BackendHosts, slices.Repeat([]int{2 * length / 4}, 8)},
		{[]int{1, 3}, BackendHosts, []int{2 * length, 2 * length / 3, 2 * length / 3, 2 * length / 3}},
	} {
		w := newHostsWorld(t, c.counts, Config{Backend: c.backend})
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			s := vector(t, d, make([]float32, length))
			if err := AllReduce(t.Context(), g, s.Slice(0, 4), collective.Sum); err != nil { // the ranks choose their backend
				return err
			}
			f := w.drivers[rank]
			f.mu.Lock()
			before := f.carried
			f.mu.Unlock()
			if err := AllReduce(t.Context(), g, s, collective.Sum); err != nil {
				return err
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			// A piece need not be divisible by the number of parts.
			if got := int(f.carried - before); got < 4*c.carried[rank]-32 || got > 4*c.carried[rank]+32 {
				return fmt.Errorf("%s of %v, rank %d: %d bytes, not %d", c.backend, c.counts, rank, got, 4*c.carried[rank])
			}
			return nil
		})
	}
}

// TestMeans: with every backend, and any numbers of ranks per host, an average of half-precision
// numbers is correct although their sum overflows the type.
func TestMeans(t *testing.T) {
	for _, c := range []struct {
		counts []int
		config Config
	}{
		{[]int{4}, Config{}}, {[]int{3}, Config{Backend: BackendStaging}}, {[]int{2, 2}, Config{}}, {[]int{3, 3}, Config{}}, {[]int{1, 3}, Config{}},
		{[]int{1, 1}, Config{Backend: BackendHosts}}, {[]int{2, 1}, Config{Backend: BackendStaging}},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			w := newHostsWorld(t, c.counts, c.config)
			want := slices.Repeat([]collective.Float16{collective.ToFloat16(49152), 1, collective.ToFloat16(-49152)}, 500)
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				s := vector(t, d, want)
				if err := AllReduce(t.Context(), g, s, collective.Average); err != nil {
					return err
				}
				h := AllReduceAsync(t.Context(), g, "mean", s, collective.Average, Options{})
				if err := h.Wait(); err != nil {
					return err
				}
				got := values(t, s)
				for i := range got {
					if got[i] != want[i] && (want[i] != 1 || got[i] > 2) {
						return fmt.Errorf("rank %d: element %d is %v, not %v", rank, i, got[i].Float32(), want[i].Float32())
					}
				}
				return nil
			})
		})
	}
}
