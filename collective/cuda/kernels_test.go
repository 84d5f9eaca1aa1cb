package cuda

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

var combinations = []collective.Op{collective.Sum, collective.Min, collective.Max, collective.Product, collective.Average}

var reductions = map[collective.Op]kernel.Op{collective.Sum: kernel.Sum, collective.Average: kernel.Sum,
	collective.Min: kernel.Min, collective.Max: kernel.Max, collective.Product: kernel.Product}

// specials returns the bits of values at the limits of a type's arithmetic.
func specials(t kernel.Type) []uint64 {
	var all []uint64
	exponent := map[kernel.Type]int{kernel.Float32: 8, kernel.Float64: 11, kernel.Float16: 5, kernel.BFloat16: 8}[t]
	width := t.Size() * 8
	if exponent == 0 {
		for _, v := range []uint64{0, 1, 2, 3, 7, 1 << (width / 2), 1<<(width/2) - 1, 1 << (width - 1), 1<<(width-1) - 1, 0x5555555555555555} {
			all = append(all, v, -v, v+1, ^v)
		}
		return all
	}
	fraction := width - 1 - exponent
	ones := uint64(1)<<fraction - 1
	for _, e := range []uint64{0, 1, 2, 1<<(exponent-1) - 2, 1<<(exponent-1) - 1, 1 << (exponent - 1), 1<<exponent - 3, 1<<exponent - 2, 1<<exponent - 1} {
		for _, f := range []uint64{0, 1, 2, ones, ones - 1, ones >> 1, ones>>1 + 1, ones >> 1 & 0x5555555555555555} {
			all = append(all, e<<fraction|f, e<<fraction|f|1<<(width-1))
		}
	}
	return all
}

func appendBits(b []byte, t kernel.Type, bits uint64) []byte {
	return append(b, binary.LittleEndian.AppendUint64(nil, bits)[:t.Size()]...)
}

// fill returns n elements, of which about half are special.
func fill(r *rand.Rand, t kernel.Type, n int) []byte {
	special := specials(t)
	var b []byte
	for range n {
		v := r.Uint64()
		if r.IntN(2) == 0 {
			v = special[r.IntN(len(special))]
		}
		b = appendBits(b, t, v)
	}
	return b
}

func differ(t kernel.Type, got, want []byte) string {
	for i := 0; i < len(want); i += t.Size() {
		if !bytes.Equal(got[i:i+t.Size()], want[i:i+t.Size()]) {
			return fmt.Sprintf("element %d of %d is %x, want %x (bytes)", i/t.Size(), len(want)/t.Size(), got[i:i+t.Size()], want[i:i+t.Size()])
		}
	}
	return ""
}

// bench is a device with room for some vectors. The test reads and writes their bytes directly.
type bench struct {
	driver *driver
	device *Device
	stream *Stream
	base   uint64
	memory []byte
}

func newBench(t *testing.T, bytes int) *bench {
	b := &bench{driver: newNode(t).process()}
	b.device = open(t, b.driver, Config{})
	room, err := Alloc[byte](b.device, bytes)
	if err != nil {
		t.Fatal(err)
	}
	if b.stream, err = b.device.NewStream(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.stream.Close(); room.Free() })
	b.base, b.memory = room.Address(), b.driver.Span(room.Address(), bytes)
	return b
}

