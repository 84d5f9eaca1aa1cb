package operation

import "github.com/hvdrun/hvdrun/internal/kernel"

// Products are the sums over two vectors that their adaptive sum needs.
type Products struct{ AB, AA, BB float64 }

// Add adds the products of the next block. All blocks must be added in order, from the first, so
// that the bits do not depend on where the products were computed.
func (p *Products) Add(q Products) {
	p.AB += q.AB
	p.AA += q.AA
	p.BB += q.BB
}

// halves are products in two parts, of the elements at even and at odd indices, for speed.
type halves struct{ AB, AA, BB [2]float64 }

func (s *halves) sum() Products {
	return Products{s.AB[0] + s.AB[1], s.AA[0] + s.AA[1], s.BB[0] + s.BB[1]}
}

// productsOf adds to s the products of the elements of two vectors, or of a part of them. All parts
// but the last have an even length.
func productsOf[T float32 | float64](s *halves, a, b []T) {
	ab0, aa0, bb0, ab1, aa1, bb1 := s.AB[0], s.AA[0], s.BB[0], s.AB[1], s.AA[1], s.BB[1]
	b = b[:len(a)]
	for ; len(a) >= 2 && len(b) >= 2; a, b = a[2:], b[2:] {
		x0, y0, x1, y1 := float64(a[0]), float64(b[0]), float64(a[1]), float64(b[1])
		ab0 += float64(x0 * y0) // the conversions prevent a fused multiply-add
		ab1 += float64(x1 * y1)
		aa0 += float64(x0 * x0)
		aa1 += float64(x1 * x1)
		bb0 += float64(y0 * y0)
		bb1 += float64(y1 * y1)
	}
	if len(a) > 0 {
		x, y := float64(a[0]), float64(b[0])
		ab0 += float64(x * y)
		aa0 += float64(x * x)
		bb0 += float64(y * y)
	}
	s.AB, s.AA, s.BB = [2]float64{ab0, ab1}, [2]float64{aa0, aa1}, [2]float64{bb0, bb1}
}

// Shares returns the factors of both vectors in the sum: one half each if the vectors are equal,
// and 1 if they are orthogonal. The factor of a vector of zeros does not matter.
func (p *Products) Shares() (ofA, ofB float64) {
	ofA, ofB = 1, 1
	if p.AA != 0 {
		ofA = 1 - p.AB/(2*p.AA)
	}
	if p.BB != 0 {
		ofB = 1 - p.AB/(2*p.BB)
	}
	return ofA, ofB
}

// adaptiveSum sets dst to the sum of shares of a and b.
func adaptiveSum[T float32 | float64](dst, a, b []T, ofA, ofB float64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = T(float64(ofA*float64(a[i])) + float64(ofB*float64(b[i])))
	}
}

const (
	AdasumBlock   = 4096              // number of elements of a block, whose products are summed separately
	adasumWidened = 512               // number of 16-bit elements that are widened at a time; divides AdasumBlock
	AdasumWork    = 8 * adasumWidened // bytes of work memory for products and sums of 16-bit floats
)

// AddAdaptively sets dst to the adaptive sum of a and b, which have the same length; dst may be one
// of them, and work has AdasumWork bytes.
func AddAdaptively(t kernel.Type, dst, a, b, work []byte) {
	var all Products
	size := AdasumBlock * t.Size()
	for at := 0; at < len(a); at += size {
		end := min(at+size, len(a))
		all.Add(BlockProducts(t, a[at:end], b[at:end], work))
	}
	ofA, ofB := all.Shares()
	AddShares(t, dst, a, b, ofA, ofB, work)
}

// BlockProducts returns the products of one block; the last block may be shorter.
func BlockProducts(t kernel.Type, a, b, work []byte) Products {
	var s halves
	switch t {
	case kernel.Float64:
		productsOf(&s, kernel.Elements[float64](a), kernel.Elements[float64](b))
	case kernel.Float32:
		productsOf(&s, kernel.Elements[float32](a), kernel.Elements[float32](b))
	default:
		for at := 0; at < len(a); at += 2 * adasumWidened {
			x, y := widenBlock(t, a, b, at, kernel.Elements[float32](work))
			productsOf(&s, x, y)
		}
	}
	return s.sum()
}

// AddShares sets dst to the sum of shares of a and b, or of parts of them.
func AddShares(t kernel.Type, dst, a, b []byte, ofA, ofB float64, work []byte) {
	switch t {
	case kernel.Float64:
		adaptiveSum(kernel.Elements[float64](dst), kernel.Elements[float64](a), kernel.Elements[float64](b), ofA, ofB)
	case kernel.Float32:
		adaptiveSum(kernel.Elements[float32](dst), kernel.Elements[float32](a), kernel.Elements[float32](b), ofA, ofB)
	default:
		for at := 0; at < len(a); at += 2 * adasumWidened {
			x, y := widenBlock(t, a, b, at, kernel.Elements[float32](work))
			adaptiveSum(x, x, y, ofA, ofB)
			kernel.Narrow(t)(dst[at:at+2*len(x)], kernel.Bytes(x))
		}
	}
}

// widenBlock widens up to adasumWidened elements of a and b, from byte at on, into work.
func widenBlock(t kernel.Type, a, b []byte, at int, work []float32) (x, y []float32) {
	bytes := min(2*adasumWidened, len(a)-at)
	x, y = work[:bytes/2], work[adasumWidened:][:bytes/2]
	kernel.Widen(t)(kernel.Bytes(x), a[at:at+bytes])
	kernel.Widen(t)(kernel.Bytes(y), b[at:at+bytes])
	return x, y
}
