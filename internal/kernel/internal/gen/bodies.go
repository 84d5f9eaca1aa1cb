package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

type vec = reg.VecVirtual

// binary and unary emit the computation of a vector with the instructions that the writer may use.
type (
	binary func(w *writer) func(a, b vec) vec
	unary  func(w *writer) func(a vec) vec
)

// instruction is a method of build.Context with operands source 2, source 1, destination.
type instruction func(w *writer) func(ops ...Op)

func (i instruction) binary() binary {
	return func(w *writer) func(a, b vec) vec {
		emit := i(w)
		return func(a, b vec) vec {
			r := w.vec()
			emit(b, a, r)
			return r
		}
	}
}

// Comparisons of floating point numbers.
const (
	unordered = 3
	ordered   = 7
)

// floats are the instructions for a width of floating point numbers.
type floats struct {
	add, mul, div, min, max, and, or instruction
	compare                          func(w *writer) func(ops ...Op)
	blend                            func(w *writer) func(mask, b, a, dst Op)
}

func ops(f func(w *writer) func(ops ...Op)) instruction { return f }

var singles = floats{
	add:     func(w *writer) func(...Op) { return w.VADDPS },
	mul:     func(w *writer) func(...Op) { return w.VMULPS },
	div:     func(w *writer) func(...Op) { return w.VDIVPS },
	min:     func(w *writer) func(...Op) { return w.VMINPS },
	max:     func(w *writer) func(...Op) { return w.VMAXPS },
	and:     func(w *writer) func(...Op) { return w.VANDPS },
	or:      func(w *writer) func(...Op) { return w.VORPS },
	compare: func(w *writer) func(...Op) { return w.VCMPPS },
	blend:   func(w *writer) func(mask, b, a, dst Op) { return w.VBLENDVPS },
}

var doubles = floats{
	add:     func(w *writer) func(...Op) { return w.VADDPD },
	mul:     func(w *writer) func(...Op) { return w.VMULPD },
	div:     func(w *writer) func(...Op) { return w.VDIVPD },
	min:     func(w *writer) func(...Op) { return w.VMINPD },
	max:     func(w *writer) func(...Op) { return w.VMAXPD },
	and:     func(w *writer) func(...Op) { return w.VANDPD },
	or:      func(w *writer) func(...Op) { return w.VORPD },
	compare: func(w *writer) func(...Op) { return w.VCMPPD },
	blend:   func(w *writer) func(mask, b, a, dst Op) { return w.VBLENDVPD },
}

// extreme returns the minimum or maximum. The instruction returns its second source if both are
// zeros or one is NaN. Therefore it is emitted in both orders, and the results are joined bit by
// bit: then −0 is the minimum and +0 the maximum. If one is NaN, the result is their sum, which is
// the required NaN.
func (f floats) extreme(pick, join instruction) binary {
	return func(w *writer) func(a, b vec) vec {
		return func(a, b vec) vec {
			r, other := w.vec(), w.vec()
			pick(w)(b, a, r)
			pick(w)(a, b, other)
			join(w)(other, r, r)
			if w.wide {
				k := w.K()
				f.compare(w)(U8(unordered), b, a, k)
				f.add(w)(b, a, k, r)
				return r
			}
			mask, nan := w.vec(), w.vec()
			f.compare(w)(U8(unordered), b, a, mask)
			f.add(w)(b, a, nan)
			f.blend(w)(mask, nan, r, r)
			return r
		}
	}
}

// binaries are the operations by name.
func (f floats) binaries() map[string]binary {
	return map[string]binary{
		"sum": f.add.binary(), "product": f.mul.binary(), "min": f.extreme(f.min, f.or), "max": f.extreme(f.max, f.and),
	}
}

// with returns an operation whose right side is the parameter x.
func with(op instruction, double bool) unary {
	return func(w *writer) func(a vec) vec {
		b := w.parameter(double)
		return func(a vec) vec { return op.binary()(w)(a, b) }
	}
}

