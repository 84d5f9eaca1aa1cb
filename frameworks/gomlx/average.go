package gomlx

import (
	"context"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/tensors"

	"github.com/hvdrun/hvdrun/collective"
)

// Averager averages tensors over the ranks of a group. It reuses its buffers, so a program should
// use one Averager for all steps, by one goroutine at a time. The zero value is ready for use.
type Averager struct {
	float32s  []float32
	float64s  []float64
	float16s  []collective.Float16
	bfloat16s []collective.BFloat16
}

// Average sets each tensor to the mean of the tensors with the same index on all ranks, with one
// reduction per type. It is collective and blocks. The types are Float32, Float64, Float16 and
// BFloat16. After an error the contents of the tensors are undefined.
func (a *Averager) Average(ctx context.Context, g *collective.Group, list ...*tensors.Tensor) error {
	for i, t := range list {
		switch t.DType() {
		case dtypes.Float32, dtypes.Float64, dtypes.Float16, dtypes.BFloat16:
		default:
			return fmt.Errorf("gomlx: tensor %d is of type %s, which cannot be averaged", i, t.DType())
		}
	}
	if g.Size() == 1 {
		return nil
	}
	if err := average(ctx, g, list, dtypes.Float32, &a.float32s); err != nil {
		return err
	}
	if err := average(ctx, g, list, dtypes.Float64, &a.float64s); err != nil {
		return err
	}
	if err := average(ctx, g, list, dtypes.Float16, &a.float16s); err != nil {
		return err
	}
	return average(ctx, g, list, dtypes.BFloat16, &a.bfloat16s)
}

// average averages the tensors of one type, with elements T, in the buffer.
func average[T collective.Element](ctx context.Context, g *collective.Group, list []*tensors.Tensor, dtype dtypes.DType, buffer *[]T) error {
	n := 0
	for _, t := range list {
		if t.DType() == dtype {
			n += t.Size()
		}
	}
	if n == 0 {
		return nil
	}
	*buffer = slices.Grow((*buffer)[:0], n)[:n]
	if err := each(list, dtype, *buffer, func(room, tensor []byte) { copy(room, tensor) }); err != nil {
		return err
	}
	if err := collective.AllReduce(ctx, g, *buffer, collective.Average); err != nil {
		return err
	}
	return each(list, dtype, *buffer, func(room, tensor []byte) { copy(tensor, room) })
}

// each calls visit for the tensors of the type, with the range of the buffer for each and its
// bytes.
func each[T collective.Element](list []*tensors.Tensor, dtype dtypes.DType, buffer []T, visit func(room, tensor []byte)) error {
	rest := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(buffer))), len(buffer)*int(unsafe.Sizeof(buffer[0])))
	for i, t := range list {
		if t.DType() != dtype {
			continue
		}
		err := t.MutableBytes(func(b []byte) {
			visit(rest[:len(b)], b)
			rest = rest[len(b):]
		})
		if err != nil {
			return fmt.Errorf("gomlx: tensor %d: %w", i, err)
		}
	}
	return nil
}
