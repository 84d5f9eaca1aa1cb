package kernel

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"
	"unsafe"
)

func bytesOf[T element](d []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(d))), len(d)*int(unsafe.Sizeof(*new(T))))
}

// implementations returns all implementations that this machine can run.
func implementations() map[string]*table {
	all := map[string]*table{"twin": &twin}
	addVector(all)
	return all
}

func TestTables(t *testing.T) {
	for typ := range Types {
		for op := range Ops {
			if (Combine(typ, op) != nil) != (typ > 0 && op > 0) {
				t.Errorf("a kernel for %v of %v: %v", op, typ, Combine(typ, op) != nil)
			}
		}
		half := typ == Float16 || typ == BFloat16
		if (Divide(typ) != nil) != (typ > 0) || (Scale(typ) != nil) != (typ > 0) || (typ.Size() != 0) != (typ > 0) ||
			(Narrow(typ) != nil) != half || (Widen(typ) != nil) != half {
			t.Errorf("tables for %v are wrong", typ)
		}
	}
	for _, typ := range []Type{Types, 255} {
		if Combine(typ, Sum) != nil || Divide(typ) != nil || Scale(typ) != nil || Narrow(typ) != nil || Widen(typ) != nil ||
			typ.Size() != 0 || Combine(Float32, Ops) != nil {
			t.Errorf("kernels for %v", typ)
		}
	}
}

// TestFloatRules: every implementation returns the right zero or NaN. Elements are repeated, so
// that both whole vectors and remainders are tested.
func TestFloatRules(t *testing.T) {
	const (
		inf, zero, one      = 0x7f800000, 0, 0x3f800000
		negative            = 1 << 31
		quiet, alsoQuiet    = 0x7fc01234, 0xffc04321
		signalling, becomes = 0x7f801111, 0x7fc01111
		made                = 0xffc00000
	)
	for _, c := range []struct {
		op         Op
		a, b, want uint32
	}{
		{Sum, quiet, one, quiet}, {Sum, one, quiet, quiet}, {Sum, quiet, alsoQuiet, quiet}, {Sum, alsoQuiet, quiet, alsoQuiet},
		{Sum, signalling, alsoQuiet, becomes}, {Sum, one, signalling, becomes}, {Sum, inf, inf | negative, made},
		{Sum, zero, zero | negative, zero}, {Sum, zero | negative, zero | negative, zero | negative}, {Sum, 1, 2, 3},
		{Product, inf, zero, made}, {Product, zero | negative, inf, made}, {Product, quiet, signalling, quiet},
		{Product, one | negative, alsoQuiet, alsoQuiet}, {Product, one, 3, 3},
		{Min, zero, zero | negative, zero | negative}, {Min, zero | negative, zero, zero | negative}, {Min, zero, zero, zero},
		{Min, quiet, one, quiet}, {Min, one, quiet, quiet}, {Min, signalling, quiet, becomes}, {Min, inf, one, one},
		{Min, quiet, alsoQuiet, quiet}, {Min, inf | negative, alsoQuiet, alsoQuiet}, {Min, 2, 1, 1},
		{Max, zero, zero | negative, zero}, {Max, zero | negative, zero, zero}, {Max, zero | negative, zero | negative, zero | negative},
		{Max, quiet, inf, quiet}, {Max, inf, signalling, becomes}, {Max, alsoQuiet, quiet, alsoQuiet}, {Max, 2, 1, 2},
	} {
		a, b, got := slices.Repeat([]uint32{c.a}, 37), slices.Repeat([]uint32{c.b}, 37), make([]uint32, 37)
		for name, table := range implementations() {
			table.combine[Float32][c.op](bytesOf(got), bytesOf(a), bytesOf(b))
			for i, g := range got {
				if g != c.want {
					t.Errorf("%s: operation %d of %#x and %#x is %#x at %d, want %#x", name, c.op, c.a, c.b, g, i, c.want)
					break
				}
			}
		}
	}
}

func TestScaleIntegers(t *testing.T) {
	signed, unsigned, large := []int8{100, -100, 3, -3}, []uint8{200, 3, 0, 1}, []int64{math.MaxInt64, math.MinInt64, 7, 1<<62 + 1}
	Scale(Int8)(bytesOf(signed), 1.5)
	Scale(Uint8)(bytesOf(unsigned), -0.5)
	Scale(Int64)(bytesOf(large), 1)
	if !slices.Equal(signed, []int8{127, -128, 4, -4}) || !slices.Equal(unsigned, []uint8{0, 0, 0, 0}) ||
		!slices.Equal(large, []int64{math.MaxInt64, math.MinInt64, 7, 1<<62 + 1}) {
		t.Errorf("scaled to %v, %v and %v", signed, unsigned, large)
	}
	Scale(Int64)(bytesOf(large), 2)
	Scale(Int8)(bytesOf(signed), math.NaN())
	if !slices.Equal(signed, []int8{0, 0, 0, 0}) || !slices.Equal(large, []int64{math.MaxInt64, math.MinInt64, 14, math.MaxInt64}) {
		t.Errorf("scaled to %v and %v", signed, large)
	}
}

