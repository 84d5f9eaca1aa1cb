package network

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// TestGradient compares every gradient with the difference quotient of the loss.
func TestGradient(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	set := new(dataset.Images)
	for label := range uint8(6) {
		image := make([]float32, dataset.Pixels)
		for i := range image {
			image[i] = random.Float32() - 0.5 // no pixel is always 0, unlike in the digits, and every unit is active for some images
		}
		set.Add(image, label)
	}
	m := New(5, 3)
	batch := []int{0, 3, 5, 3} // with a duplicate
	grad, scratch := make([]float32, len(m.Params)), make([]float32, len(m.Params))
	m.Gradient(grad, set, batch)

	const h = 1e-3 // rounding errors of float32 dominate with a much smaller step
	wrong, flat := 0, 0
	for i, p := range m.Params {
		m.Params[i] = p + h
		up := m.Gradient(scratch, set, batch)
		m.Params[i] = p - h
		down := m.Gradient(scratch, set, batch)
		m.Params[i] = p
		want := float64(up-down) / (2 * h)
		if math.Abs(want-float64(grad[i])) > 2e-3+1e-2*math.Abs(want) {
			wrong++
			t.Logf("parameter %d: gradient %v, difference quotient %v", i, grad[i], want)
		}
		if grad[i] == 0 {
			flat++
		}
	}
	// Within h of a kink of ReLU the quotient is a mean of two slopes; nearly all parameters are
	// farther from one.
	if wrong > len(m.Params)/100 {
		t.Errorf("%d of %d gradients are wrong", wrong, len(m.Params))
	}
	if flat > len(m.Params)/2 {
		t.Errorf("%d of %d gradients are zero: nothing was tested", flat, len(m.Params))
	}
}

func TestGradientIsAMeanOverTheBatch(t *testing.T) {
	set, _, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	m := New(8, 1)
	a, b, both := make([]float32, len(m.Params)), make([]float32, len(m.Params)), make([]float32, len(m.Params))
	lossA, lossB := m.Gradient(a, set, []int{1}), m.Gradient(b, set, []int{2})
	loss := m.Gradient(both, set, []int{1, 2})
	if d := math.Abs(float64(loss - (lossA+lossB)/2)); d > 1e-6 {
		t.Errorf("loss of both differs from the mean by %v", d)
	}
	for i := range both {
		if d := math.Abs(float64(both[i] - (a[i]+b[i])/2)); d > 1e-6 {
			t.Fatalf("gradient %d of both differs from the mean by %v", i, d)
		}
	}
}

func TestGradientOfAnEmptyBatchIsZero(t *testing.T) {
	m := New(2, 1)
	grad := make([]float32, len(m.Params))
	if loss := m.Gradient(grad, new(dataset.Images), nil); loss != 0 {
		t.Errorf("loss %v", loss)
	}
	for i, g := range grad {
		if g != 0 {
			t.Errorf("gradient %d is %v", i, g)
		}
	}
}

func TestSoftmaxLossOfLargeLogitsIsFinite(t *testing.T) {
	logits := [dataset.Classes]float32{0: 1000, 1: -1000}
	if loss := softmaxLoss(&logits, 1); loss != 2000 {
		t.Errorf("loss %v, want 2000", loss)
	}
	if logits[0] != 1 || logits[1] != 0 {
		t.Errorf("probabilities %v", logits)
	}
}

func TestDescend(t *testing.T) {
	params, velocity := []float32{1}, []float32{2}
	Descend(params, velocity, []float32{3}, 0.5, 0.25)
	if velocity[0] != 3.5 || params[0] != -0.75 {
		t.Errorf("velocity %v and parameter %v, want 3.5 and -0.75", velocity[0], params[0])
	}
}

func TestModelDependsOnTheSeedAlone(t *testing.T) {
	a, b, c := New(4, 1).Digest(), New(4, 1).Digest(), New(4, 2).Digest()
	if a != b || a == c {
		t.Errorf("digests of seeds 1, 1, 2: %x %x %x", a, b, c)
	}
}
