package kernel

import (
	"testing"
	"unsafe"
)

func bytesOf[T element](d []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(d))), len(d)*int(unsafe.Sizeof(*new(T))))
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

// TestDivideByMany: the divisor need not fit the type.
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
