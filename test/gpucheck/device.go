package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/plan"
)

// checkDriver opens a device, which requires that all symbols exist, and reports it.
func checkDriver(_ context.Context, o *options) ([]figure, error) {
	version, err := cuda.DriverVersion(o.Driver)
	if err != nil {
		return nil, err
	}
	devices, err := cuda.Devices(o.Driver)
	if err != nil {
		return nil, err
	}
	all := []figure{{Name: "CUDA of the driver", Value: float64(version/1000) + float64(version%1000/10)/10}}
	for _, i := range devices {
		all = append(all,
			figure{Name: fmt.Sprintf("device %d, %s: compute capability", i.Index, i.Name), Value: float64(i.Major) + float64(i.Minor)/10},
			figure{Name: fmt.Sprintf("device %d: multiprocessors", i.Index), Value: float64(i.Multiprocessors)},
			figure{Name: fmt.Sprintf("device %d: memory", i.Index), Value: float64(i.Memory) / (1 << 30), Unit: "GiB"})
		if i.Exclusive {
			return all, fmt.Errorf("device %d serves one process at a time: several ranks cannot share it", i.Index)
		}
	}
	if library, err := nccl.Load(cmp.Or(o.NCCL, plan.GPUFromEnv().NCCLLibrary)); err == nil {
		v := int(library.Version())
		all = append(all, figure{Name: fmt.Sprintf("NCCL %v: version code", library.Version()), Value: float64(v)})
	}
	d, err := cuda.Open(cuda.Config{Library: o.Driver})
	if err != nil {
		return all, err
	}
	return all, d.Close()
}

const copyFigure = "copies on the device, read and written"

// checkCopy measures the device's copy bandwidth.
func checkCopy(ctx context.Context, o *options) (all []figure, err error) {
	d, err := cuda.Open(cuda.Config{Library: o.Driver})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	free, _, err := d.Memory()
	if err != nil {
		return nil, err
	}
	n, times := int(min(2<<30, free/4)), make([]float64, 30)
	if o.Quick {
		n, times = 1<<20, times[:3]
	}
	from, err := cuda.Alloc[byte](d, n)
	if err != nil {
		return nil, err
	}
	defer from.Free()
	to, err := cuda.Alloc[byte](d, n)
	if err != nil {
		return nil, err
	}
	defer to.Free()
	for i := range times {
		began := time.Now()
		if err := to.CopySlice(ctx, from); err != nil {
			return nil, err
		}
		times[i] = time.Since(began).Seconds()
	}
	slices.Sort(times)
	return []figure{{Name: copyFigure, Value: 2 * float64(n) / times[len(times)/2] / 1e9, Unit: "GB/s"}}, nil
}

// lab holds the memory for testing kernels.
type lab struct {
	ctx    context.Context
	device *cuda.Device
	stream *cuda.Stream
	dice   *rand.Rand
	quick  bool
	count  int // elements
}

// checkKernels compares the kernels' results, and the memory that they must not change, with
// internal/kernel, bit by bit.
func checkKernels(ctx context.Context, o *options) (all []figure, err error) {
	l := &lab{ctx: ctx, dice: rand.New(rand.NewPCG(1, 2)), quick: o.Quick}
	if l.device, err = cuda.Open(cuda.Config{Library: o.Driver}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.device.Close()) }()
	if l.stream, err = l.device.NewStream(); err != nil {
		return nil, err
	}
	defer l.stream.Close()
	err = errors.Join(kernels[float32](l, kernel.Float32), kernels[float64](l, kernel.Float64), kernels[int32](l, kernel.Int32),
		kernels[int64](l, kernel.Int64), kernels[collective.Float16](l, kernel.Float16), kernels[collective.BFloat16](l, kernel.BFloat16),
		halves[collective.Float16](l, kernel.Float16), halves[collective.BFloat16](l, kernel.BFloat16))
	return []figure{{Name: "elements compared", Value: float64(l.count)}}, err
}

// margin is the number of elements checked beside a vector.
const margin = 20

