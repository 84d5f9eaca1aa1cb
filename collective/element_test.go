package collective

import (
	"math"
	"testing"
)

// TestFloat16: every half is exact in float32 and comes back; between two neighbours the nearer one wins, and the even one
// at the middle.
func TestFloat16(t *testing.T) {
	for i := range 1 << 16 {
		h := Float16(i)
		f := h.Float32()
		if math.IsNaN(float64(f)) {
			if back := ToFloat16(f); !math.IsNaN(float64(back.Float32())) || back&0x8000 != h&0x8000 {
				t.Fatalf("NaN %#x became %#x", h, back)
			}
			continue
		}
		if back := ToFloat16(f); back != h {
			t.Fatalf("%#x is %v became %#x", h, f, back)
		}
		if h&0x7fff >= 0x7bff { // the largest finite one, and infinity
			continue
		}
		checkBetween(t, f, (h + 1).Float32(), func(x float32) uint16 { return uint16(ToFloat16(x)) }, uint16(h))
	}
	for f, want := range map[float32]Float16{
		65519: 0x7bff, 65520: 0x7c00, -1e30: 0xfc00, 1: 0x3c00, 0.1: 0x2e66, 5.9604645e-8: 1, 2.9802322e-8: 0, 2.9802326e-8: 1,
	} {
		if got := ToFloat16(f); got != want {
			t.Errorf("%v is %#x, want %#x", f, got, want)
		}
	}
}

// checkBetween checks the rounding between two neighbours lo and hi, of which lo is at index i.
func checkBetween(t *testing.T, lo, hi float32, round func(float32) uint16, i uint16) {
	t.Helper()
	mid := float32((float64(lo) + float64(hi)) / 2) // exact
	if got, even := round(mid), i+i&1; got != even {
		t.Fatalf("%v between %#x and %#x became %#x", mid, i, i+1, got)
	}
	if got := round(math.Nextafter32(mid, lo)); got != i {
		t.Fatalf("just below the middle above %#x became %#x", i, got)
	}
	if got := round(math.Nextafter32(mid, hi)); got != i+1 {
		t.Fatalf("just above the middle above %#x became %#x", i, got)
	}
}

func TestBFloat16(t *testing.T) {
	for i := range 1 << 16 {
		h := BFloat16(i)
		f := h.Float32()
		if math.IsNaN(float64(f)) {
			if back := ToBFloat16(f); !math.IsNaN(float64(back.Float32())) {
				t.Fatalf("NaN %#x became %#x", h, back)
			}
			continue
		}
		if back := ToBFloat16(f); back != h {
			t.Fatalf("%#x is %v became %#x", h, f, back)
		}
		if h&0x7fff < 0x7f7f {
			checkBetween(t, f, (h + 1).Float32(), func(x float32) uint16 { return uint16(ToBFloat16(x)) }, uint16(h))
		}
	}
	if ToBFloat16(math.Float32frombits(0x7f800001)) != 0x7fc0 { // a NaN whose upper half alone would be an infinity
		t.Error("a signalling NaN has become an infinity")
	}
	if ToBFloat16(math.MaxFloat32) != 0x7f80 {
		t.Error("the largest float32 does not round to infinity")
	}
}

type celsius float32

type code uint16

func TestTypes(t *testing.T) {
	if dtypeOf[celsius]() != float32Type || dtypeOf[code]() != uint16Type || dtypeOf[Float16]() != float16Type ||
		dtypeOf[BFloat16]() != bfloat16Type || dtypeOf[int8]() != int8Type || dtypeOf[uint64]() != uint64Type {
		t.Error("types are taken for others")
	}
	for d := float32Type; d < dtypes; d++ {
		for op := Sum; op < ops; op++ {
			if combiners[d][op] == nil || dividers[d] == nil || d.size() == 0 {
				t.Errorf("no kernel for %v of %v", op, d)
			}
		}
	}
}

// TestAverageOfManyRanks: the number of ranks need not fit the type.
func TestAverageOfManyRanks(t *testing.T) {
	signed, unsigned := []int8{100, -100, 127}, []uint8{255, 200}
	dividers[int8Type](bytesOf(signed), 200)
	dividers[uint8Type](bytesOf(unsigned), 256)
	if signed[0] != 0 || signed[1] != 0 || signed[2] != 0 || unsigned[0] != 0 {
		t.Errorf("averages are %v and %v", signed, unsigned)
	}
	truncated := []int32{-7, 7}
	dividers[int32Type](bytesOf(truncated), 2)
	if truncated[0] != -3 || truncated[1] != 3 {
		t.Errorf("−7/2 and 7/2 are %v", truncated)
	}
}
