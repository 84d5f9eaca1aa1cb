package collective

import (
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

func TestCombinerOfEachOp(t *testing.T) {
	for op := Sum; op < ops; op++ {
		if none := (descriptor{dtype: kernel.Float32, reduce: op}).combiner() == nil; none != (op == Adasum) { // of whole vectors
			t.Errorf("%v: no kernel: %t", op, none)
		}
	}
}
