package main

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/ptxtest"
)

// plain is the network in plain loops on the CPU.
type plain struct {
	hidden         int
	params         []float32
	active, logits []float32 // of the last batch
}

func (p *plain) layers(of []float32) (w1, b1, w2, b2 []float32) {
	a := p.hidden * dataset.Pixels
	b := a + p.hidden
	c := b + dataset.Classes*p.hidden
	return of[:a], of[a:b], of[b:c], of[c : c+dataset.Classes]
}

func layer(w, bias, x []float32, rows, cols int) []float32 {
	y := make([]float32, 0, len(x)/cols*rows)
	for i := 0; i < len(x)/cols; i++ {
		for r := range rows {
			sum := bias[r]
			for c := range cols {
				sum += float32(w[r*cols+c] * x[i*cols+c])
			}
			y = append(y, sum)
		}
	}
	return y
}

// pass returns the gradient of the mean loss over the batch, followed by that loss.
func (p *plain) pass(set *dataset.Images, batch []int) []float32 {
	const classes, pixels = dataset.Classes, dataset.Pixels
	var x []float32
	for _, i := range batch {
		x = append(x, set.Image(i)...)
	}
	w1, b1, w2, b2 := p.layers(p.params)
	p.active = layer(w1, b1, x, p.hidden, pixels)
	for i, a := range p.active {
		p.active[i] = max(a, 0)
	}
	p.logits = layer(w2, b2, p.active, classes, p.hidden)
	grad := make([]float32, len(p.params)+1)
	g1, gb1, g2, gb2 := p.layers(grad)
	share := 1 / float32(len(batch))
	for i, at := range batch {
		z, active := p.logits[i*classes:(i+1)*classes], p.active[i*p.hidden:(i+1)*p.hidden]
		top, sum := z[0], float64(0)
		for _, v := range z {
			top = max(top, v)
		}
		for _, v := range z {
			sum += math.Exp(float64(v - top))
		}
		label := int(set.Labels[at])
		grad[len(grad)-1] += share * float32(float64(top-z[label])+math.Log(sum))
		back := make([]float32, p.hidden)
		for k := range z {
			d := share * float32(math.Exp(float64(z[k]-top))/sum)
			if k == label {
				d -= share
			}
			gb2[k] += d
			for j, a := range active {
				g2[k*p.hidden+j] += float32(d * a)
				back[j] += float32(d * w2[k*p.hidden+j])
			}
		}
		for j, a := range active {
			if a > 0 {
				gb1[j] += back[j]
				for c, v := range x[i*pixels : (i+1)*pixels] {
					g1[j*pixels+c] += float32(back[j] * v)
				}
			}
		}
	}
	return grad
}

func near(t *testing.T, what string, got, want []float32) {
	t.Helper()
	nonzero := 0
	for i, w := range want {
		if d := math.Abs(float64(got[i] - w)); !(d <= 1e-6+1e-5*math.Abs(float64(w))) {
			t.Fatalf("%s: number %d is %v, want %v", what, i, got[i], w)
		}
		if w != 0 {
			nonzero++
		}
	}
	if nonzero < len(want)/3 {
		t.Errorf("%s: %d of %d numbers are zero: nothing was tested", what, len(want)-nonzero, len(want))
	}
}

// noise returns images in which, unlike the digits, no pixel is always 0 and every unit is active
// for some images.
func noise(n int) *dataset.Images {
	random := rand.New(rand.NewPCG(1, 2))
	set := new(dataset.Images)
	for label := range n {
		image := make([]float32, dataset.Pixels)
		for i := range image {
			image[i] = random.Float32() - 0.5
		}
		set.Add(image, uint8(label%dataset.Classes))
	}
	return set
}

