package operation

import (
	"math"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Neutral has the neutral element of each type and operation. For a sum of floating point numbers
// it is −0, so that −0 is preserved. The slices must not be changed.
var Neutral = [kernel.Types][Ops][]byte{
	kernel.Float32:  neutralOf[float32](float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)), 1),
	kernel.Float64:  neutralOf[float64](math.Copysign(0, -1), math.Inf(1), math.Inf(-1), 1),
	kernel.Float16:  neutralOf[uint16](0x8000, 0x7c00, 0xfc00, 0x3c00),
	kernel.BFloat16: neutralOf[uint16](0x8000, 0x7f80, 0xff80, 0x3f80),
	kernel.Int8:     neutralOf[int8](0, math.MaxInt8, math.MinInt8, 1),
	kernel.Int16:    neutralOf[int16](0, math.MaxInt16, math.MinInt16, 1),
	kernel.Int32:    neutralOf[int32](0, math.MaxInt32, math.MinInt32, 1),
	kernel.Int64:    neutralOf[int64](0, math.MaxInt64, math.MinInt64, 1),
	kernel.Uint8:    neutralOf[uint8](0, math.MaxUint8, 0, 1),
	kernel.Uint16:   neutralOf[uint16](0, math.MaxUint16, 0, 1),
	kernel.Uint32:   neutralOf[uint32](0, math.MaxUint32, 0, 1),
	kernel.Uint64:   neutralOf[uint64](0, math.MaxUint64, 0, 1),
}

func neutralOf[T any](sum, least, greatest, product T) [Ops][]byte {
	one := func(v T) []byte { return kernel.Bytes([]T{v}) }
	return [Ops][]byte{Sum: one(sum), Average: one(sum), Min: one(least), Max: one(greatest), Product: one(product),
		Adasum: one(sum)}
}

// FillNeutral fills b with neutral elements.
func FillNeutral(b []byte, t kernel.Type, op Op) {
	for n := copy(b, Neutral[t][op]); n > 0 && n < len(b); n *= 2 {
		kernel.Copy(b[n:], b[:n])
	}
}
