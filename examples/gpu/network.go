package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
)

// kernels contains the network's kernels.
//
//go:embed kernels.ptx
var kernels string

// network is a perceptron of two layers on a device: 64 pixels → hidden units with ReLU → 10
// logits, with softmax and cross-entropy as its loss. All its data is in device memory.
type network struct {
	device *cuda.Device
	stream *cuda.Stream // all kernels run in it
	module *cuda.Module

	gather, linear, softmax, backward, gradient, descend *cuda.Function

	hidden, room int // room: largest number of images in a batch

	// All parameters are in one slice, so that one copy moves all gradients and one Tensor has all
	// parameters: w1 (hidden×64), b1 (hidden), w2 (10×hidden), b2 (10).
	params, velocity *cuda.Slice[float32]
	grad             *cuda.Slice[float32] // of the parameters, followed by the loss

	// Data of the current batch.
	index, label          *cuda.Slice[int32]
	x, active, back, loss *cuda.Slice[float32]
	logits                *cuda.Slice[float32] // later replaced by their gradient

	held []func() error // release functions, in the order of allocation
}

// set is a data set in device memory.
type set struct {
	images *cuda.Slice[float32]
	labels *cuda.Slice[int32]
	n      int
}

// newNetwork returns a network for batches of up to room images, with He-initialized weights that
// depend only on seed.
func newNetwork(ctx context.Context, d *cuda.Device, hidden, room int, seed uint64) (*network, error) {
	m := &network{device: d, hidden: hidden, room: room}
	if err := m.take(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	first := make([]float32, m.params.Len())
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range hidden * dataset.Pixels {
		first[i] = float32(random.NormFloat64() * math.Sqrt(2./dataset.Pixels))
	}
	for i := range dataset.Classes * hidden {
		first[hidden*(dataset.Pixels+1)+i] = float32(random.NormFloat64() * math.Sqrt(2./float64(hidden)))
	}
	if err := m.params.CopyFrom(ctx, first); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// take compiles the kernels and allocates memory.
func (m *network) take() (err error) {
	if m.module, err = m.device.Load(kernels); err != nil {
		return err
	}
	m.held = append(m.held, m.module.Close)
	for name, f := range map[string]**cuda.Function{"gather": &m.gather, "linear": &m.linear, "softmax": &m.softmax,
		"backward": &m.backward, "gradient": &m.gradient, "descend": &m.descend} {
		if *f, err = m.module.Function(name); err != nil {
			return err
		}
	}
	if m.stream, err = m.device.NewStream(); err != nil {
		return err
	}
	m.held = append(m.held, m.stream.Close)
	n := m.hidden*(dataset.Pixels+1) + dataset.Classes*(m.hidden+1)
	return errors.Join(alloc(m, &m.params, n), alloc(m, &m.velocity, n), alloc(m, &m.grad, n+1),
		alloc(m, &m.index, m.room), alloc(m, &m.label, m.room), alloc(m, &m.x, m.room*dataset.Pixels),
		alloc(m, &m.active, m.room*m.hidden), alloc(m, &m.back, m.room*m.hidden), alloc(m, &m.loss, m.room),
		alloc(m, &m.logits, m.room*dataset.Classes))
}

// alloc allocates memory that Close releases.
func alloc[T collective.Element](m *network, s **cuda.Slice[T], n int) error {
	taken, err := cuda.Alloc[T](m.device, n)
	if err == nil {
		*s = taken
		m.held = append(m.held, taken.Free)
	}
	return err
}

// Close releases all resources. No operation may be pending.
func (m *network) Close() error {
	var errs []error
	for _, free := range slices.Backward(m.held) {
		errs = append(errs, free())
	}
	m.held = nil
	return errors.Join(errs...)
}

// load copies images to the device. Close releases them.
func (m *network) load(ctx context.Context, from *dataset.Images) (*set, error) {
	s := &set{n: from.Len()}
	labels := make([]int32, s.n)
	for i, label := range from.Labels {
		labels[i] = int32(label)
	}
	if err := errors.Join(alloc(m, &s.images, len(from.Pixels)), alloc(m, &s.labels, s.n)); err != nil {
		return nil, err
	}
	return s, errors.Join(s.images.CopyFrom(ctx, from.Pixels), s.labels.CopyFrom(ctx, labels))
}

// layers splits a slice with the layout of params.
func (m *network) layers(p *cuda.Slice[float32]) (w1, b1, w2, b2 *cuda.Slice[float32]) {
	a := m.hidden * dataset.Pixels
	b := a + m.hidden
	c := b + dataset.Classes*m.hidden
	return p.Slice(0, a), p.Slice(a, b), p.Slice(b, c), p.Slice(c, c+dataset.Classes)
}

// launch starts a kernel in the network's stream, with the given number of threads.
func (m *network) launch(f *cuda.Function, threads int, args ...any) error {
	return f.Launch(m.stream, cuda.Linear(threads), args...)
}

// forward starts computing the logits of a batch. It returns when the batch's indices are on the
// device. Earlier work in the stream must be complete, because forward overwrites the indices.
func (m *network) forward(ctx context.Context, from *set, batch []int) error {
	if len(batch) == 0 || len(batch) > m.room {
		return fmt.Errorf("gpu: a batch of %d images exceeds the maximum of %d", len(batch), m.room)
	}
	index := make([]int32, len(batch))
	for i, at := range batch {
		index[i] = int32(at)
	}
	if err := m.index.Slice(0, len(batch)).CopyFrom(ctx, index); err != nil {
		return err
	}
	const pixels, classes = uint32(dataset.Pixels), uint32(dataset.Classes)
	n, hidden := uint32(len(batch)), uint32(m.hidden)
	w1, b1, w2, b2 := m.layers(m.params)
	return errors.Join(
		m.launch(m.gather, len(batch)*dataset.Pixels, from.images, from.labels, m.index, m.x, m.label, n),
		m.launch(m.linear, len(batch)*m.hidden, w1, b1, m.x, m.active, hidden, pixels, uint32(1), n),
		m.launch(m.linear, len(batch)*dataset.Classes, w2, b2, m.active, m.logits, classes, hidden, uint32(0), n))
}

// pass starts computing the gradient of the mean loss over the batch, and that loss, into grad.
func (m *network) pass(ctx context.Context, from *set, batch []int) error {
	if err := m.forward(ctx, from, batch); err != nil {
		return err
	}
	const pixels, classes = uint32(dataset.Pixels), uint32(dataset.Classes)
	n, hidden := uint32(len(batch)), uint32(m.hidden)
	_, _, w2, _ := m.layers(m.params)
	g1, gb1, g2, gb2 := m.layers(m.grad)
	total := m.grad.Slice(m.grad.Len()-1, m.grad.Len())
	return errors.Join(
		m.launch(m.softmax, len(batch), m.logits, m.label, m.loss, 1/float32(len(batch)), n),
		m.launch(m.gradient, 1, m.loss, m.x, total, total, uint32(1), uint32(0), n),
		m.launch(m.gradient, dataset.Classes*(m.hidden+1), m.logits, m.active, g2, gb2, classes, hidden, n),
		m.launch(m.backward, len(batch)*m.hidden, m.logits, w2, m.active, m.back, classes, hidden, n),
		m.launch(m.gradient, m.hidden*(dataset.Pixels+1), m.back, m.x, g1, gb1, hidden, pixels, n))
}

// gradientOf copies the gradient of the mean loss over the batch, and that loss, from the device.
func (m *network) gradientOf(ctx context.Context, from *set, batch []int, to []float32) error {
	if err := m.pass(ctx, from, batch); err != nil {
		return err
	}
	if err := m.stream.Synchronize(ctx); err != nil {
		return err
	}
	return m.grad.CopyTo(ctx, to)
}

// step descends along a gradient that is followed by a loss, in the layout that pass writes. When
// it returns nil, the device has completed the step.
func (m *network) step(ctx context.Context, gradient []float32, rate, momentum float32) error {
	if err := m.grad.CopyFrom(ctx, gradient); err != nil {
		return err
	}
	n := m.params.Len()
	if err := m.launch(m.descend, n, m.params, m.velocity, m.grad, rate, momentum, uint32(n)); err != nil {
		return err
	}
	return m.stream.Synchronize(ctx)
}

// accuracy returns the fraction of the set's images, 0..1, whose label has the highest logit.
func (m *network) accuracy(ctx context.Context, from *set) (float64, error) {
	right, logits, labels := 0, make([]float32, m.room*dataset.Classes), make([]int32, m.room)
	for at := 0; at < from.n; at += m.room {
		var batch []int
		for i := at; i < min(at+m.room, from.n); i++ {
			batch = append(batch, i)
		}
		if err := m.forward(ctx, from, batch); err != nil {
			return 0, err
		}
		if err := errors.Join(m.stream.Synchronize(ctx), m.logits.CopyTo(ctx, logits), m.label.CopyTo(ctx, labels)); err != nil {
			return 0, err
		}
		for i := range batch {
			of := logits[i*dataset.Classes : (i+1)*dataset.Classes]
			if slices.Index(of, slices.Max(of)) == int(labels[i]) {
				right++
			}
		}
	}
	return float64(right) / float64(from.n), nil
}

// digest returns a hash of the bits of the parameters.
func (m *network) digest(ctx context.Context) (uint64, error) {
	params := make([]float32, m.params.Len())
	if err := m.params.CopyTo(ctx, params); err != nil {
		return 0, err
	}
	h := fnv.New64a()
	h.Write(unsafe.Slice((*byte)(unsafe.Pointer(&params[0])), 4*len(params)))
	return h.Sum64(), nil
}