// parameter returns a vector filled with the parameter x, of 64 or 32 bits.
func (w *writer) parameter(double bool) vec {
	b := w.vec()
	param, err := w.Param("x").Resolve()
	if err != nil {
		panic(err)
	}
	if double {
		w.VBROADCASTSD(param.Addr, b)
	} else {
		w.VBROADCASTSS(param.Addr, b)
	}
	return b
}

// constant returns a vector filled with the 32 bits.
func (w *writer) constant(bits uint32) vec {
	r, x, v := w.GP32(), w.XMM(), w.vec()
	w.MOVL(U32(bits), r)
	w.VMOVD(r, x)
	w.VPBROADCASTD(x, v)
	return v
}

func (w *writer) and(b, a, r vec) {
	if w.wide {
		w.VPANDD(b, a, r)
	} else {
		w.VPAND(b, a, r)
	}
}

func (w *writer) or(b, a, r vec) {
	if w.wide {
		w.VPORD(b, a, r)
	} else {
		w.VPOR(b, a, r)
	}
}

func (w *writer) xor(b, a, r vec) {
	if w.wide {
		w.VPXORD(b, a, r)
	} else {
		w.VPXOR(b, a, r)
	}
}

// widenFloat16 and narrowFloat16 convert between half a vector of halves and a vector of float32s.
// A signalling NaN becomes quiet.
func (w *writer) widenFloat16(h vec) vec {
	r := w.vec()
	w.VCVTPH2PS(h, r)
	return r
}

func (w *writer) narrowFloat16(v vec) vec {
	r := w.halfVec()
	w.VCVTPS2PH(U8(0), v, r) // to nearest, ties to even
	return r
}

func float16Binary(op binary) binary {
	return func(w *writer) func(a, b vec) vec {
		compute := op(w)
		return func(a, b vec) vec { return w.narrowFloat16(compute(w.widenFloat16(a), w.widenFloat16(b))) }
	}
}

func float16Unary(op unary) unary {
	return func(w *writer) func(a vec) vec {
		compute := op(w)
		return func(a vec) vec { return w.narrowFloat16(compute(w.widenFloat16(a))) }
	}
}

func narrowFloat16(w *writer) func(a vec) vec { return w.narrowFloat16 }

// widenExactly widens halves without making signalling NaNs quiet: it clears the quiet bit again.
func widenExactly(w *writer) func(a vec) vec {
	quiet := w.constant(0x00400000)
	return func(a vec) vec {
		r, bits := w.widenFloat16(a), w.vec()
		w.VPMOVZXWD(a, bits)
		w.VPSLLD(U8(13), bits, bits)
		if w.wide {
			k := w.K()
			w.VCMPPS(U8(unordered), r, r, k)
			w.VPANDND(quiet, bits, bits)
			w.VPXORD(bits, r, k, r)
			return r
		}
		nan := w.vec()
		w.VCMPPS(U8(unordered), r, r, nan)
		w.VPANDN(quiet, bits, bits)
		w.VPAND(nan, bits, bits)
		w.VPXOR(bits, r, r)
		return r
	}
}

// bfloat has the constants for computations with bfloat16. The even elements of a vector are
// shifted up; the odd ones are in their place already.
type bfloat struct {
	w                *writer
	high, almost, lo vec
}

func newBFloat(w *writer) bfloat {
	return bfloat{w, w.constant(0xffff0000), w.constant(0x7fff), w.constant(1)}
}

func (f bfloat) split(a vec) (even, odd vec) {
	even, odd = f.w.vec(), f.w.vec()
	f.w.VPSLLD(U8(16), a, even)
	f.w.and(f.high, a, odd)
	return even, odd
}

// round rounds the upper half of each element to the nearest bfloat16, ties to even. It keeps NaNs
// as they are.
func (f bfloat) round(v vec) {
	w := f.w
	more := w.vec()
	w.VPSRLD(U8(16), v, more)
	w.and(f.lo, more, more)
	w.VPADDD(f.almost, more, more)
	if w.wide {
		k := w.K()
		w.VCMPPS(U8(ordered), v, v, k)
		w.VPADDD(more, v, k, v)
		return
	}
	number := w.vec()
	w.VCMPPS(U8(ordered), v, v, number)
	w.VPAND(number, more, more)
	w.VPADDD(more, v, v)
}