// kernels tests all operations on a type, with odd lengths and alignments.
func kernels[T collective.Element](l *lab, t kernel.Type) error {
	lengths := []int{1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 1001, 65_537, 1<<19 + 3}
	if l.quick {
		lengths = []int{1, 2, 3, 5, 9, 17, 40, 301}
	}
	for _, n := range lengths {
		for _, c := range reductions {
			if c.op == collective.Average {
				continue // only for several ranks
			}
			for place := range 3 {
				x, y := fill(l.dice, t, n), fill(l.dice, t, n)
				want := make([]byte, len(x))
				kernel.Combine(t, c.two)(want, x, y)
				err := combined[T](l, t, c.op, x, y, want, place)
				if err != nil {
					return err
				}
			}
		}
		for _, factor := range []float64{0, -1, 0.5, 1.0 / 3, -2.5, 1e10, 1e300, 1e-300, math.Inf(1), math.MaxFloat32} {
			if err := scaled[T](l, t, fill(l.dice, t, n), factor); err != nil {
				return err
			}
		}
	}
	return nil
}

// combined combines x and y into a third vector, into x or into y.
func combined[T collective.Element](l *lab, t kernel.Type, op collective.Op, x, y, want []byte, place int) error {
	n := len(x) / t.Size()
	offsets := [3]int{l.dice.IntN(9), l.dice.IntN(9), l.dice.IntN(9)}
	if l.dice.IntN(2) == 0 {
		offsets[1], offsets[2] = offsets[0], offsets[0] // all aligned alike
	}
	var rooms, vectors [3]*cuda.Slice[T]
	var around [3][]byte
	for i, content := range [][]byte{x, y, nil} {
		around[i] = fill(l.dice, t, n+margin)
		copy(around[i][offsets[i]*t.Size():], content)
		var err error
		if rooms[i], err = cuda.Alloc[T](l.device, n+margin); err != nil {
			return err
		}
		defer rooms[i].Free()
		if err := rooms[i].CopyFrom(l.ctx, elements[T](around[i])); err != nil {
			return err
		}
		vectors[i] = rooms[i].Slice(offsets[i], offsets[i]+n)
	}
	target := (place + 2) % 3
	if err := cuda.Combine(l.stream, vectors[target], vectors[0], vectors[1], op); err != nil {
		return err
	}
	if err := l.stream.Synchronize(l.ctx); err != nil {
		return err
	}
	copy(around[target][offsets[target]*t.Size():], want)
	for i := range rooms {
		l.count += n
		if err := holds(l.ctx, t, fmt.Sprintf("%v, %d elements, place %d", op, n, i), rooms[i], around[i]); err != nil {
			return err
		}
	}
	return nil
}

func scaled[T collective.Element](l *lab, t kernel.Type, x []byte, factor float64) error {
	n, offset := len(x)/t.Size(), l.dice.IntN(9)
	around := fill(l.dice, t, n+margin)
	copy(around[offset*t.Size():], x)
	room, err := cuda.Alloc[T](l.device, n+margin)
	if err != nil {
		return err
	}
	defer room.Free()
	if err := room.CopyFrom(l.ctx, elements[T](around)); err != nil {
		return err
	}
	if err := cuda.Scale(l.stream, room.Slice(offset, offset+n), factor); err != nil {
		return err
	}
	if err := l.stream.Synchronize(l.ctx); err != nil {
		return err
	}
	kernel.Scale(t)(around[offset*t.Size():][:len(x)], factor)
	l.count += n
	return holds(l.ctx, t, fmt.Sprintf("scaled by %v, %d elements", factor, n), room, around)
}

// halves combines all 16-bit values with others: in a full run, each with a sample of all others.
func halves[T collective.Element](l *lab, t kernel.Type) error {
	const every = 1 << 16
	rounds := 64
	if l.quick {
		rounds = 1
	}
	for range rounds {
		x, y := make([]byte, 0, 2*every), make([]byte, 0, 2*every)
		for v, w := range l.dice.Perm(every) {
			x, y = append(x, byte(v), byte(v>>8)), append(y, byte(w), byte(w>>8))
		}
		for _, c := range reductions {
			if c.op == collective.Average || l.quick && c.op != collective.Sum && c.op != collective.Max {
				continue
			}
			want := make([]byte, len(x))
			kernel.Combine(t, c.two)(want, x, y)
			if err := combined[T](l, t, c.op, x, y, want, 0); err != nil {
				return err
			}
		}
		if err := scaled[T](l, t, x, 1.0/3); err != nil {
			return err
		}
	}
	return nil
}
