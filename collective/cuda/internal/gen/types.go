package main

// kind is a type of element.
type kind struct {
	name     string
	class    string // of the registers that hold an element
	bits     string
	lanes    int    // elements in 16 bytes
	shift    int    // log2 of an element's size
	word     string // class of the registers that vectors are loaded into
	wordSize int
	vector   string

	float   bool
	quiet   string // the bit that makes a NaN quiet
	made    string // the NaN of an operation on numbers
	compute string // the type in which floats are computed
	half    *half
}

// half is a type whose arithmetic uses a wider type.
type half struct {
	widen  func(w *writer, a string) string
	narrow func(w *writer, a string) string // undefined for a NaN
}

// operation is a kernel without its type.
type operation struct {
	name    string
	prepare func(w *writer)                     // before the loop
	combine func(w *writer, a, b string) string // a is from the lower source
	finish  func(w *writer, a string) string    // of the result
	mean    bool                                // an average of halves, which uses kind.enter, add and leave instead
}

var types = []kind{
	{name: "float32", class: "r", bits: "b32", lanes: 4, shift: 2, word: "r", wordSize: 4, vector: "v4.b32",
		float: true, quiet: "0x00400000", made: "0xffc00000", compute: "f32"},
	{name: "float64", class: "d", bits: "b64", lanes: 2, shift: 3, word: "d", wordSize: 8, vector: "v2.b64",
		float: true, quiet: "0x0008000000000000", made: "0xfff8000000000000", compute: "f64"},
	{name: "float16", class: "h", bits: "b16", lanes: 8, shift: 1, word: "r", wordSize: 4, vector: "v4.b32",
		float: true, quiet: "0x0200", made: "0xfe00", compute: "f32", half: &half{
			widen:  func(w *writer, a string) string { return w.to("r", "cvt.f32.f16", "%s", a) },
			narrow: func(w *writer, a string) string { return w.to("h", "cvt.rn.f16.f32", "%s", a) },
		}},
	{name: "bfloat16", class: "h", bits: "b16", lanes: 8, shift: 1, word: "r", wordSize: 4, vector: "v4.b32",
		float: true, quiet: "0x0040", made: "0xffc0", compute: "f32", half: &half{widen: widenBrain, narrow: narrowBrain}},
	{name: "int32", class: "r", bits: "b32", lanes: 4, shift: 2, word: "r", wordSize: 4, vector: "v4.b32", compute: "s32"},
	{name: "int64", class: "d", bits: "b64", lanes: 2, shift: 3, word: "d", wordSize: 8, vector: "v2.b64", compute: "s64"},
}

func widenBrain(w *writer, a string) string {
	wide := w.to("r", "cvt.u32.u16", "%s", a)
	return w.to("r", "shl.b32", "%s, 16", wide)
}

// narrowBrain rounds to nearest, ties to even, in integers: devices before compute capability 8.0
// have no instruction for it.
func narrowBrain(w *writer, a string) string {
	odd := w.to("r", "shr.u32", "%s, 16", a)
	odd = w.to("r", "and.b32", "%s, 1", odd)
	up := w.to("r", "add.u32", "%s, 0x7fff", odd)
	up = w.to("r", "add.u32", "%s, %s", a, up)
	up = w.to("r", "shr.u32", "%s, 16", up)
	return w.to("h", "cvt.u16.u32", "%s", up)
}

// ops returns the kernels of a type.
func (t kind) ops() []operation {
	if t.float {
		return t.floats()
	}
	return t.integers()
}

func (t kind) floats() []operation {
	simple := func(op string) func(w *writer, a, b string) string {
		return func(w *writer, a, b string) string { return t.guarded(w, a, b, op) }
	}
	return []operation{
		{name: "sum", combine: simple("add.rn")},
		{name: "product", combine: simple("mul.rn")},
		{name: "min", combine: func(w *writer, a, b string) string { return t.extreme(w, a, b, "lt", "or") }},
		{name: "max", combine: func(w *writer, a, b string) string { return t.extreme(w, a, b, "gt", "and") }},
		{name: "average", combine: simple("add.rn"), prepare: t.number, finish: t.quotient, mean: t.half != nil},
		{name: "scale", prepare: t.number, finish: t.scaled},
	}
}

// number rounds the argument to the type of the computation.
func (t kind) number(w *writer) {
	if t.compute == "f32" {
		w.used["factor"]++
		w.put("cvt.rn.f32.f64 %%factor1, %%number")
	}
}

// factor returns the register that number or divisor has set.
func (t kind) factor() string {
	if t.compute == "f32" || t.compute == "s32" {
		return "%factor1"
	}
	return "%number"
}

// computing returns the class of the registers in which floats are computed.
func (t kind) computing() string {
	if t.compute == "f64" {
		return "d"
	}
	return "r"
}

func (t kind) widened(w *writer, a string) string {
	if t.half != nil {
		return t.half.widen(w, a)
	}
	return a
}

func (t kind) narrowed(w *writer, a string) string {
	if t.half != nil {
		return t.half.narrow(w, a)
	}
	return a
}

// isNaN returns the predicate that an element is a NaN.
func (t kind) isNaN(w *writer, a string) string {
	return w.to("p", "setp.nan."+t.compute, "%s, %s", a, a)
}

// quieted returns the NaN a as a quiet NaN.
func (t kind) quieted(w *writer, a string) string {
	return w.to(t.class, "or."+t.bits, "%s, %s", a, t.quiet)
}

// guarded computes with two elements, and replaces a result that is a NaN by the chosen NaN.
func (t kind) guarded(w *writer, a, b, op string) string {
	x, y := t.widened(w, a), t.widened(w, b)
	r := w.to(t.computing(), op+"."+t.compute, "%s, %s", x, y)
	none := t.isNaN(w, r)
	return t.chosen(w, t.narrowed(w, r), none, a, b, t.isNaN(w, x), t.isNaN(w, y))
}