// join joins the upper halves.
func (f bfloat) join(even, odd vec) vec {
	f.w.VPSRLD(U8(16), even, even)
	if f.w.wide {
		f.w.VPTERNLOGD(U8(0xf8), f.high, odd, even) // even | odd&high
		return even
	}
	f.w.VPBLENDW(U8(0xaa), odd, even, even)
	return even
}

func bfloat16Binary(op binary, rounds bool) binary {
	return func(w *writer) func(a, b vec) vec {
		f, compute := newBFloat(w), op(w)
		return func(a, b vec) vec {
			evenA, oddA := f.split(a)
			evenB, oddB := f.split(b)
			even, odd := compute(evenA, evenB), compute(oddA, oddB)
			if rounds {
				f.round(even)
				f.round(odd)
			}
			return f.join(even, odd)
		}
	}
}

func bfloat16Unary(op unary) unary {
	return func(w *writer) func(a vec) vec {
		f, compute := newBFloat(w), op(w)
		return func(a vec) vec {
			even, odd := f.split(a)
			even, odd = compute(even), compute(odd)
			f.round(even)
			f.round(odd)
			return f.join(even, odd)
		}
	}
}

// narrowBFloat16 first multiplies by 1, which only makes signalling NaNs quiet.
func narrowBFloat16(w *writer) func(a vec) vec {
	f, one := newBFloat(w), w.constant(math.Float32bits(1))
	return func(a vec) vec {
		v := w.vec()
		w.VMULPS(one, a, v)
		f.round(v)
		w.VPSRLD(U8(16), v, v)
		r := w.halfVec()
		if w.wide {
			w.VPMOVDW(v, r)
			return r
		}
		w.VPACKUSDW(v, v, v)
		w.VPERMQ(U8(0b1000), v, v)
		return v.AsX().(vec)
	}
}

func widenBFloat16(w *writer) func(a vec) vec {
	return func(a vec) vec {
		r := w.vec()
		w.VPMOVZXWD(a, r)
		w.VPSLLD(U8(16), r, r)
		return r
	}
}

// productInt8 multiplies even and odd bytes separately, as 16-bit numbers.
func productInt8(w *writer) func(a, b vec) vec {
	low, high := w.constant(0x00ff00ff), w.constant(0xff00ff00)
	return func(a, b vec) vec {
		even, odd, r := w.vec(), w.vec(), w.vec()
		w.VPMULLW(b, a, even)
		w.and(low, even, even)
		w.VPSRLW(U8(8), a, odd)
		w.and(high, b, r)
		w.VPMULLW(r, odd, r)
		w.or(even, r, r)
		return r
	}
}

func productInt64(w *writer) func(a, b vec) vec {
	return func(a, b vec) vec {
		r := w.vec()
		if w.wide {
			w.VPMULLQ(b, a, r)
			return r
		}
		cross, other := w.vec(), w.vec()
		w.VPSRLQ(U8(32), a, cross)
		w.VPMULUDQ(b, cross, cross)
		w.VPSRLQ(U8(32), b, other)
		w.VPMULUDQ(a, other, other)
		w.VPADDQ(other, cross, cross)
		w.VPSLLQ(U8(32), cross, cross)
		w.VPMULUDQ(b, a, r)
		w.VPADDQ(cross, r, r)
		return r
	}
}

// extreme64 uses comparisons, since AVX2 has no minimum or maximum of 64-bit integers, and no
// unsigned comparison.
func extreme64(wide instruction, signed, least bool) binary {
	return func(w *writer) func(a, b vec) vec {
		if w.wide {
			return wide.binary()(w)
		}
		var sign vec
		if !signed {
			sign = w.vec()
			w.VPCMPEQD(sign, sign, sign)
			w.VPSLLQ(U8(63), sign, sign)
		}
		return func(a, b vec) vec {
			greater, x, y := w.vec(), a, b
			if !signed {
				x, y = w.vec(), w.vec()
				w.xor(sign, a, x)
				w.xor(sign, b, y)
			}
			w.VPCMPGTQ(y, x, greater) // a > b
			if least {
				w.VBLENDVPD(greater, b, a, greater)
			} else {
				w.VBLENDVPD(greater, a, b, greater)
			}
			return greater
		}
	}
}

