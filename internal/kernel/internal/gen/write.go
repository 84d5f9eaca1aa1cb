package main

import (
	"math/bits"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// kernel is a function to write: it computes each element of its first slice from the elements at
// the same index of the other slices.
type kernel struct {
	name      string
	signature string
	dst       string   // the slice that is written
	src       []string // the slices that are read
	dstSize   int      // bytes of an element
	srcSize   int
	half      bool // a vector is full of float32s, and the smaller elements in memory have two bytes
	unroll    int
	// body emits what all vectors share, such as constants, and returns a function that emits the
	// computation of one vector.
	body func(w *writer) func(src []reg.VecVirtual) reg.VecVirtual
}

// writer writes kernels for AVX2 or, if wide, for AVX-512.
type writer struct {
	*build.Context
	wide bool
}

// vec returns a new vector of full width.
func (w *writer) vec() reg.VecVirtual {
	if w.wide {
		return w.ZMM()
	}
	return w.YMM()
}

// halfVec returns a new vector of half the width.
func (w *writer) halfVec() reg.VecVirtual {
	if w.wide {
		return w.YMM()
	}
	return w.XMM()
}

// width is the number of bytes of a vector.
func (w *writer) width() int {
	if w.wide {
		return 64
	}
	return 32
}

// stream is a slice that is processed in vectors.
type stream struct {
	base reg.Register
	size int // bytes of an element
	step int // bytes of a vector
}

func (s stream) at(i reg.Register, vector int) Mem {
	return Mem{Base: s.base, Index: i, Scale: uint8(s.size), Disp: vector * s.step}
}

// loop is the state that the parts of a function share.
type loop struct {
	dst     stream
	src     []stream
	i, left reg.Register // in elements
	compute func(src []reg.VecVirtual) reg.VecVirtual
}

func (w *writer) write(k kernel) {
	name := k.name + "AVX2"
	if w.wide {
		name = k.name + "AVX512"
	}
	w.Function(name)
	w.Attributes(attr.NOSPLIT)
	w.SignatureExpr(k.signature)
	lanes := w.width() / k.dstSize
	if k.half {
		lanes = w.width() / 4
	}
	l := loop{dst: stream{w.Load(w.Param(k.dst).Base(), w.GP64()), k.dstSize, lanes * k.dstSize}}
	n := w.Load(w.Param(k.dst).Len(), w.GP64())
	for _, name := range k.src {
		if name == k.dst {
			l.src = append(l.src, l.dst)
			continue
		}
		l.src = append(l.src, stream{w.Load(w.Param(name).Base(), w.GP64()), k.srcSize, lanes * k.srcSize})
	}
	w.SHRQ(U8(bits.TrailingZeros(uint(k.dstSize))), n)
	for _, name := range k.src {
		if name != k.dst {
			m := w.Load(w.Param(name).Len(), w.GP64())
			w.SHRQ(U8(bits.TrailingZeros(uint(k.srcSize))), m)
			w.CMPQ(m, n)
			w.JNE(LabelRef("unequal"))
		}
	}
	l.left, l.i = n, w.GP64()
	w.XORQ(l.i, l.i)
	l.compute = k.body(w)

	w.vectors("many", "one", l, lanes, k.unroll)
	w.vectors("one", "tail", l, lanes, 1)
	w.Label("tail")
	w.TESTQ(l.left, l.left)
	w.JE(LabelRef("done"))
	if w.wide {
		w.masked(l)
	} else {
		w.single(l)
	}
	w.Label("done")
	w.VZEROUPPER()
	w.RET()
	if len(k.src) > 1 || k.src[0] != k.dst {
		w.Label("unequal")
		// A tail call of unequal, which panics and has no arguments.
		w.Instruction(&ir.Instruction{Opcode: "JMP", Operands: []Op{Mem{Symbol: Symbol{Name: "·unequal"}, Base: reg.StaticBase}},
			IsTerminal: true})
	}
}

// vectors emits a loop that processes unroll vectors at once while enough are left, and then jumps
// to the next part.
func (w *writer) vectors(name, next string, l loop, lanes, unroll int) {
	w.Label(name)
	w.CMPQ(l.left, U32(lanes*unroll))
	w.JB(LabelRef(next))
	for v := range unroll {
		src := make([]reg.VecVirtual, len(l.src))
		for i, s := range l.src {
			src[i] = w.load(s.at(l.i, v), s.step)
		}
		w.store(l.compute(src), l.dst.at(l.i, v))
	}
	w.ADDQ(U32(lanes*unroll), l.i)
	w.SUBQ(U32(lanes*unroll), l.left)
	w.JMP(LabelRef(name))
}

func (w *writer) load(m Mem, step int) reg.VecVirtual {
	v := w.vec()
	if step < w.width() {
		v = w.halfVec()
	}
	if w.wide {
		w.VMOVDQU64(m, v)
	} else {
		w.VMOVDQU(m, v)
	}
	return v
}

func (w *writer) store(v reg.VecVirtual, m Mem) {
	if w.wide {
		w.VMOVDQU64(v, m)
	} else {
		w.VMOVDQU(v, m)
	}
}

// masked emits the last, incomplete vector. It accesses nothing beyond the slices.
func (w *writer) masked(l loop) {
	ones := w.GP64()
	w.MOVQ(I32(-1), ones)
	mask := func(size int) reg.Register {
		n, k := w.GP64(), w.K()
		w.MOVQ(l.left, n)
		w.SHLQ(U8(bits.TrailingZeros(uint(size))), n)
		w.BZHIQ(n, ones, n)
		w.KMOVQ(n, k)
		return k
	}
	out := mask(l.dst.size)
	in := out
	if l.src[0].size != l.dst.size {
		in = mask(l.src[0].size)
	}
	src := make([]reg.VecVirtual, len(l.src))
	for i, s := range l.src {
		src[i] = w.vec()
		if s.step < w.width() {
			src[i] = w.halfVec()
		}
		w.VMOVDQU8_Z(s.at(l.i, 0), in, src[i])
	}
	w.VMOVDQU8(l.compute(src), out, l.dst.at(l.i, 0))
}

// single emits a loop over single elements, each in a separate vector.
func (w *writer) single(l loop) {
	w.Label("single")
	src := make([]reg.VecVirtual, len(l.src))
	for i, s := range l.src {
		x, m := w.XMM(), s.at(l.i, 0)
		switch s.size {
		case 1:
			r := w.GP32()
			w.MOVBLZX(m, r)
			w.VMOVD(r, x)
		case 2:
			r := w.GP32()
			w.MOVWLZX(m, r)
			w.VMOVD(r, x)
		case 4:
			w.VMOVD(m, x)
		case 8:
			w.VMOVQ(m, x)
		}
		src[i] = x
		if s.step == w.width() {
			src[i] = x.AsY().(reg.VecVirtual)
		}
	}
	x, m := l.compute(src).AsX(), l.dst.at(l.i, 0)
	switch l.dst.size {
	case 1:
		r := w.GP32()
		w.VMOVD(x, r)
		w.MOVB(r.As8(), m)
	case 2:
		r := w.GP32()
		w.VMOVD(x, r)
		w.MOVW(r.As16(), m)
	case 4:
		w.VMOVD(x, m)
	case 8:
		w.VMOVQ(x, m)
	}
	w.INCQ(l.i)
	w.DECQ(l.left)
	w.JNE(LabelRef("single"))
}
