package kernel

import (
	"bytes"
	"testing"
)

// TestBlocks: each call of assembler code has at most atOnce bytes of result, and all blocks are
// processed once, in their order.
func TestBlocks(t *testing.T) {
	var calls, longest int
	note := func(n int) {
		calls++
		longest = max(longest, n)
	}
	var spy table
	spy.combine[Float32][Sum] = func(dst, a, b []byte) {
		note(len(dst))
		for i := range dst {
			dst[i] = a[i] + b[i]
		}
	}
	increase := func(b []byte) {
		note(len(b))
		for i := range b {
			b[i]++
		}
	}
	spy.divide[Int64] = func(b []byte, _ int) { increase(b) }
	spy.scale[Uint8] = func(b []byte, _ float64) { increase(b) }
	spy.narrow[Float16] = func(dst, src []byte) {
		note(len(dst))
		for i := range dst {
			dst[i] = src[2*i]
		}
	}
	spy.widen[BFloat16] = func(dst, src []byte) {
		note(len(dst))
		for i := range src {
			dst[2*i] = src[i]
		}
	}
	in := spy.inBlocks()
	for _, n := range []int{0, 8, atOnce - 8, atOnce, atOnce + 8, 3 * atOnce, 5*atOnce + 16} {
		src := make([]byte, 2*n)
		for i := range src {
			src[i] = byte(i*7 + i>>15)
		}
		want := (n + atOnce - 1) / atOnce
		check := func(name string, ok bool) {
			t.Helper()
			if !ok || longest > atOnce || calls != max(1, want) {
				t.Errorf("%s of %d bytes: %v in %d calls of up to %d bytes", name, n, ok, calls, longest)
			}
			calls, longest = 0, 0
		}
		sum, b := make([]byte, n), bytes.Clone(src[:n])
		in.combine[Float32][Sum](sum, src[:n], b)
		ok := true
		for i := range sum {
			ok = ok && sum[i] == 2*src[i]
		}
		check("combine", ok)
		in.divide[Int64](b, 1)
		check("divide", n == 0 || b[n-1] == src[n-1]+1)
		in.scale[Uint8](b, 1)
		check("scale", n == 0 || b[n-1] == src[n-1]+2 && b[0] == src[0]+2)
		in.narrow[Float16](b, src)
		for i := range b {
			ok = ok && b[i] == src[2*i]
		}
		check("narrow", ok)
		wide := make([]byte, n)
		in.widen[BFloat16](wide, b[:n/2])
		for i := range n / 2 {
			ok = ok && wide[2*i] == b[i]
		}
		check("widen", ok)
		if whole := make([]byte, n); Copy(whole, src) != n || !bytes.Equal(whole, src[:n]) {
			t.Errorf("Copy of %d bytes", n)
		}
	}
}
