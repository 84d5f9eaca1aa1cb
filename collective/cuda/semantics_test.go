package cuda

import (
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// TestSemantics: reductions of GPU memory have the same results as those of other memory, both in
// kernels and on the host.
func TestSemantics(t *testing.T) {
	eachWay(t, func(t *testing.T, w *world, n int) {
		for _, length := range []int{0, 1, 203} {
			checkTable[float32](t, w, length)
			checkTable[float64](t, w, length)
			checkTable[collective.Float16](t, w, length)
			checkTable[collective.BFloat16](t, w, length)
			checkTable[int8](t, w, length)
			checkTable[uint8](t, w, length)
			checkTable[int16](t, w, length)
			checkTable[int32](t, w, length)
			checkTable[uint64](t, w, length)
		}
	})
}

func checkTable[T collective.Element](t *testing.T, w *world, length int) {
	t.Helper()
	for _, op := range combinations {
		collectivetest.CheckTable(t, len(w.devices), length, op, func(in [][]T) [][]T {
			out := make([][]T, len(in))
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				s := vector(t, d, in[rank])
				err := AllReduce(t.Context(), g, s, op)
				out[rank] = values(t, s)
				return err
			})
			return out
		})
		collectivetest.CheckTable(t, len(w.devices), length, op, func(in [][]T) [][]T {
			parts := make([][]T, len(in))
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				part, err := ReduceScatter(t.Context(), g, vector(t, d, in[rank]), op)
				if err != nil {
					return err
				}
				defer part.Free()
				parts[rank] = values(t, part)
				return nil
			})
			var whole []T
			for _, p := range parts {
				whole = append(whole, p...)
			}
			return [][]T{whole}
		})
		outs := make([][]T, len(w.devices))
		collectivetest.CheckTable(t, len(w.devices), length, op, func(in [][]T) [][]T {
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				s := vector(t, d, in[rank])
				err := AllReduceAsync(t.Context(), g, "table", s, op, Options{}).Wait()
				outs[rank] = values(t, s)
				return err
			})
			return outs
		})
	}
}