// run launches a kernel and waits for it.
func (b *bench) run(t *testing.T, op string, typ kernel.Type, a *arguments) {
	t.Helper()
	if err := b.device.do(func() error { return b.device.launch(b.stream.handle, op, typ, a) }); err != nil {
		t.Fatal(err)
	}
	if err := b.stream.Synchronize(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func eachKernel(t *testing.T, f func(t *testing.T, typ kernel.Type, op collective.Op)) {
	for typ := kernel.Float32; typ < kernel.Types; typ++ {
		if hasKernels(typ) {
			for _, op := range combinations {
				t.Run(fmt.Sprintf("%v/%v", op, typ), func(t *testing.T) { f(t, typ, op) })
			}
		}
	}
}

// reduce returns the expected result of the kernel for this number of vectors.
func reduce(typ kernel.Type, op collective.Op, vectors [][]byte) []byte {
	want := slices.Clone(vectors[0])
	if op == collective.Average && kernel.Narrow(typ) != nil {
		kernel.Mean(typ, want, vectors, nil, len(vectors))
		return want
	}
	for _, v := range vectors[1:] {
		kernel.Combine(typ, reductions[op])(want, want, v)
	}
	if op == collective.Average {
		kernel.Divide(typ)(want, len(vectors))
	}
	return want
}

// TestSpecialValues: combinations of each special value with each other, and with random values,
// have the bits of the processor's kernels.
func TestSpecialValues(t *testing.T) {
	b := newBench(t, 3<<18)
	eachKernel(t, func(t *testing.T, typ kernel.Type, op collective.Op) {
		r := rand.New(rand.NewPCG(1, uint64(typ)))
		special := specials(typ)
		var x, y []byte
		for _, v := range special {
			for _, i := range r.Perm(len(special))[:min(40, len(special))] {
				x, y = appendBits(x, typ, v), appendBits(y, typ, special[i])
			}
			for _, w := range []uint64{v, 0, r.Uint64(), r.Uint64()} {
				x, y = appendBits(x, typ, v), appendBits(y, typ, w)
			}
		}
		n := len(x)
		copy(b.memory, x)
		copy(b.memory[1<<18:], y)
		args := over(typ, n/typ.Size(), []uint64{b.base + 2<<18}, b.base, b.base+1<<18)
		args.number = divisor(typ, 2)
		b.run(t, combination(op), typ, args)
		if d := differ(typ, b.memory[2<<18:][:n], reduce(typ, op, [][]byte{x, y})); d != "" {
			t.Error(d)
		}
	})
}

// TestLengthsAndOffsets tests every short length at every offset, for one to five vectors, all of
// which are also targets. Bytes beside the vectors do not change.
func TestLengthsAndOffsets(t *testing.T) {
	const room = 1 << 10
	b := newBench(t, 5*room)
	eachKernel(t, func(t *testing.T, typ kernel.Type, op collective.Op) {
		r := rand.New(rand.NewPCG(2, uint64(typ)))
		for n := 1; n < 40; n += 1 + r.IntN(3) {
			places := 1 + r.IntN(5)
			together := r.IntN(3) > 0
			offset := r.IntN(16 / typ.Size())
			copy(b.memory, fill(r, typ, len(b.memory)/typ.Size()))
			want := slices.Clone(b.memory)
			var at []uint64
			var vectors [][]byte
			for i := range places {
				if !together {
					offset = r.IntN(16 / typ.Size())
				}
				from := i*room + 64 + offset*typ.Size()
				at = append(at, b.base+uint64(from))
				vectors = append(vectors, want[from:][:n*typ.Size()])
			}
			sum := reduce(typ, op, vectors)
			for _, v := range vectors {
				copy(v, sum)
			}
			args := over(typ, n, at, at...)
			args.number = divisor(typ, places)
			if together && args.vectors != uint64((n-int(args.head))*typ.Size()/16) || args.rest+args.vectors*16/uint64(typ.Size()) != uint64(n) {
				t.Fatalf("%d elements: %+v", n, args)
			}
			b.run(t, combination(op), typ, args)
			if d := differ(typ, b.memory, want); d != "" {
				t.Fatalf("%d elements of %d vectors: %s", n, places, d)
			}
		}
	})
}

// TestScale: scaling by various factors has the bits of the processor's kernels.
func TestScale(t *testing.T) {
	b := newBench(t, 1<<14)
	for typ := kernel.Float32; typ < kernel.Types; typ++ {
		if !hasKernels(typ) {
			continue
		}
		r := rand.New(rand.NewPCG(3, uint64(typ)))
		for _, factor := range []float64{0, -1, 0.5, 1.0 / 3, -2.5, 1e10, 1e300, 1e-300, math.Inf(1), math.Inf(-1), 0x1p-24, math.MaxFloat32} {
			x := fill(r, typ, 400)
			for _, v := range specials(typ) {
				x = appendBits(x, typ, v)
			}
			copy(b.memory[typ.Size():], x)
			args := over(typ, len(x)/typ.Size(), []uint64{b.base + uint64(typ.Size())}, b.base+uint64(typ.Size()))
			args.number = math.Float64bits(factor)
			b.run(t, "scale", typ, args)
			kernel.Scale(typ)(x, factor)
			if d := differ(typ, b.memory[typ.Size():][:len(x)], x); d != "" {
				t.Errorf("%v times %v: %s", typ, factor, d)
			}
		}
	}
}

// TestAllHalves adds every half-precision number and every bfloat16 to some other one.
func TestAllHalves(t *testing.T) {
	b := newBench(t, 3<<17)
	for _, typ := range []kernel.Type{kernel.Float16, kernel.BFloat16} {
		r := rand.New(rand.NewPCG(4, uint64(typ)))
		var x []byte
		for v := range 1 << 16 {
			x = appendBits(x, typ, uint64(v))
		}
		y := fill(r, typ, 1<<16)
		copy(b.memory, x)
		copy(b.memory[1<<17:], y)
		b.run(t, "sum", typ, over(typ, 1<<16, []uint64{b.base + 2<<17}, b.base, b.base+1<<17))
		if d := differ(typ, b.memory[2<<17:], reduce(typ, collective.Sum, [][]byte{x, y})); d != "" {
			t.Errorf("%v: %s", typ, d)
		}
	}
}

// TestAssembled: NVIDIA's assembler, if installed, accepts the kernels.
func TestAssembled(t *testing.T) {
	for typ := kernel.Type(0); typ < kernel.Types; typ++ {
		if !hasKernels(typ) {
			continue
		}
		t.Run(typ.String(), func(t *testing.T) {
			text, err := programs.ReadFile("ptx/" + typ.String() + ".ptx")
			if err != nil {
				t.Fatal(err)
			}
			cudatest.Assemble(t, string(text))
		})
	}
}

// TestPrograms: the files are the output of the generator, and contain all kernels.
func TestPrograms(t *testing.T) {
	b := newBench(t, 256)
	for typ := kernel.Type(0); typ < kernel.Types; typ++ {
		for _, op := range []string{"sum", "product", "min", "max", "average", "scale"} {
			err := b.device.do(func() error { _, err := b.device.kernel(op, typ); return err })
			if (err == nil) != hasKernels(typ) {
				t.Errorf("%s of %v: %v", op, typ, err)
			}
		}
	}
}

func TestCombineAndScale(t *testing.T) {
	d := open(t, newNode(t).process(), Config{})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx := t.Context()
	x, y := vector(t, d, []int64{1, 2, 3, 1 << 62}), vector(t, d, []int64{10, -20, 30, 1 << 62})
	if err := Combine(s, x, x, y, collective.Sum); err != nil {
		t.Fatal(err)
	}
	if err := Scale(s, x.Slice(0, 3), -0.5); err != nil {
		t.Fatal(err)
	}
	if err := Scale(s, x.Slice(3, 4), 1); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(ctx); err != nil {
		t.Fatal(err)
	}
	if got := values(t, x); !slices.Equal(got, []int64{-5, 9, -16, math.MinInt64}) {
		t.Errorf("the result is %v", got)
	}
	small := vector(t, d, []int8{1})
	for what, err := range map[string]error{
		"an average":       Combine(s, x, x, y, collective.Average),
		"Adasum":           Combine(s, x, x, y, collective.Adasum),
		"a type":           Combine(s, small, small, small, collective.Sum),
		"lengths":          Combine(s, x, x, y.Slice(0, 2), collective.Sum),
		"scaling a type":   Scale(s, small, 2),
		"a factor of NaN":  Scale(s, x, math.NaN()),
		"nothing's device": Scale(s, &Slice[int64]{}, 2),
	} {
		if err == nil {
			t.Errorf("%s is not refused", what)
		}
	}
}

// TestOnDevice tests on the fakes, and on a real device if there is one, that the kernels compile
// and have the bits of the processor's kernels.
func TestOnDevice(t *testing.T) {
	t.Run("fake", func(t *testing.T) { testOnDevice(t, open(t, newNode(t).process(), Config{}), []int{1, 17, 50}) })
	t.Run("library", func(t *testing.T) {
		d, err := Open(Config{Library: cudatest.Library(t)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		testOnDevice(t, d, []int{1, 2, 3, 15, 16, 17, 31, 100, 5000})
	})
	t.Run("real", func(t *testing.T) {
		d, err := Open(Config{})
		if errors.Is(err, ErrUnavailable) {
			t.Skip("no device: ", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		testOnDevice(t, d, []int{1, 2, 3, 15, 16, 17, 31, 100, 5000, 1 << 20})
	})
}

// BenchmarkOnDevice measures the time of a call and of a kernel on a device, including the wait for
// its end.
func BenchmarkOnDevice(b *testing.B) {
	d, err := Open(Config{})
	if err != nil {
		b.Skip("no device: ", err)
	}
	b.Cleanup(func() { d.Close() })
	b.Run("call", func(b *testing.B) {
		for b.Loop() {
			if err := d.do(func() error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, n := range []int{1 << 10, 1 << 26} {
		b.Run(fmt.Sprintf("sum of %d float32s", n), func(b *testing.B) {
			x, err := Alloc[float32](d, n)
			if err != nil {
				b.Fatal(err)
			}
			defer x.Free()
			s, err := d.NewStream()
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			e, err := s.Record()
			if err != nil {
				b.Fatal(err)
			}
			defer e.Close()
			args := over(kernel.Float32, n, []uint64{x.address}, x.address, x.address)
			b.SetBytes(int64(8 * n))
			for b.Loop() {
				err := d.do(func() error {
					return errors.Join(d.launch(s.handle, "sum", kernel.Float32, args), d.api.check("cuEventRecord", d.api.eventRecord(e.handle, s.handle)))
				})
				if err := errors.Join(err, d.await(b.Context(), e.handle)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func testOnDevice(t *testing.T, d *Device, lengths []int) {
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	eachKernel(t, func(t *testing.T, typ kernel.Type, op collective.Op) {
		r := rand.New(rand.NewPCG(6, uint64(typ)))
		for _, n := range lengths {
			offset := r.IntN(16/typ.Size()) * typ.Size()
			vectors := [][]byte{fill(r, typ, n), fill(r, typ, n), fill(r, typ, n)}
			var at []uint64
			for _, v := range vectors {
				place := vector(t, d, make([]byte, 16+len(v)))
				if err := place.Slice(offset, offset+len(v)).CopyFrom(t.Context(), v); err != nil {
					t.Fatal(err)
				}
				at = append(at, place.Address()+uint64(offset))
			}
			args := over(typ, n, at[1:], at...)
			args.number = divisor(typ, len(at))
			if err := d.do(func() error { return d.launch(s.handle, combination(op), typ, args) }); err != nil {
				t.Fatal(err)
			}
			if err := s.Synchronize(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := reduce(typ, op, vectors)
			for _, target := range at[1:] {
				w, err := Wrap[byte](d, target, len(want))
				if err != nil {
					t.Fatal(err)
				}
				if d := differ(typ, values(t, w), want); d != "" {
					t.Errorf("%d elements: %s", n, d)
				}
			}
		}
	})
}