// divide8 divides even and odd bytes separately. The parameter holds the 16-bit reciprocal twice.
// The quotient of an element is the upper half of its product with the reciprocal. Signed bytes are
// made positive before, and get their sign back afterwards.
func divide8(signed bool) unary {
	return func(w *writer) func(a vec) vec {
		by, low := w.parameter(false), w.constant(0x00ff00ff)
		var zero vec
		if signed && w.wide {
			zero = w.vec()
			w.VPXORD(zero, zero, zero)
		}
		return func(a vec) vec {
			from := a
			if signed {
				from = w.vec()
				w.VPABSB(a, from)
			}
			r, odd := w.vec(), w.vec()
			w.and(low, from, r)
			w.VPSRLW(U8(8), from, odd)
			w.VPMULHUW(by, r, r)
			w.VPMULHUW(by, odd, odd)
			w.VPSLLW(U8(8), odd, odd)
			w.or(odd, r, r)
			switch {
			case signed && w.wide:
				k := w.K()
				w.VPMOVB2M(a, k)
				w.VPSUBB(r, zero, k, r)
			case signed:
				w.VPSIGNB(a, r, r)
			}
			return r
		}
	}
}

// divide16 multiplies even and odd elements separately, as float32s, by the reciprocal.
func divide16(signed bool) unary {
	return func(w *writer) func(a vec) vec {
		by, low := w.parameter(false), w.constant(0xffff)
		quotient := func(v vec) {
			w.VCVTDQ2PS(v, v)
			w.VMULPS(by, v, v)
			w.VCVTTPS2DQ(v, v)
		}
		return func(a vec) vec {
			even, odd := w.vec(), w.vec()
			if signed {
				w.VPSLLD(U8(16), a, even)
				w.VPSRAD(U8(16), even, even)
				w.VPSRAD(U8(16), a, odd)
			} else {
				w.and(low, a, even)
				w.VPSRLD(U8(16), a, odd)
			}
			quotient(even)
			quotient(odd)
			w.and(low, even, even)
			w.VPSLLD(U8(16), odd, odd)
			w.or(odd, even, even)
			return even
		}
	}
}

// divide32 multiplies the halves of a vector, as float64s, by the reciprocal. AVX2 has no
// conversion of unsigned numbers: they are shifted down by 2^31 before, and up afterwards.
func divide32(signed bool) unary {
	return func(w *writer) func(a vec) vec {
		by := w.parameter(true)
		var top, moved vec
		if !signed && !w.wide {
			top, moved = w.constant(1<<31), w.vec()
			bits, x := w.GP64(), w.XMM()
			w.MOVQ(U64(math.Float64bits(1<<31)), bits)
			w.VMOVQ(bits, x)
			w.VBROADCASTSD(x, moved)
		}
		quotient := func(half vec) vec {
			wide, r := w.vec(), w.halfVec()
			switch {
			case !w.wide:
				w.VCVTDQ2PD(half, wide)
				if !signed {
					w.VADDPD(moved, wide, wide)
				}
			case signed:
				w.VCVTDQ2PD(half, wide)
			default:
				w.VCVTUDQ2PD(half, wide)
			}
			w.VMULPD(by, wide, wide)
			if w.wide {
				w.VCVTTPD2DQ(wide, r)
			} else {
				w.VCVTTPD2DQY(wide, r)
			}
			return r
		}
		return func(a vec) vec {
			if top != nil {
				from := w.vec()
				w.VPXOR(top, a, from)
				a = from
			}
			high, r := w.halfVec(), w.vec()
			if w.wide {
				w.VEXTRACTI64X4(U8(1), a, high)
				w.VINSERTI64X4(U8(1), quotient(high), quotient(a.AsY().(vec)).AsZ(), r)
			} else {
				w.VEXTRACTI128(U8(1), a, high)
				w.VINSERTI128(U8(1), quotient(high), quotient(a.AsX().(vec)).AsY(), r)
			}
			return r
		}
	}
}
