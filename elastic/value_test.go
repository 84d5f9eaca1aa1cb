package elastic

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// Slices of slices and random sources are saved, restored, synchronised, compared and loaded from
// checkpoints.
func TestPartsOfGoPrograms(t *testing.T) {
	for _, size := range []int{3, 5000} { // small values are carried in the opening of a sync, large ones are not
		dir := t.TempDir()
		workers := stillWorld(t, 2, 1)
		layers := make([][][]float32, 2)
		pcgs, chachas := make([]*rand.PCG, 2), make([]*rand.ChaCha8, 2)
		states := make([]*State, 2)
		build := func(r int, w *Worker) *State {
			layers[r] = [][]float32{make([]float32, size), {}, make([]float32, 2*size)}
			layers[r][2][2*size-1] = float32(r)
			pcgs[r], chachas[r] = rand.NewPCG(uint64(r), 7), rand.NewChaCha8([32]byte{byte(r)})
			chachas[r].Uint64()
			w.log = quiet()
			return NewState(w, Tensors("layers", layers[r]), Binary("pcg", pcgs[r]), Binary("chacha", chachas[r]), Checkpoint(dir))
		}
		for r, w := range workers {
			states[r] = build(r, w)
		}
		onAll(t, 2, func(r int) error { return states[r].Sync(t.Context()) })
		if !slices.Equal(layers[0][2], layers[1][2]) || layers[0][2][2*size-1] != 1 || pcgs[0].Uint64() != pcgs[1].Uint64() {
			t.Error("not the root's")
		}
		onAll(t, 2, func(r int) error { return states[r].Commit() })
		onAll(t, 2, func(r int) error { return states[r].Verify(t.Context()) })
		want := []uint64{pcgs[0].Uint64(), chachas[0].Uint64()}
		layers[0][0][1] = 9
		if err := states[0].Restore(); err != nil {
			t.Fatal(err)
		}
		if got := []uint64{pcgs[0].Uint64(), chachas[0].Uint64()}; !slices.Equal(got, want) || layers[0][0][1] != 0 {
			t.Errorf("restored %v, want %v; layers %v", got, want, layers[0][0][1])
		}
		states[0].finish(nil)
		layers[0][0][1] = 9
		onAll(t, 2, func(r int) error { return states[r].Save() })
		for r, err := range errorsOf(2, func(r int) error { return states[r].Verify(t.Context()) }) {
			if err == nil || !strings.Contains(err.Error(), `"layers", chunk 0, ranks [1]`) {
				t.Errorf("rank %d: %v", r, err)
			}
		}
		s := build(0, stillWorld(t, 1, 0)[0])
		err := Run(t.Context(), s, func(context.Context) error { return nil })
		if got := []uint64{pcgs[0].Uint64(), chachas[0].Uint64()}; err != nil || !slices.Equal(got, want) || layers[0][2][2*size-1] != 1 {
			t.Errorf("from disk: %v, want %v; %v; %v", got, want, layers[0][2][2*size-1], err)
		}
	}
}