func TestUnequalLengths(t *testing.T) {
	refused := func(name string, f func()) {
		defer func() {
			if recover() == nil {
				t.Errorf("%s takes unequal lengths", name)
			}
		}()
		f()
	}
	b := make([]byte, 1024)
	for name, table := range implementations() {
		for typ := Float32; typ < Types; typ++ {
			for op := Sum; op < Ops; op++ {
				f := table.combine[typ][op]
				refused(name, func() { f(b[:512], b[:504], b[:512]) })
				refused(name, func() { f(b[:512], b[:512], b[:520]) })
			}
		}
		for _, typ := range []Type{Float16, BFloat16} {
			refused(name, func() { table.narrow[typ](b[:128], b[512:512+248]) })
			refused(name, func() { table.widen[typ](b[:256], b[512:512+120]) })
		}
	}
}

func TestSplit(t *testing.T) {
	for n := 1; n < 10; n++ {
		for count := range 40 {
			end := 0
			for i := range n {
				lo, hi := Split(count, n, i)
				if lo != end || hi-lo != count/n && (hi-lo != count/n+1 || i >= count%n) {
					t.Fatalf("part %d of %d of %d is %d to %d", i, n, count, lo, hi)
				}
				end = hi
			}
			if end != count {
				t.Fatalf("%d parts of %d end at %d", n, count, end)
			}
		}
	}
}

// TestDivideByMany: the divisor can exceed the range of the type.
func TestDivideByMany(t *testing.T) {
	signed, unsigned := []int8{100, -100, 127}, []uint8{255, 200}
	Divide(Int8)(bytesOf(signed), 200)
	Divide(Uint8)(bytesOf(unsigned), 256)
	if signed[0] != 0 || signed[1] != 0 || signed[2] != 0 || unsigned[0] != 0 {
		t.Errorf("averages are %v and %v", signed, unsigned)
	}
	truncated := []int32{-7, 7}
	Divide(Int32)(bytesOf(truncated), 2)
	if truncated[0] != -3 || truncated[1] != 3 {
		t.Errorf("−7/2 and 7/2 are %v", truncated)
	}
}

// TestDivideIntegers: the reciprocal gives the same result as a division, for all numbers of 8 and
// 16 bits, and for those of 32 bits that are closest to another result.
func TestDivideIntegers(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5, 7, 10, 64, 127, 128, 255, 256, 641, 32767, 32768, 65535, 65536, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32, 1 << 40} {
		var a []int8
		var b []uint8
		var c []int16
		var d []uint16
		var e []int32
		var f []uint32
		for v := range 1 << 16 {
			a, b, c, d = append(a, int8(v)), append(b, uint8(v)), append(c, int16(v)), append(d, uint16(v))
			near := uint32(n*(v+1) - 1 + v%2) // a multiple of n, or one less
			e, f = append(e, int32(near), -int32(near)), append(f, near, -near)
		}
		e, f = append(e, -1<<31, 1<<31-1), append(f, 0, 1<<32-1)
		checkDivide(t, Int8, a, n)
		checkDivide(t, Uint8, b, n)
		checkDivide(t, Int16, c, n)
		checkDivide(t, Uint16, d, n)
		checkDivide(t, Int32, e, n)
		checkDivide(t, Uint32, f, n)
		var g []int64
		var h []uint64
		for v := range 1 << 10 {
			near := uint64(n)*(1<<63/uint64(n)-uint64(v)) - uint64(v%2)
			g, h = append(g, int64(near), -int64(near)), append(h, near, -near)
		}
		checkDivide(t, Int64, append(g, math.MinInt64, math.MaxInt64, -1, 0), n)
		checkDivide(t, Uint64, append(h, math.MaxUint64, 1, 0), n)
	}
	all := make([]int8, 256)
	for v := range all {
		all[v] = int8(v)
	}
	for n := 1; n < 300; n++ {
		checkDivide(t, Int8, all, n)
		checkDivide(t, Uint8, Elements[uint8](bytesOf(all)), n)
	}
}

func checkDivide[T int8 | uint8 | int16 | uint16 | int32 | uint32 | int64 | uint64](t *testing.T, of Type, v []T, n int) {
	t.Helper()
	for name, table := range implementations() {
		got := slices.Clone(v)
		table.divide[of](bytesOf(got), n)
		for i := range v {
			want := T(int64(v[i]) / int64(n))
			if T(0)-1 > 0 {
				want = T(uint64(v[i]) / uint64(n))
			}
			if got[i] != want {
				t.Fatalf("%s, %v: %d / %d is %d, not %d", name, of, v[i], n, got[i], want)
			}
		}
	}
}

// differ describes the first element at which two results differ.
func differ(typ Type, got, want []byte) string {
	for i := 0; i < len(want); i += typ.Size() {
		if !bytes.Equal(got[i:i+typ.Size()], want[i:i+typ.Size()]) {
			return fmt.Sprintf("element %d of %d is %x, want %x (bytes)", i/typ.Size(), len(want)/typ.Size(), got[i:i+typ.Size()], want[i:i+typ.Size()])
		}
	}
	return ""
}