func device(t *testing.T) *cuda.Device {
	t.Helper()
	d, err := cuda.Open(cuda.Config{Library: cudatest.Library(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func values(t *testing.T, s *cuda.Slice[float32]) []float32 {
	t.Helper()
	v := make([]float32, s.Len())
	if err := s.CopyTo(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	return v
}

// TestPass: the gradients and the loss on the device equal those of plain loops, and a step reduces
// the loss.
func TestPass(t *testing.T) {
	d := device(t)
	for _, c := range []struct {
		hidden int
		batch  []int
	}{{2, []int{3, 1, 8}}, {5, []int{0, 3, 5, 3}}, {24, []int{7, 6, 5, 4, 3, 2, 1, 0, 9}}} {
		m, err := newNetwork(t.Context(), d, c.hidden, 9, 3)
		if err != nil {
			t.Fatal(err)
		}
		images := noise(10)
		from, err := m.load(t.Context(), images)
		if err != nil {
			t.Fatal(err)
		}
		p := &plain{hidden: c.hidden, params: values(t, m.params)}
		got, velocity := make([]float32, m.grad.Len()), make([]float32, len(p.params))
		for range 3 {
			want := p.pass(images, c.batch)
			if err := m.gradientOf(t.Context(), from, c.batch, got); err != nil {
				t.Fatal(err)
			}
			near(t, "gradient and loss", got, want)
			if err := m.step(t.Context(), want, 0.1, momentum); err != nil {
				t.Fatal(err)
			}
			for i := range velocity {
				velocity[i] = momentum*velocity[i] + want[i]
				p.params[i] -= 0.1 * velocity[i]
			}
			near(t, "parameters", values(t, m.params), p.params)
			p.params = values(t, m.params)
		}
		if m.forward(t.Context(), from, nil) == nil || m.forward(t.Context(), from, make([]int, 10)) == nil {
			t.Error("batches that are empty, or too large")
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if free, _, err := d.Memory(); err != nil || free != 3<<32 {
		t.Errorf("%d bytes are free: %v", free, err)
	}
}

// board is memory for kernels that run without a driver.
type board struct{ memory []byte }

const origin = 0x10000

func (b *board) Span(address uint64, n int) []byte {
	if address < origin || address-origin+uint64(n) > uint64(len(b.memory)) {
		return nil
	}
	return b.memory[address-origin:][:n:n]
}

// put returns the address of values in separate memory, so that accesses beyond them fail.
func put[T float32 | int32](b *board, values ...T) uint64 {
	at := origin + uint64(len(b.memory))
	b.memory, _ = binary.Append(b.memory, binary.LittleEndian, values)
	b.memory = append(b.memory, make([]byte, 512-len(b.memory)%256)...)
	return at
}

func (b *board) floats(at uint64, n int) []float32 {
	v := make([]float32, n)
	binary.Decode(b.memory[at-origin:], binary.LittleEndian, v)
	return v
}

// TestKernels: the results of each kernel in the interpreter of its PTX.
func TestKernels(t *testing.T) {
	module, err := ptxtest.Parse(kernels)
	if err != nil {
		t.Fatal(err)
	}
	const hidden, n, classes, pixels = 6, 4, dataset.Classes, dataset.Pixels
	images, random := noise(7), rand.New(rand.NewPCG(5, 6))
	batch := []int{6, 0, 3, 0}
	p := &plain{hidden: hidden, params: make([]float32, hidden*(pixels+1)+classes*(hidden+1))}
	for i := range p.params {
		p.params[i] = float32(random.NormFloat64() / 4)
	}
	want := p.pass(images, batch)
	g1, gb1, g2, gb2 := p.layers(want)
	w1, b1, w2, b2 := p.layers(p.params)

	b := &board{}
	run := func(name string, threads int, args ...any) {
		t.Helper()
		var each [][]byte
		for _, a := range args {
			raw, err := binary.Append(nil, binary.LittleEndian, a)
			if err != nil {
				t.Fatal(err)
			}
			each = append(each, raw)
		}
		k := module.Kernels[name]
		if err := k.Run(b, k.Pack(each...), (threads+31)/32, 32); err != nil {
			t.Fatal(err)
		}
	}
	room := func(n int) uint64 { return put(b, make([]float32, n)...) }
	labels, index := make([]int32, images.Len()), make([]int32, n)
	for i, l := range images.Labels {
		labels[i] = int32(l)
	}
	for i, at := range batch {
		index[i] = int32(at)
	}
	x, label, active, logits, loss := room(n*pixels), room(n), room(n*hidden), room(n*classes), room(n)
	back, grads, total, velocity := room(n*hidden), room(len(p.params)), room(1), put(b, make([]float32, len(p.params))...)
	params := put(b, p.params...)

	run("gather", n*pixels, put(b, images.Pixels...), put(b, labels...), put(b, index...), x, label, uint32(n))
	near(t, "gather", b.floats(x, pixels), images.Image(6))
	run("linear", n*hidden, put(b, w1...), put(b, b1...), x, active, uint32(hidden), uint32(pixels), uint32(1), uint32(n))
	near(t, "linear", b.floats(active, n*hidden), p.active)
	run("linear", n*classes, put(b, w2...), put(b, b2...), active, logits, uint32(classes), uint32(hidden), uint32(0), uint32(n))
	near(t, "logits", b.floats(logits, n*classes), p.logits)
	run("softmax", n, logits, label, loss, float32(1)/n, uint32(n))
	run("gradient", 1, loss, x, total, total, uint32(1), uint32(0), uint32(n))
	near(t, "loss", b.floats(total, 1), want[len(want)-1:])
	at := func(offset int) uint64 { return grads + 4*uint64(offset) }
	second := hidden * (pixels + 1)
	run("gradient", classes*(hidden+1), logits, active, at(second), at(second+classes*hidden), uint32(classes), uint32(hidden), uint32(n))
	run("backward", n*hidden, logits, put(b, w2...), active, back, uint32(classes), uint32(hidden), uint32(n))
	run("gradient", second, back, x, at(0), at(hidden*pixels), uint32(hidden), uint32(pixels), uint32(n))
	got1, gotb1, got2, gotb2 := p.layers(b.floats(grads, len(p.params)))
	near(t, "first layer", got1, g1)
	near(t, "first layer's bias", gotb1, gb1)
	near(t, "second layer", got2, g2)
	near(t, "second layer's bias", gotb2, gb2)
	run("descend", len(p.params), params, velocity, grads, float32(0.5), float32(0.25), uint32(len(p.params)))
	near(t, "velocity", b.floats(velocity, len(p.params)), want[:len(p.params)])
	for i := range p.params {
		p.params[i] -= 0.5 * want[i]
	}
	near(t, "parameters", b.floats(params, len(p.params)), p.params)
	if len(module.Kernels) != 6 {
		t.Errorf("%d kernels, of which 6 are tested", len(module.Kernels))
	}
}

// TestAssembled: NVIDIA's assembler, if installed, accepts the kernels.
func TestAssembled(t *testing.T) { cudatest.Assemble(t, kernels) }
