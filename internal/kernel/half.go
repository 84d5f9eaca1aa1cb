package kernel

import "math"

// ToFloat16 rounds to the nearest half-precision number, ties to even. Numbers that are too large
// become infinities, and NaN becomes a quiet NaN.
func ToFloat16(f float32) uint16 {
	b := math.Float32bits(f)
	sign := uint16(b>>16) & 0x8000
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00 | uint16(b>>13)&0x1ff
	case b >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case b < 0x38800000: // below 2^-14: adding 0.5 rounds at 2^-24, the spacing of subnormal halves
		return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f000000)
	default: // rebias the exponent and add half a unit, less one bit when that would round a tie up to odd
		return sign | uint16((b-(127-15)<<23+0xfff+b>>13&1)>>13)
	}
}

// FromFloat16 converts a half-precision number. It is exact.
func FromFloat16(h uint16) float32 {
	sign, exp, man := uint32(h&0x8000)<<16, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0:
		return math.Float32frombits(sign | math.Float32bits(float32(man)*(1.0/(1<<24))))
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | man<<13)
}

// ToBFloat16 rounds to the nearest bfloat16, ties to even. NaN becomes a quiet NaN.
func ToBFloat16(f float32) uint16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBFloat16 converts a bfloat16. It is exact.
func FromBFloat16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }
