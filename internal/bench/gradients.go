package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/gradient"
)

// maxLayers is the number of layers of the model of Gradients. A tensor with fewer elements has one
// layer for each.
const maxLayers = 32

// seat is the worker that an averager needs.
type seat struct{ group *collective.Group }

// Group implements gradient.Worker.
func (s seat) Group() *collective.Group { return s.group }

// model simulates a model whose backward pass runs on a device while the processor waits.
type model struct {
	averager *gradient.Averager[float32]
	layer    time.Duration // duration of each layer
}

// paced returns the duration of a layer of Gradients: all layers together take as long as one
// AllReduce of the whole tensor, by the median of several. It is the same on all ranks.
func (m *meter) paced(size int) (time.Duration, error) {
	data, err := m.tensor(AllReduce, size/4)
	if err != nil {
		return 0, err
	}
	defer collective.Free(data)
	var took []time.Duration
	for range minSamples {
		begun := time.Since(m.clock)
		if err := collective.AllReduce(m.ctx, m.group, data, collective.Sum); err != nil {
			return 0, err
		}
		took = append(took, time.Since(m.clock)-begun)
	}
	if err := collective.AllReduce(m.ctx, m.group, took, collective.Max); err != nil {
		return 0, err
	}
	slices.Sort(took)
	return took[len(took)/2] / time.Duration(min(maxLayers, len(data))), nil
}

// newModel returns a model with n weights.
func (m *meter) newModel(n int) *model {
	layers := min(maxLayers, n)
	lengths := make([]int, layers)
	for i := range lengths {
		lengths[i] = n*(i+1)/layers - n*i/layers
	}
	options := gradient.Options{Name: "bench", Bucket: m.spec.Bucket}
	return &model{averager: gradient.NewAverager[float32](seat{m.group}, options, lengths...), layer: m.layer}
}

// backward computes the layers from the last to the first.
func (m *model) backward(done func(layer int)) {
	due := time.Now()
	for l := m.averager.Len() - 1; l >= 0; l-- {
		due = due.Add(m.layer)
		if wait := time.Until(due); wait > 0 {
			<-time.After(wait)
		}
		done(l)
	}
}

// pass runs a backward pass. If fill is not nil, it sets the gradients of each layer. Each layer is
// ready as soon as it is computed.
func (t *trial) pass(fill func(layer []float32, at int)) error {
	a := t.model.averager
	at := len(t.data)
	_, err := a.Pass(t.ctx, func() error {
		t.model.backward(func(l int) {
			at -= len(a.Tensor(l))
			if fill != nil {
				fill(a.Tensor(l), at)
			}
			a.Ready(l)
		})
		return nil
	})
	return err
}

// passAndReduce runs a backward pass and then one AllReduce.
func (t *trial) passAndReduce() error {
	clear(t.data) // as the averager does
	t.model.backward(func(int) {})
	return collective.AllReduce(t.ctx, t.group, t.data, collective.Average)
}

// verifyPass checks the averages of one pass.
func (t *trial) verifyPass() error {
	n := t.group.Size()
	err := t.pass(func(layer []float32, at int) {
		for i := range layer {
			layer[i] = sample(t.group.Rank(), at+i)
		}
	})
	for l, at := 0, 0; err == nil && l < t.model.averager.Len(); l++ {
		for i, v := range t.model.averager.Tensor(l) {
			if want := sum(n, at+i) / float32(n); v < want*(1-1e-6) || v > want*(1+1e-6) {
				return fmt.Errorf("the result is wrong: element %d is %g, not %g", at+i, v, want)
			}
		}
		at += len(t.model.averager.Tensor(l))
	}
	return err
}
