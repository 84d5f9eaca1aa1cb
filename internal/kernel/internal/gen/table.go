package main

import (
	"maps"
	"slices"

	. "github.com/mmcloughlin/avo/operand"
)

// kernels returns all kernels to write.
func kernels() []kernel {
	all := combiners("Float32", 4, false, 4, singles.binaries())
	all = append(all, combiners("Float64", 8, false, 4, doubles.binaries())...)
	half, brain := map[string]binary{}, map[string]binary{}
	for name, op := range singles.binaries() {
		half[name] = float16Binary(op)
		brain[name] = bfloat16Binary(op, name == "sum" || name == "product")
	}
	all = append(all, combiners("Float16", 2, true, 2, half)...)
	all = append(all, combiners("BFloat16", 2, false, 2, brain)...)
	all = append(all, integers()...)

	for _, op := range []struct {
		name           string
		single, double instruction
	}{{"scale", singles.mul, doubles.mul}, {"divide", singles.div, doubles.div}} {
		all = append(all,
			inPlace(op.name+"Float32", "float32", 4, false, with(op.single, false)),
			inPlace(op.name+"Float64", "float64", 8, false, with(op.double, true)),
			inPlace(op.name+"Float16", "float32", 2, true, float16Unary(with(op.single, false))),
			inPlace(op.name+"BFloat16", "float32", 2, false, bfloat16Unary(with(op.single, false))))
	}
	for _, t := range []struct {
		suffix string
		signed bool
	}{{"Int", true}, {"Uint", false}} {
		all = append(all,
			inPlace("divide"+t.suffix+"8", "uint32", 1, false, divide8(t.signed)),
			inPlace("divide"+t.suffix+"16", "float32", 2, false, divide16(t.signed)),
			inPlace("divide"+t.suffix+"32", "float64", 4, false, divide32(t.signed)))
	}
	return append(all,
		conversion("narrowFloat16", 2, 4, narrowFloat16), conversion("widenFloat16", 4, 2, widenExactly),
		conversion("narrowBFloat16", 2, 4, narrowBFloat16), conversion("widenBFloat16", 4, 2, widenBFloat16))
}

func combiners(suffix string, size int, half bool, unroll int, ops map[string]binary) []kernel {
	var all []kernel
	for _, name := range slices.Sorted(maps.Keys(ops)) {
		op := ops[name]
		all = append(all, kernel{
			name: name + suffix, signature: "func(dst, a, b []byte)", dst: "dst", src: []string{"a", "b"},
			dstSize: size, srcSize: size, half: half, unroll: unroll,
			body: func(w *writer) func(src []vec) vec {
				compute := op(w)
				return func(src []vec) vec { return compute(src[0], src[1]) }
			},
		})
	}
	return all
}

func inPlace(name, parameter string, size int, half bool, op unary) kernel {
	return kernel{
		name: name, signature: "func(b []byte, x " + parameter + ")", dst: "b", src: []string{"b"},
		dstSize: size, srcSize: size, half: half, unroll: 2, body: op.body(),
	}
}

func conversion(name string, dstSize, srcSize int, op unary) kernel {
	return kernel{
		name: name, signature: "func(dst, src []byte)", dst: "dst", src: []string{"src"},
		dstSize: dstSize, srcSize: srcSize, half: true, unroll: 2, body: op.body(),
	}
}

func (op unary) body() func(w *writer) func(src []vec) vec {
	return func(w *writer) func(src []vec) vec {
		compute := op(w)
		return func(src []vec) vec { return compute(src[0]) }
	}
}

// integers returns the kernels for integers. Sums and products are the same for signed and unsigned
// ones.
func integers() []kernel {
	type set = map[string]binary
	one := func(f func(w *writer) func(...Op)) binary { return instruction(f).binary() }
	var all []kernel
	for _, t := range []struct {
		suffix string
		size   int
		ops    set
	}{
		{"Int8", 1, set{
			"sum":     one(func(w *writer) func(...Op) { return w.VPADDB }),
			"min":     one(func(w *writer) func(...Op) { return w.VPMINSB }),
			"max":     one(func(w *writer) func(...Op) { return w.VPMAXSB }),
			"product": productInt8,
		}},
		{"Int16", 2, set{
			"sum":     one(func(w *writer) func(...Op) { return w.VPADDW }),
			"min":     one(func(w *writer) func(...Op) { return w.VPMINSW }),
			"max":     one(func(w *writer) func(...Op) { return w.VPMAXSW }),
			"product": one(func(w *writer) func(...Op) { return w.VPMULLW }),
		}},
		{"Int32", 4, set{
			"sum":     one(func(w *writer) func(...Op) { return w.VPADDD }),
			"min":     one(func(w *writer) func(...Op) { return w.VPMINSD }),
			"max":     one(func(w *writer) func(...Op) { return w.VPMAXSD }),
			"product": one(func(w *writer) func(...Op) { return w.VPMULLD }),
		}},
		{"Int64", 8, set{
			"sum":     one(func(w *writer) func(...Op) { return w.VPADDQ }),
			"min":     extreme64(func(w *writer) func(...Op) { return w.VPMINSQ }, true, true),
			"max":     extreme64(func(w *writer) func(...Op) { return w.VPMAXSQ }, true, false),
			"product": productInt64,
		}},
		{"Uint8", 1, set{
			"min": one(func(w *writer) func(...Op) { return w.VPMINUB }),
			"max": one(func(w *writer) func(...Op) { return w.VPMAXUB }),
		}},
		{"Uint16", 2, set{
			"min": one(func(w *writer) func(...Op) { return w.VPMINUW }),
			"max": one(func(w *writer) func(...Op) { return w.VPMAXUW }),
		}},
		{"Uint32", 4, set{
			"min": one(func(w *writer) func(...Op) { return w.VPMINUD }),
			"max": one(func(w *writer) func(...Op) { return w.VPMAXUD }),
		}},
		{"Uint64", 8, set{
			"min": extreme64(func(w *writer) func(...Op) { return w.VPMINUQ }, false, true),
			"max": extreme64(func(w *writer) func(...Op) { return w.VPMAXUQ }, false, false),
		}},
	} {
		all = append(all, combiners(t.suffix, t.size, false, 2, t.ops)...)
	}
	return all
}
