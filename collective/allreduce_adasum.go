package collective

import (
	"errors"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// adaptive is the sums over two vectors that their adaptive sum needs. Each is kept in two halves,
// of the elements at even and at odd places, for speed; that order is fixed, so that it gives the
// same bits wherever it is computed.
type adaptive struct{ ab, aa, bb [2]float64 }

// adaptiveOf adds the elements of two vectors, or of further parts of them. All parts but the last
// have an even length.
func adaptiveOf[T float32 | float64](s *adaptive, a, b []T) {
	ab0, aa0, bb0, ab1, aa1, bb1 := s.ab[0], s.aa[0], s.bb[0], s.ab[1], s.aa[1], s.bb[1]
	b = b[:len(a)]
	for ; len(a) >= 2 && len(b) >= 2; a, b = a[2:], b[2:] {
		x0, y0, x1, y1 := float64(a[0]), float64(b[0]), float64(a[1]), float64(b[1])
		ab0 += float64(x0 * y0) // the conversions forbid to round product and sum at once, as some machines would
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
	s.ab, s.aa, s.bb = [2]float64{ab0, ab1}, [2]float64{aa0, aa1}, [2]float64{bb0, bb1}
}

// shares are what of each vector goes into the sum: half of both where they point the same way and
// are of one length, all of both where they are orthogonal. Of a vector of zeros it does not
// matter.
func (s *adaptive) shares() (ofA, ofB float64) {
	ab, aa, bb := s.ab[0]+s.ab[1], s.aa[0]+s.aa[1], s.bb[0]+s.bb[1]
	ofA, ofB = 1, 1
	if aa != 0 {
		ofA = 1 - ab/(2*aa)
	}
	if bb != 0 {
		ofB = 1 - ab/(2*bb)
	}
	return ofA, ofB
}

func adaptiveSum[T float32 | float64](dst, a, b []T, ofA, ofB float64) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = T(float64(ofA*float64(a[i])) + float64(ofB*float64(b[i])))
	}
}

const (
	adasumBlock = 512             // elements of 16 bits that are widened at a time
	adasumWork  = 8 * adasumBlock // bytes that adasum works in
)

// adasum sets dst to the adaptive sum of a and b, which have the same length; dst may be one of
// them.
func adasum(t kernel.Type, dst, a, b, work []byte) {
	var s adaptive
	switch t {
	case kernel.Float64:
		adaptiveOf(&s, elements[float64](a), elements[float64](b))
		ofA, ofB := s.shares()
		adaptiveSum(elements[float64](dst), elements[float64](a), elements[float64](b), ofA, ofB)
	case kernel.Float32:
		adaptiveOf(&s, elements[float32](a), elements[float32](b))
		ofA, ofB := s.shares()
		adaptiveSum(elements[float32](dst), elements[float32](a), elements[float32](b), ofA, ofB)
	default:
		adasumHalf(t, dst, a, b, elements[float32](work))
	}
}

// adasumHalf is adasum of 16-bit floats, a block at a time.
func adasumHalf(t kernel.Type, dst, a, b []byte, work []float32) {
	var s adaptive
	for at := 0; at < len(a); at += 2 * adasumBlock {
		x, y := widenBlock(t, a, b, at, work)
		adaptiveOf(&s, x, y)
	}
	ofA, ofB := s.shares()
	for at := 0; at < len(a); at += 2 * adasumBlock {
		x, y := widenBlock(t, a, b, at, work)
		adaptiveSum(x, x, y, ofA, ofB)
		kernel.Narrow(t)(dst[at:at+2*len(x)], bytesOf(x))
	}
}

func widenBlock(t kernel.Type, a, b []byte, at int, work []float32) (x, y []float32) {
	bytes := min(2*adasumBlock, len(a)-at)
	x, y = work[:bytes/2], work[adasumBlock:][:bytes/2]
	kernel.Widen(t)(bytesOf(x), a[at:at+bytes])
	kernel.Widen(t)(bytesOf(y), b[at:at+bytes])
	return x, y
}

// receiveAdasum is receiveCombined for Adasum, which needs all of both vectors at once.
func (c *call) receiveAdasum(peer int, step uint32, data []byte, first int) error {
	memory := c.scratch(adasumWork + len(data))
	work, other := memory[:adasumWork], memory[adasumWork:]
	if err := c.receiveAll(peer, step, other); err != nil {
		return err
	}
	if first != unsent {
		for _, o := range c.outs[first : first+c.frames(len(data))] {
			if err := c.wait(&o.done); err != nil {
				return err
			}
		}
	}
	if peer < c.g.rank {
		adasum(c.desc.dtype, data, other, data, work)
	} else {
		adasum(c.desc.dtype, data, data, other, work)
	}
	return nil
}

var errAdasumParts = errors.New("adasum is for AllReduce: it needs whole vectors")
