package operation

import (
	"testing"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

func TestCombinerOfEachOp(t *testing.T) {
	for op := Sum; op < Ops; op++ {
		if none := (Descriptor{Type: kernel.Float32, Op: op}).Combiner() == nil; none != (op == Adasum) { // Adasum combines whole vectors
			t.Errorf("%v: no kernel: %t", op, none)
		}
	}
}
