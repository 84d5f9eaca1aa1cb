// Package network is a small neural network for images of digits.
package network

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"math/rand/v2"

	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// Model is a perceptron of two layers: 64 pixels → hidden units with ReLU → 10 logits, with softmax
// and cross-entropy as its loss.
//
// All parameters are in one slice, so that one AllReduce averages all gradients and one Tensor is
// the whole state.
type Model struct {
	hidden int
	Params []float32 // w1 (hidden×64), b1 (hidden), w2 (10×hidden), b2 (10)

	// Results of the forward pass that the backward pass uses.
	activation []float32                // of the hidden units
	logits     [dataset.Classes]float32 // replaced by probabilities in softmaxLoss
	back       []float32                // gradient of the loss with respect to the hidden units
}

// New returns a model with He-initialized weights that depend only on seed.
func New(hidden int, seed uint64) *Model {
	m := &Model{
		hidden:     hidden,
		Params:     make([]float32, hidden*dataset.Pixels+hidden+dataset.Classes*hidden+dataset.Classes),
		activation: make([]float32, hidden),
		back:       make([]float32, hidden),
	}
	random := rand.New(rand.NewPCG(seed, 0))
	w1, _, w2, _ := m.layers(m.Params)
	for i := range w1 {
		w1[i] = float32(random.NormFloat64() * math.Sqrt(2./dataset.Pixels))
	}
	for i := range w2 {
		w2[i] = float32(random.NormFloat64() * math.Sqrt(2./float64(hidden)))
	}
	return m
}

// layers splits a slice with the layout of Params.
func (m *Model) layers(p []float32) (w1, b1, w2, b2 []float32) {
	w1, p = p[:m.hidden*dataset.Pixels], p[m.hidden*dataset.Pixels:]
	b1, p = p[:m.hidden], p[m.hidden:]
	return w1, b1, p[:dataset.Classes*m.hidden], p[dataset.Classes*m.hidden:]
}

// forward computes the activations and logits of one image.
func (m *Model) forward(image []float32) {
	w1, b1, w2, b2 := m.layers(m.Params)
	for j := range m.hidden {
		m.activation[j] = max(0, b1[j]+dot(w1[j*dataset.Pixels:(j+1)*dataset.Pixels], image))
	}
	for k := range m.logits {
		m.logits[k] = b2[k] + dot(w2[k*m.hidden:(k+1)*m.hidden], m.activation)
	}
}

// Gradient adds the gradient of the mean loss over the batch to grad, which has the layout of
// Params, and returns that loss; both are zero for an empty batch.
func (m *Model) Gradient(grad []float32, set *dataset.Images, batch []int) (loss float32) {
	share := 1 / float32(len(batch))
	for _, i := range batch {
		m.forward(set.Image(i))
		loss += share * softmaxLoss(&m.logits, set.Labels[i])
		m.backward(grad, set.Image(i), set.Labels[i], share)
	}
	return loss
}

// backward adds share × the gradient of one image to grad. Its forward pass and softmax must
// precede.
func (m *Model) backward(grad, image []float32, label uint8, share float32) {
	_, _, w2, _ := m.layers(m.Params)
	g1, gb1, g2, gb2 := m.layers(grad)
	clear(m.back)
	for k, p := range m.logits {
		d := share * p // gradient of softmax and cross-entropy: probability − 1 for the label, probability for the others
		if k == int(label) {
			d -= share
		}
		gb2[k] += d
		addScaled(g2[k*m.hidden:(k+1)*m.hidden], d, m.activation)
		addScaled(m.back, d, w2[k*m.hidden:(k+1)*m.hidden])
	}
	for j, a := range m.activation {
		if a > 0 { // otherwise the gradient of ReLU is zero
			gb1[j] += m.back[j]
			addScaled(g1[j*dataset.Pixels:(j+1)*dataset.Pixels], m.back[j], image)
		}
	}
}

// Accuracy returns the fraction of the set's images, 0..1, whose label has the highest logit.
func (m *Model) Accuracy(set *dataset.Images) float64 {
	right := 0
	for i, label := range set.Labels {
		m.forward(set.Image(i))
		best := 0
		for k, l := range m.logits {
			if l > m.logits[best] {
				best = k
			}
		}
		if best == int(label) {
			right++
		}
	}
	return float64(right) / float64(set.Len())
}

// Digest returns a hash of the bits of the parameters.
func (m *Model) Digest() uint64 {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, m.Params) // a hash never fails
	return h.Sum64()
}

// Descend makes one step of stochastic gradient descent with momentum.
func Descend(params, velocity, grad []float32, rate, momentum float32) {
	for i, g := range grad {
		velocity[i] = momentum*velocity[i] + g
		params[i] -= rate * velocity[i]
	}
}

// softmaxLoss replaces logits by probabilities and returns the cross-entropy with the label.
func softmaxLoss(logits *[dataset.Classes]float32, label uint8) float32 {
	top := logits[0]
	for _, l := range logits {
		top = max(top, l)
	}
	var sum float32
	loss := top - logits[label]
	for k, l := range logits {
		logits[k] = float32(math.Exp(float64(l - top)))
		sum += logits[k]
	}
	for k := range logits {
		logits[k] /= sum
	}
	return loss + float32(math.Log(float64(sum)))
}

func dot(a, b []float32) (sum float32) {
	for i, x := range a {
		sum += x * b[i]
	}
	return sum
}

// addScaled adds factor × x to y.
func addScaled(y []float32, factor float32, x []float32) {
	for i, v := range x {
		y[i] += factor * v
	}
}
