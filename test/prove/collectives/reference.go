package main

import (
	"bytes"
	"hash/crc32"
	"maps"
	"math"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
)

// The reference computes the ranks' results in one process, element by element. Inputs repeat after
// a prime number of elements: inputs and results of any size are cheap to compute, yet misplaced
// data is detected.

const period = 1021

// place identifies a vector of a program's inputs.
type place struct {
	seed                   uint64
	step, turn, tensor, to int
	rank                   int // in the step's group
}

// bits returns a hash of an element's position.
func (p place) bits(i int) uint64 {
	x := p.seed
	for _, part := range []int{p.step, p.turn, p.tensor, p.to, p.rank, i % period} {
		x = (x ^ uint64(part)) * 0x9e3779b97f4a7c15
		x ^= x >> 29
	}
	x *= 0xbf58476d1ce4e5b9
	return x ^ x>>32
}

// kind describes the values of inputs.
type kind struct {
	signed, product, rough bool
	positive               bool // vectors have positive inner products
	large                  bool // sums do not fit Float16, means do
}

// number returns element i of a vector: an integer so small that every partial result is exact in
// every type or, for rough inputs, a fraction whose sums are rounded.
func (p place) number(i int, k kind) float64 {
	x := p.bits(i)
	switch {
	case k.positive:
		return float64(1 + x%7)
	case k.large:
		return float64(int64(x>>40)-1<<23) / (1 << 9)
	case k.rough:
		return float64(int64(x>>40)-1<<23) / (1 << 24)
	case k.product && k.signed:
		return [...]float64{1, 2, -1}[x%3]
	case k.product:
		return float64(1 + x%2)
	case k.signed:
		return float64(x%7) - 3
	}
	return float64(x % 7)
}

// kindOf returns the kind of a step's inputs.
func kindOf[T collective.Element](s *step) kind {
	return kind{signed: T(0)-1 < 0 || floats[T](), product: s.Op == "product", positive: s.Op == "adasum", rough: s.Rough && floats[T](),
		large: s.Rough && s.Op == "average" && (s.Type == "float16" || s.Compress == "float16")}
}

// floats reports whether elements are floating-point numbers.
func floats[T collective.Element]() bool {
	switch any(*new(T)).(type) {
	case float32, float64, collective.Float16, collective.BFloat16:
		return true
	}
	return false
}

func fromFloat[T collective.Element](f float64) T {
	switch any(*new(T)).(type) {
	case collective.Float16:
		return T(collective.ToFloat16(float32(f)))
	case collective.BFloat16:
		return T(collective.ToBFloat16(float32(f)))
	case float32, float64:
		return T(f)
	}
	return T(int64(f))
}

func toFloat[T collective.Element](v T) float64 {
	switch any(v).(type) {
	case collective.Float16:
		return float64(collective.Float16(v).Float32())
	case collective.BFloat16:
		return float64(collective.BFloat16(v).Float32())
	}
	return float64(v)
}

// pattern returns one period of a vector.
func pattern[T collective.Element](p place, k kind) []T {
	out := make([]T, period)
	for i := range out {
		out[i] = fromFloat[T](p.number(i, k))
	}
	return out
}

// fill repeats one period over data.
func fill[T collective.Element](data, one []T) {
	for n := copy(data, one); n > 0 && n < len(data); n *= 2 {
		copy(data[n:], data[:n])
	}
}

// combineTwo combines a, of the lower ranks, with b.
func combineTwo[T collective.Element](op collective.Op, a, b T) T {
	half := floats[T]() && unsafe.Sizeof(a) == 2
	switch op {
	case collective.Min:
		if toFloat(b) < toFloat(a) {
			return b
		}
		return a
	case collective.Max:
		if toFloat(b) > toFloat(a) {
			return b
		}
		return a
	case collective.Product:
		if half {
			return fromFloat[T](float64(float32(toFloat(a)) * float32(toFloat(b))))
		}
		return a * b
	}
	if half {
		return fromFloat[T](float64(float32(toFloat(a)) + float32(toFloat(b))))
	}
	return a + b
}

// divide completes an average.
func divide[T collective.Element](v T, n int) T {
	switch any(v).(type) {
	case collective.Float16, collective.BFloat16:
		return fromFloat[T](float64(float32(toFloat(v)) / float32(n)))
	case float32, float64:
		return v / T(n)
	}
	if T(0)-1 < 0 {
		return T(int64(v) / int64(n))
	}
	return T(uint64(v) / uint64(n))
}

// seat is a rank's place: the number of its host, the number of ranks that this host has in the
// group, and the number of hosts.
type seat struct{ host, ranks, hosts int }

// combineAll combines one period of each rank: first the ranks of each host in their order, then
// the hosts. seats are the places of the ranks; nil: all are on one host.
func combineAll[T collective.Element](op collective.Op, inputs [][]T, seats []seat) []T {
	if means[T](op) {
		return meanAll(inputs, seats)
	}
	sums := map[int][]T{}
	for rank, in := range inputs {
		host := 0
		if seats != nil {
			host = seats[rank].host
		}
		sums[host] = combineVectors(op, sums[host], in)
	}
	var out []T
	for _, host := range slices.Sorted(maps.Keys(sums)) {
		out = combineVectors(op, out, sums[host])
	}
	if op == collective.Average {
		for i := range out {
			out[i] = divide(out[i], len(inputs))
		}
	}
	return out
}

// means reports whether sums are computed in float32, and the mean is rounded.
func means[T collective.Element](op collective.Op) bool {
	return op == collective.Average && floats[T]() && unsafe.Sizeof(*new(T)) == 2
}

