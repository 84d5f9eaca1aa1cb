package elastic

import (
	"fmt"
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Tensor is a Part whose live value is data, which a sync overwrites in place. It keeps a copy of
// data as of the last commit and, while the next one is made, copies of the chunks of 1 MiB that
// have changed. The name must be unique within a State. data must stay the same slice, which
// [TensorVar] checks, and must not be nil; its length and type must be the same on every rank. On
// Linux 6.7 and newer, if the process has opened no device, a commit skips memory that has not been
// written to according to the kernel. Otherwise a commit reads all of data to find changes. See
// [Watched].
func Tensor[T collective.Element](name string, data []T) Part {
	memory := [][]byte{kernel.Bytes(data)}
	return newPart(content{
		name:    name,
		absent:  data == nil,
		layout:  func() string { return fmt.Sprintf("tensor %q: %T of %d", name, data, len(data)) },
		memory:  func() [][]byte { return memory },
		tensors: func(name string) []checkpoint.Tensor { return []checkpoint.Tensor{{Name: name, Type: dtype[T]()}} },
	})
}

// TensorVar is like [Tensor], for the slice that *data is now. If the program assigns another slice
// to the variable, by make or append, the next save returns an error that names the part: training
// would continue with values that no commit includes.
func TensorVar[T collective.Element](name string, data *[]T) Part {
	if data == nil {
		return Tensor[T](name, nil)
	}
	kept := *data
	p := Tensor(name, kept).(*part)
	p.c.moved = func() error {
		now := *data
		if unsafe.SliceData(now) == unsafe.SliceData(kept) && len(now) == len(kept) {
			return nil
		}
		return fmt.Errorf("elastic: tensor %q: the program has assigned another slice, of %d elements, to the variable of the state's, "+
			"of %d: a tensor must stay the same slice, to which copy and loops write", name, len(now), len(kept))
	}
	return p
}

// Tensors is a Part of several slices, such as a network's layers or an optimizer's moments. The
// rules of [Tensor] apply to each slice; all are saved and restored together. Their number, lengths
// and type must be the same on every rank, and each must stay the same slice. In a checkpoint they
// are named name.0, name.1 and so on.
func Tensors[T collective.Element](name string, data [][]T) Part {
	return newPart(content{
		name:   name,
		absent: data == nil,
		layout: func() string {
			lengths := make([]int, len(data))
			for i := range data {
				lengths[i] = len(data[i])
			}
			return fmt.Sprintf("tensors %q: %T of %v", name, data, lengths)
		},
		memory: func() [][]byte {
			all := make([][]byte, len(data))
			for i := range data {
				all[i] = kernel.Bytes(data[i])
			}
			return all
		},
		tensors: func(name string) []checkpoint.Tensor {
			all := make([]checkpoint.Tensor, len(data))
			for i := range all {
				all[i] = checkpoint.Tensor{Name: fmt.Sprint(name, ".", i), Type: dtype[T]()}
			}
			return all
		},
	})
}

// dtype returns the type of a tensor of T in a checkpoint.
func dtype[T collective.Element]() string {
	switch any(*new(T)).(type) {
	case collective.Float16:
		return "F16"
	case collective.BFloat16:
		return "BF16"
	}
	return dtypeOf(reflect.TypeFor[T]())
}

func dtypeOf(t reflect.Type) string {
	letter := "I"
	switch k := t.Kind(); {
	case k == reflect.Bool:
		return "BOOL"
	case k == reflect.Float32 || k == reflect.Float64:
		letter = "F"
	case k >= reflect.Uint && k <= reflect.Uint64:
		letter = "U"
	}
	return fmt.Sprint(letter, t.Bits())
}
