package collective

import (
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// TestSizeClass: a class begins where the previous one ends.
func TestSizeClass(t *testing.T) {
	for _, c := range []struct{ bytes, want int }{
		{-1, 0}, {0, 0}, {8, 0}, {1<<10 - 1, 0}, {1 << 10, 1}, {4<<10 - 1, 1}, {4 << 10, 2}, {1 << 20, 6},
		{64<<20 - 1, 8}, {64 << 20, 9}, {1 << 40, 9},
	} {
		if got := SizeClass(c.bytes); got != c.want {
			t.Errorf("%d bytes: class %d, want %d", c.bytes, got, c.want)
		}
	}
}

// TestTally: operations are counted by kind, size and backend, with their bytes and time.
func TestTally(t *testing.T) {
	e := &Endpoint{tally: newTally()}
	g := Local(1)[0]
	e.tally.note(operation.AllReduce, 4096, 0, operation.ByRing)
	e.tally.note(operation.AllReduce, 5000, 0, operation.ByRing)
	e.tally.note(operation.Barrier, 0, e.tally.now(), g.backend())
	all := e.Operations()
	if len(all) != 2 {
		t.Fatalf("%+v", all)
	}
	first, second := all[0], all[1]
	if first.Kind != "AllReduce" || first.SizeClass != 2 || first.Count != 2 || first.Bytes != 9096 || first.Duration <= 0 || first.Algorithm != "ring" || first.Backend != BackendSockets {
		t.Errorf("%+v", first)
	}
	if second.Kind != "Barrier" || second.Count != 1 || second.Bytes != 0 || second.Backend != BackendNone {
		t.Errorf("%+v", second)
	}
}

// BenchmarkTally measures what counting adds to an operation, with and without keeping its time for
// comparison with the other ranks.
func BenchmarkTally(b *testing.B) {
	t := newTally()
	b.Run("counted", func(b *testing.B) {
		for b.Loop() {
			t.note(operation.AllReduce, 4096, t.now(), operation.ByRing)
		}
	})
	b.Run("compared", func(b *testing.B) {
		var w waits
		for n := uint64(0); b.Loop(); n++ {
			begun := t.now()
			if operation := mix(n); w.wants(operation) {
				w.keep(operation, t.now()-begun)
			}
		}
	})
}
