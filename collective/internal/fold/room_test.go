package fold

import "testing"

// TestRoom: memory taken between two resets does not overlap. After a reset the same memory is used
// again.
func TestRoom(t *testing.T) {
	var r Room
	lengths := []int{0, 1, 100, 64, 1 << 16, 3}
	fill := func() (first *byte) {
		r.Reset()
		var all [][]byte
		for i, n := range lengths {
			b := r.Take(n)
			if len(b) != n || cap(b) > n && n > 0 {
				t.Fatalf("%d bytes with room for %d, instead of %d", len(b), cap(b), n)
			}
			for j := range b {
				b[j] = byte(i)
			}
			all = append(all, b)
		}
		for i, b := range all {
			for j := range b {
				if b[j] != byte(i) {
					t.Fatalf("byte %d of %d is another's", j, i)
				}
			}
		}
		return &all[1][0]
	}
	fill()
	second := fill()
	if third := fill(); third != second {
		t.Error("it takes other memory each time")
	}
	lengths = append(lengths, 1<<20)
	fill()
	if n := testing.AllocsPerRun(10, func() { r.Reset(); r.Take(1 << 20); r.Take(1 << 16) }); n != 0 {
		t.Errorf("%v allocations where there is room", n)
	}
}