// chosen returns r or, if r is a NaN, the NaN chosen for the operands a and b.
func (t kind) chosen(w *writer, r, none, a, b, noA, noB string) string {
	n := w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.quieted(w, b), t.constant(w, t.made), noB)
	n = w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.quieted(w, a), n, noA)
	return w.to(t.class, "selp."+t.bits, "%s, %s, %s", n, r, none)
}

// constant returns a register that holds bits.
func (t kind) constant(w *writer, bits string) string {
	return w.to(t.class, "mov."+t.bits, "%s", bits)
}

// extreme returns the smaller or larger of two elements. It joins the signs of two zeros; other
// equal elements have the same bits.
func (t kind) extreme(w *writer, a, b, compare, join string) string {
	x, y := t.widened(w, a), t.widened(w, b)
	before := w.to("p", "setp."+compare+"."+t.compute, "%s, %s", x, y)
	r := w.to(t.class, "selp."+t.bits, "%s, %s, %s", a, b, before)
	equal := w.to("p", "setp.eq."+t.compute, "%s, %s", x, y)
	both := w.to(t.class, join+"."+t.bits, "%s, %s", a, b)
	r = w.to(t.class, "selp."+t.bits, "%s, %s, %s", both, r, equal)
	none := w.to("p", "setp.nan."+t.compute, "%s, %s", x, y)
	return t.chosen(w, r, none, a, b, t.isNaN(w, x), t.isNaN(w, y))
}

// quotient divides by the number of ranks. The result is a NaN only if the element is one.
func (t kind) quotient(w *writer, a string) string {
	x := t.widened(w, a)
	none := t.isNaN(w, x)
	r := t.narrowed(w, w.to(t.computing(), "div.rn."+t.compute, "%s, %s", x, t.factor()))
	return w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.quieted(w, a), r, none)
}

// total is a sum of halves that is rounded when it is complete: a float32, and the half that is the
// result if the float32 is a NaN.
type total struct{ sum, none string }

// enter returns the total of the first element.
func (t kind) enter(w *writer, a string) total { return total{t.widened(w, a), t.quieted(w, a)} }

// add adds the next element.
func (t kind) add(w *writer, s total, b string) {
	x := t.widened(w, b)
	before := t.isNaN(w, s.sum)
	none := w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.quieted(w, b), t.constant(w, t.made), t.isNaN(w, x))
	w.put("selp.%s %s, %s, %s, %s", t.bits, s.none, s.none, none, before)
	w.put("add.rn.f32 %s, %s, %s", s.sum, s.sum, x)
}

// leave returns the total divided by the number of ranks.
func (t kind) leave(w *writer, s total) string {
	r := t.narrowed(w, w.to("r", "div.rn.f32", "%s, %s", s.sum, t.factor()))
	return w.to(t.class, "selp."+t.bits, "%s, %s, %s", s.none, r, t.isNaN(w, s.sum))
}

// scaled multiplies by the factor, which is not a NaN.
func (t kind) scaled(w *writer, a string) string {
	x := t.widened(w, a)
	r := w.to(t.computing(), "mul.rn."+t.compute, "%s, %s", x, t.factor())
	none, noA := t.isNaN(w, r), t.isNaN(w, x)
	n := w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.quieted(w, a), t.constant(w, t.made), noA)
	return w.to(t.class, "selp."+t.bits, "%s, %s, %s", n, t.narrowed(w, r), none)
}

func (t kind) integers() []operation {
	simple := func(op string) func(w *writer, a, b string) string {
		return func(w *writer, a, b string) string { return w.to(t.class, op+"."+t.compute, "%s, %s", a, b) }
	}
	return []operation{
		{name: "sum", combine: simple("add")},
		{name: "product", combine: simple("mul.lo")},
		{name: "min", combine: simple("min")},
		{name: "max", combine: simple("max")},
		{name: "average", combine: simple("add"), prepare: t.divisor, finish: t.truncated},
		{name: "scale", finish: t.saturated},
	}
}

// divisor converts the argument, an integer, to the type.
func (t kind) divisor(w *writer) {
	if t.compute == "s32" {
		w.used["factor"]++
		w.put("cvt.u32.u64 %%factor1, %%number")
	}
}

// truncated divides by the argument, towards zero.
func (t kind) truncated(w *writer, a string) string {
	return w.to(t.class, "div."+t.compute, "%s, %s", a, t.factor())
}

// saturated multiplies in float64, truncates towards zero, and clamps to the range of the type. A
// NaN becomes 0.
func (t kind) saturated(w *writer, a string) string {
	lowest, highest, low, high := "0xc1e0000000000000", "0x41dfffffffc00000", "0x80000000", "0x7fffffff"
	if t.compute == "s64" {
		lowest, highest, low, high = "0xc3e0000000000000", "0x43e0000000000000", "0x8000000000000000", "0x7fffffffffffffff"
	}
	x := w.to("d", "cvt.rn.f64."+t.compute, "%s", a)
	x = w.to("d", "mul.rn.f64", "%s, %%number", x)
	r := w.to(t.class, "cvt.rzi."+t.compute+".f64", "%s", x)
	bound := func(compare, limit, value string) {
		l := w.to("d", "mov.b64", "%s", limit)
		p := w.to("p", "setp."+compare+".f64", "%s, %s", x, l)
		r = w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.constant(w, value), r, p)
	}
	bound("le", lowest, low)
	bound("ge", highest, high)
	none := w.to("p", "setp.nan.f64", "%s, %s", x, x)
	return w.to(t.class, "selp."+t.bits, "%s, %s, %s", t.constant(w, "0"), r, none)
}
