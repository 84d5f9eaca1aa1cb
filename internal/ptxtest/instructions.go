package ptxtest

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// form is an instruction that computes: the widths of its result and operands in bits.
type form struct {
	dst  int
	src  []int
	eval func(a []uint64) uint64
}

// The NaNs that this device makes, which no processor makes.
const (
	nan16, nan32, nan64 = 0x7fff, 0x7fffffff, 0x7fffffffffffffff
)

func single(bits uint64) float64 { return float64(math.Float32frombits(uint32(bits))) }
func double(bits uint64) float64 { return math.Float64frombits(bits) }

// bits32 and bits64 return the bits of results of floating point operations.
func bits32(f float32) uint64 {
	if f != f {
		return nan32
	}
	return uint64(math.Float32bits(f))
}

func bits64(f float64) uint64 {
	if f != f {
		return nan64
	}
	return math.Float64bits(f)
}

// nearly returns a permitted result of an approximation: not the nearest float.
func nearly(f float64) uint64 {
	bits := bits32(float32(f))
	if f != 0 && f-f == 0 {
		bits ^= 1
	}
	return bits
}

func truth(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

var forms = makeForms()

func makeForms() map[string]form {
	all := map[string]form{
		"mul.wide.u32":       {64, []int{32, 32}, func(a []uint64) uint64 { return a[0] * a[1] }},
		"cvt.u64.u32":        {64, []int{32}, func(a []uint64) uint64 { return a[0] }},
		"cvt.u32.u16":        {32, []int{16}, func(a []uint64) uint64 { return a[0] }},
		"cvt.u32.u64":        {32, []int{64}, func(a []uint64) uint64 { return uint64(uint32(a[0])) }},
		"cvt.u16.u32":        {16, []int{32}, func(a []uint64) uint64 { return uint64(uint16(a[0])) }},
		"cvta.to.global.u64": {64, []int{64}, func(a []uint64) uint64 { return a[0] }},
		"shl.b64":            {64, []int{64, 32}, func(a []uint64) uint64 { return a[0] << a[1] }},
		"shl.b32":            {32, []int{32, 32}, func(a []uint64) uint64 { return uint64(uint32(a[0]) << a[1]) }},
		"shr.u32":            {32, []int{32, 32}, func(a []uint64) uint64 { return uint64(uint32(a[0]) >> a[1]) }},
		"cvt.rn.f32.u32":     {32, []int{32}, func(a []uint64) uint64 { return bits32(float32(uint32(a[0]))) }},
		"ex2.approx.f32":     {32, []int{32}, func(a []uint64) uint64 { return nearly(math.Exp2(single(a[0]))) }},
		"lg2.approx.f32":     {32, []int{32}, func(a []uint64) uint64 { return nearly(math.Log2(single(a[0]))) }},
		"cvt.f32.f16":        {32, []int{16}, func(a []uint64) uint64 { return bits32(widenHalf(uint16(a[0]))) }},
		"cvt.rn.f16.f32":     {16, []int{32}, func(a []uint64) uint64 { return uint64(roundHalf(single(a[0]))) }},
		"cvt.rn.f32.f64":     {32, []int{64}, func(a []uint64) uint64 { return bits32(float32(double(a[0]))) }},
		"cvt.rn.f64.s32":     {64, []int{32}, func(a []uint64) uint64 { return bits64(float64(int32(a[0]))) }},
		"cvt.rn.f64.s64":     {64, []int{64}, func(a []uint64) uint64 { return bits64(float64(int64(a[0]))) }},
		"cvt.rzi.s32.f64":    {32, []int{64}, func(a []uint64) uint64 { return uint64(uint32(towardsZero(double(a[0]), 31))) }},
		"cvt.rzi.s64.f64":    {64, []int{64}, func(a []uint64) uint64 { return uint64(towardsZero(double(a[0]), 63)) }},
	}
	for _, w := range []int{16, 32, 64} {
		t := "b" + strconv.Itoa(w)
		all["mov."+t] = form{w, []int{w}, func(a []uint64) uint64 { return a[0] }}
		all["and."+t] = form{w, []int{w, w}, func(a []uint64) uint64 { return a[0] & a[1] }}
		all["or."+t] = form{w, []int{w, w}, func(a []uint64) uint64 { return a[0] | a[1] }}
		all["selp."+t] = form{w, []int{w, w, 1}, func(a []uint64) uint64 {
			if a[2] != 0 {
				return a[0]
			}
			return a[1]
		}}
	}
	all["mov.u32"], all["mov.u64"] = all["mov.b32"], all["mov.b64"]
	addIntegers(all)
	addFloats(all)
	return all
}

func addIntegers(all map[string]form) {
	for _, w := range []int{32, 64} {
		n := strconv.Itoa(w)
		mask := ^uint64(0) >> (64 - w)
		signed := func(v uint64) int64 { return int64(v<<(64-w)) >> (64 - w) }
		two := func(f func(a, b int64) int64) form {
			return form{w, []int{w, w}, func(a []uint64) uint64 { return uint64(f(signed(a[0]), signed(a[1]))) & mask }}
		}
		all["add.s"+n] = two(func(a, b int64) int64 { return a + b })
		all["add.u"+n] = all["add.s"+n]
		all["sub.s"+n] = two(func(a, b int64) int64 { return a - b })
		all["sub.u"+n] = all["sub.s"+n]
		all["mul.lo.s"+n] = two(func(a, b int64) int64 { return a * b })
		all["mul.lo.u"+n] = all["mul.lo.s"+n]
		all["min.s"+n] = two(func(a, b int64) int64 { return min(a, b) })
		all["max.s"+n] = two(func(a, b int64) int64 { return max(a, b) })
		all["div.s"+n] = two(func(a, b int64) int64 {
			if b == 0 {
				return -1 // unspecified
			}
			return a / b
		})
		all["div.u"+n] = form{w, []int{w, w}, func(a []uint64) uint64 {
			if a[1] == 0 {
				return mask // unspecified
			}
			return a[0] / a[1]
		}}
		all["setp.eq.u"+n] = form{1, []int{w, w}, func(a []uint64) uint64 { return truth(a[0] == a[1]) }}
		all["setp.ge.u"+n] = form{1, []int{w, w}, func(a []uint64) uint64 { return truth(a[0] >= a[1]) }}
		all["setp.lt.u"+n] = form{1, []int{w, w}, func(a []uint64) uint64 { return truth(a[0] < a[1]) }}
	}
}

func addFloats(all map[string]form) {
	for _, t := range []struct {
		name  string
		width int
		of    func(uint64) float64
	}{{"f32", 32, single}, {"f64", 64, double}} {
		compare := func(name string, f func(a, b float64) bool) {
			all["setp."+name+"."+t.name] = form{1, []int{t.width, t.width}, func(a []uint64) uint64 { return truth(f(t.of(a[0]), t.of(a[1]))) }}
		}
		compare("lt", func(a, b float64) bool { return a < b })
		compare("le", func(a, b float64) bool { return a <= b })
		compare("gt", func(a, b float64) bool { return a > b })
		compare("ge", func(a, b float64) bool { return a >= b })
		compare("eq", func(a, b float64) bool { return a == b })
		compare("nan", func(a, b float64) bool { return a != a || b != b })
	}
	f32 := func(f func(a, b float32) float32) form {
		return form{32, []int{32, 32}, func(a []uint64) uint64 {
			return bits32(f(math.Float32frombits(uint32(a[0])), math.Float32frombits(uint32(a[1]))))
		}}
	}
	f64 := func(f func(a, b float64) float64) form {
		return form{64, []int{64, 64}, func(a []uint64) uint64 { return bits64(f(double(a[0]), double(a[1]))) }}
	}
	all["sub.rn.f32"] = f32(func(a, b float32) float32 { return a - b })
	all["add.rn.f32"] = f32(func(a, b float32) float32 { return a + b })
	all["mul.rn.f32"] = f32(func(a, b float32) float32 { return a * b })
	all["div.rn.f32"] = f32(func(a, b float32) float32 { return a / b })
	all["add.rn.f64"] = f64(func(a, b float64) float64 { return a + b })
	all["mul.rn.f64"] = f64(func(a, b float64) float64 { return a * b })
	all["div.rn.f64"] = f64(func(a, b float64) float64 { return a / b })
}

// widenHalf returns the value of a half-precision number.
func widenHalf(h uint16) float32 {
	exponent, fraction := int(h>>10&0x1f), float64(h&0x3ff)
	v := math.Ldexp(1024+fraction, exponent-25)
	switch {
	case exponent == 0:
		v = math.Ldexp(fraction, -24)
	case exponent == 0x1f && fraction == 0:
		v = math.Inf(1)
	case exponent == 0x1f:
		v = math.NaN()
	}
	if h&0x8000 != 0 {
		v = -v
	}
	return float32(v)
}

// roundHalf returns the nearest half-precision number, ties to even.
func roundHalf(f float64) uint16 {
	sign := uint16(0)
	if math.Signbit(f) {
		sign = 0x8000
	}
	switch f = math.Abs(f); {
	case f != f:
		return nan16
	case f >= 65520: // half a step above the largest
		return sign | 0x7c00
	case f < 0x1p-14: // steps of 2^-24, the last of which is the smallest normal number
		return sign | uint16(math.RoundToEven(f*0x1p24))
	}
	fraction, exponent := math.Frexp(f)          // in [½, 1)
	steps := math.RoundToEven(fraction * 0x1p11) // 1024 to 2048, which is the next exponent's first
	return sign | uint16((exponent+14)<<10+int(steps)-1024)
}

// towardsZero converts f to an integer with that many bits and a sign. For numbers out of range and
// NaN, the result is an arbitrary choice of this device.
func towardsZero(f float64, bits int) int64 {
	if limit := math.Ldexp(1, bits); f != f || f >= limit || f < -limit {
		return 0x5555
	}
	return int64(f)
}

// specials are the registers by which a thread knows its number.
var specials = []string{"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"}

// instruction parses an instruction.
func (k *Kernel) instruction(s *step, op string, args []string) error {
	switch {
	case op == "ret" && len(args) == 0:
		s.kind = returns
		return nil
	case op == "bra" && len(args) == 1:
		s.kind = branches
		return nil
	case strings.HasPrefix(op, "ld.") && len(args) == 2:
		return k.access(s, strings.TrimPrefix(op, "ld."), args[0], args[1])
	case strings.HasPrefix(op, "st.") && len(args) == 2:
		s.kind = stores
		return k.access(s, strings.TrimPrefix(op, "st."), args[1], args[0])
	case op == "mov.b32" && len(args) == 2 && strings.HasPrefix(args[0], "{"):
		return k.split(s, splits, args[1], args[0])
	case op == "mov.b32" && len(args) == 2 && strings.HasPrefix(args[1], "{"):
		return k.split(s, joins, args[0], args[1])
	case op == "mov.u64" && len(args) == 2 && k.params[args[1]].size > 0:
		args[1] = strconv.Itoa(k.params[args[1]].offset) // offset within the parameters
	case op == "mov.u32" && len(args) == 2:
		for _, special := range specials {
			if args[1] == special {
				s.kind, s.special = reads, special
				var err error
				s.dst, err = k.group(args[0], 1, 32)
				return err
			}
		}
	}
	f, ok := forms[op]
	if !ok || len(args) != 1+len(f.src) {
		return fmt.Errorf("no instruction that is understood")
	}
	var err error
	if s.dst, err = k.group(args[0], 1, f.dst); err != nil {
		return err
	}
	for i, width := range f.src {
		v, err := k.value(args[1+i], width)
		if err != nil {
			return err
		}
		s.src = append(s.src, v)
	}
	s.eval = f.eval
	return nil
}

func (k *Kernel) split(s *step, kind stepKind, whole, halves string) error {
	w, err := k.register(whole, 32)
	if err != nil {
		return err
	}
	h, err := k.group(halves, 2, 16)
	s.kind, s.dst = kind, append([]int{w}, h...)
	return err
}

// memoryTypes are the types of loads and stores, with their widths in bits.
var memoryTypes = map[string]int{"b16": 16, "u16": 16, "b32": 32, "u32": 32, "f32": 32, "b64": 64, "u64": 64, "f64": 64}

// access parses a load or store.
func (k *Kernel) access(s *step, op, data, address string) error {
	if s.kind != stores {
		s.kind = loads
	}
	parts := strings.Split(op, ".")
	count := 1
	if len(parts) == 3 {
		n, err := strconv.Atoi(strings.TrimPrefix(parts[1], "v"))
		if err != nil || n != 2 && n != 4 {
			return fmt.Errorf("no vector")
		}
		count, parts = n, []string{parts[0], parts[2]}
	}
	switch {
	case len(parts) != 2:
		return fmt.Errorf("no instruction that is understood")
	case parts[0] == "param" && s.kind == loads && count == 1:
		s.memory = parameter
	case parts[0] != "global":
		return fmt.Errorf("memory of kind %s", parts[0])
	}
	width, ok := memoryTypes[parts[1]]
	if !ok {
		return fmt.Errorf("memory of type %s", parts[1])
	}
	s.width = width / 8
	var err error
	if s.dst, err = k.group(data, count, width); err != nil {
		return err
	}
	inner, ok := strings.CutPrefix(strings.TrimSuffix(address, "]"), "[")
	base, offset, more := strings.Cut(inner, "+")
	if !ok {
		return fmt.Errorf("no address")
	}
	if more {
		if s.offset, err = strconv.ParseUint(offset, 0, 32); err != nil {
			return err
		}
	}
	if p, named := k.params[base]; named && s.memory == parameter {
		if s.offset+uint64(s.width) > uint64(p.size) {
			return fmt.Errorf("%s has %d bytes", base, p.size)
		}
		s.offset += uint64(p.offset)
		return nil
	}
	r, err := k.register(base, 64)
	s.address = operand{reg: r}
	return err
}
