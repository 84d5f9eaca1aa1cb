package elastic

import (
	"testing"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
)

// The checksums of sampled chunks match a commit of the same state, and do not match one in which a
// byte of any part differs, so a follower detects that its state differs from the member's.
func TestStateOfAnother(t *testing.T) {
	w, err := newWorker(t.Context(), solo{}).arrive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	live := [2][]byte{make([]byte, 3*snapshot.ChunkSize+5), make([]byte, snapshot.ChunkSize)}
	state := NewState(w, Tensors("weights", live[:]))
	save := func(number uint64) []transfer.Sum {
		if err := state.save(number); err != nil {
			t.Fatal(err)
		}
		state.saved.clean = true
		return state.sample(number)
	}
	for number := range uint64(20) {
		live[0][0]++
		sums := save(number)
		if len(sums) == 0 || !state.resembles(sums) {
			t.Fatalf("commit %d is not like itself, by %d chunks", number, len(sums))
		}
		if state.sample(number+1) != nil {
			t.Errorf("commit %d is taken for the next one", number)
		}
		for _, where := range []*byte{&live[0][snapshot.ChunkSize+7], &live[0][3*snapshot.ChunkSize], &live[1][9]} {
			*where ^= 1
			save(number)
			if state.resembles(sums) {
				t.Errorf("commit %d is like another, by %d chunks of 5", number, len(sums))
			}
			*where ^= 1
		}
		if state.resembles([]transfer.Sum{{Chunk: 5}}) {
			t.Error("a chunk that there is not is like another")
		}
	}
}
