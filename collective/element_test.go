package collective

import (
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

type celsius float32

type code uint16

func TestTypes(t *testing.T) {
	if typeOf[celsius]() != kernel.Float32 || typeOf[code]() != kernel.Uint16 || typeOf[Float16]() != kernel.Float16 ||
		typeOf[BFloat16]() != kernel.BFloat16 || typeOf[int8]() != kernel.Int8 || typeOf[uint64]() != kernel.Uint64 {
		t.Error("types are taken for others")
	}
}

type (
	token uint16 // an integer
	half  uint16
)

// TestOtherUint16: types over uint16 are integers, unless their names suggest floating-point
// numbers. Those are refused, and As functions convert slices of them without a copy.
func TestOtherUint16(t *testing.T) {
	g := Local(1)[0]
	defer g.Close()
	if err := AllReduce(t.Context(), g, []token{1}, Sum); err != nil {
		t.Error(err)
	}
	halves := []half{0x3c00, 0x3c00}
	err := AllReduce(t.Context(), g, halves, Sum)
	if err == nil || !strings.Contains(err.Error(), "collective.half") || !strings.Contains(err.Error(), "collective.AsFloat16(data)") {
		t.Error(err)
	}
	if err := Broadcast(t.Context(), g, halves, 0); err != nil {
		t.Error(err)
	}
	x := AsFloat16(halves)
	if x[0].Float32() != 1 {
		t.Errorf("%v", x[0].Float32())
	}
	Combine(x, x, x, Sum)
	if len(halves) != 2 || Float16(halves[1]).Float32() != 2 {
		t.Errorf("%x", halves)
	}
	if b, n := AsBFloat16([]half{0x3f80}), AsUint16([]half{7}); b[0].Float32() != 1 || n[0] != 7 || AsFloat16[half](nil) != nil {
		t.Errorf("%v %v", b, n)
	}
}
