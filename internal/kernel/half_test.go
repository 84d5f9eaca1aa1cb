package kernel

import (
	"math"
	"testing"
)

// TestFloat16: every half is exact in float32 and is converted back to itself. A number between two
// neighbours is rounded to the nearer one, and in the middle to the even one.
func TestFloat16(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		f := FromFloat16(h)
		if math.IsNaN(float64(f)) {
			if back := ToFloat16(f); !math.IsNaN(float64(FromFloat16(back))) || back&0x8000 != h&0x8000 {
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
		checkBetween(t, f, FromFloat16(h+1), ToFloat16, h)
	}
	for f, want := range map[float32]uint16{
		65519: 0x7bff, 65520: 0x7c00, -1e30: 0xfc00, 1: 0x3c00, 0.1: 0x2e66, 5.9604645e-8: 1, 2.9802322e-8: 0, 2.9802326e-8: 1,
	} {
		if got := ToFloat16(f); got != want {
			t.Errorf("%v is %#x, want %#x", f, got, want)
		}
	}
}

// checkBetween checks the rounding between two neighbours lo and hi; lo has index i.
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
		h := uint16(i)
		f := FromBFloat16(h)
		if math.IsNaN(float64(f)) {
			if back := ToBFloat16(f); !math.IsNaN(float64(FromBFloat16(back))) {
				t.Fatalf("NaN %#x became %#x", h, back)
			}
			continue
		}
		if back := ToBFloat16(f); back != h {
			t.Fatalf("%#x is %v became %#x", h, f, back)
		}
		if h&0x7fff < 0x7f7f {
			checkBetween(t, f, FromBFloat16(h+1), ToBFloat16, h)
		}
	}
	if ToBFloat16(math.Float32frombits(0x7f800001)) != 0x7fc0 { // a NaN whose upper half alone would be an infinity
		t.Error("a signalling NaN has become an infinity")
	}
	if ToBFloat16(math.MaxFloat32) != 0x7f80 {
		t.Error("the largest float32 does not round to infinity")
	}
}