// meanAll is like combineAll, for reductions for which means returns true. If there are several
// hosts, the sum of each host is rounded too.
func meanAll[T collective.Element](inputs [][]T, seats []seat) []T {
	if seats == nil || seats[0].hosts == 1 {
		return quotient[T](sumSingle(inputs, 1), float32(len(inputs)))
	}
	of, ranks := map[int][][]T{}, map[int]int{}
	for rank, s := range seats {
		of[s.host], ranks[s.host] = append(of[s.host], inputs[rank]), s.ranks
	}
	var sum []float32
	for _, host := range slices.Sorted(maps.Keys(of)) {
		fold := foldOf(ranks[host])
		here := sumSingle([][]T{quotient[T](sumSingle(of[host], 1), fold)}, fold)
		if sum == nil {
			sum = here
			continue
		}
		for i := range sum {
			sum[i] += here[i]
		}
	}
	return quotient[T](sum, float32(len(inputs)))
}

// foldOf returns the smallest power of two that is not less than n.
func foldOf(n int) float32 {
	fold := 1
	for fold < n {
		fold *= 2
	}
	return float32(fold)
}

// sumSingle returns the sum of vectors in float32, times a factor.
func sumSingle[T collective.Element](vectors [][]T, by float32) []float32 {
	sum := make([]float32, len(vectors[0]))
	for k, v := range vectors {
		for i := range sum {
			if x := float32(toFloat(v[i])) * by; k == 0 {
				sum[i] = x
			} else {
				sum[i] += x
			}
		}
	}
	return sum
}

func quotient[T collective.Element](sum []float32, by float32) []T {
	out := make([]T, len(sum))
	for i, v := range sum {
		out[i] = fromFloat[T](float64(v / by))
	}
	return out
}

// combineVectors returns a combined with b; b if a is nil.
func combineVectors[T collective.Element](op collective.Op, a, b []T) []T {
	out := slices.Clone(b)
	if a != nil {
		for i := range out {
			out[i] = combineTwo(op, a[i], b[i])
		}
	}
	return out
}

// memory returns the bytes of a slice.
func memory[T collective.Element](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), len(data)*int(unsafe.Sizeof(data[0])))
}

// differs returns the first element of data that differs from the repeated period, from a position
// in it; −1: none.
func differs[T collective.Element](data, one []T, at int) int {
	block := make([]T, min(len(data)+period, 64*period))
	fill(block, one)
	for done := 0; done < len(data); {
		phase := (at + done) % period
		n := min(len(data)-done, len(block)-phase)
		if part := data[done : done+n]; !bytes.Equal(memory(part), memory(block[phase:phase+n])) {
			for i := range part {
				if !bytes.Equal(memory(part[i:i+1]), memory(block[phase+i:phase+i+1])) {
					return done + i
				}
			}
		}
		done += n
	}
	return -1
}

// far returns the first element whose distance from the repeated period exceeds a fraction of the
// largest value, including partial results; −1: none.
func far[T collective.Element](data []T, one []float64, part, largest float64) int {
	for _, v := range one {
		largest = max(largest, math.Abs(v))
	}
	for i, v := range data {
		if !(math.Abs(toFloat(v)-one[i%len(one)]) <= part*largest) {
			return i
		}
	}
	return -1
}

// precision returns the largest relative error of one rounding.
func precision[T collective.Element]() float64 {
	switch any(*new(T)).(type) {
	case float64:
		return 1.0 / (1 << 53)
	case collective.Float16:
		return 1.0 / (1 << 11)
	case collective.BFloat16:
		return 1.0 / (1 << 8)
	}
	return 1.0 / (1 << 24)
}

// precisions are the precisions of the types of compressed operations.
var precisions = map[string]float64{"float16": precision[collective.Float16](), "bfloat16": precision[collective.BFloat16]()}

// sumAll returns the sum or average of one period of each rank in float64.
func sumAll[T collective.Element](inputs [][]T, average bool) []float64 {
	out := make([]float64, period)
	for _, in := range inputs {
		for i := range out {
			out[i] += toFloat(in[i])
		}
	}
	if average {
		for i := range out {
			out[i] /= float64(len(inputs))
		}
	}
	return out
}

// adasumAll evaluates the formula over the tree of any number of ranks.
func adasumAll(vectors [][]float64) []float64 {
	n, power := len(vectors), 1
	for 2*power <= n {
		power *= 2
	}
	var level [][]float64
	for i := 0; i < n; i++ {
		if i < 2*(n-power) {
			level = append(level, adasumTwo(vectors[i], vectors[i+1]))
			i++
			continue
		}
		level = append(level, vectors[i])
	}
	for len(level) > 1 {
		var next [][]float64
		for i := 0; i < len(level); i += 2 {
			next = append(next, adasumTwo(level[i], level[i+1]))
		}
		level = next
	}
	return level[0]
}

func adasumTwo(a, b []float64) []float64 {
	var ab, aa, bb float64
	for i := range a {
		ab, aa, bb = ab+a[i]*b[i], aa+a[i]*a[i], bb+b[i]*b[i]
	}
	share := func(square float64) float64 {
		if square == 0 {
			return 1
		}
		return 1 - ab/(2*square)
	}
	p, q := share(aa), share(bb)
	out := make([]float64, len(a))
	for i := range a {
		out[i] = p*a[i] + q*b[i]
	}
	return out
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digest returns a hash that distinguishes results of several ranks.
func digest[T collective.Element](sum uint32, data []T) uint32 {
	return crc32.Update(sum, castagnoli, memory(data))
}
