package elastic

import (
	"bytes"
	"encoding"
	"encoding/gob"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/elastic/checkpoint"
)

// Value is a Part whose live value is *v, of any type that encoding/gob can encode; as with gob,
// unexported fields are not included. Restore and Sync replace *v by a new value, so maps and
// slices of the old one do not change. The name must be unique within a State. Digests compare
// values field by field; a type with GobEncode or MarshalBinary must encode equal values to equal
// bytes.
func Value[T any](name string, v *T) Part {
	value := newValue(name, v)
	c := content{
		name:    name,
		layout:  func() string { return fmt.Sprintf("value %q: %v", name, reflect.TypeFor[T]()) },
		encode:  value.encode,
		decode:  value.decode,
		tensors: value.tensors,
		text:    value.text,
	}
	c.number, _ = any(v).(*int)
	if !value.plain {
		c.canonical, c.opaque = value.canonical, true
	}
	return newPart(c)
}

// value encodes *live.
type value[T any] struct {
	name  string
	live  *T
	plain bool // a number or bool without methods: its memory is copied, which is faster than gob
}

func newValue[T any](name string, v *T) value[T] {
	t := reflect.TypeFor[T]()
	return value[T]{name, v, isNumber(t.Kind()) && reflect.PointerTo(t).NumMethod() == 0}
}

func isNumber(k reflect.Kind) bool {
	return k >= reflect.Bool && k <= reflect.Float64 && k != reflect.Uintptr
}

func (v value[T]) memory() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v.live)), unsafe.Sizeof(*v.live))
}

func (v value[T]) encode() ([]byte, error) {
	if v.live == nil {
		return nil, fmt.Errorf("elastic: value %q: its pointer is nil", v.name)
	}
	if v.plain {
		return bytes.Clone(v.memory()), nil
	}
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(v.live); err != nil {
		return nil, fmt.Errorf("elastic: value %q: encode: %w", v.name, err)
	}
	return b.Bytes(), nil
}

func (v value[T]) decode(b []byte) error {
	if v.live == nil {
		return fmt.Errorf("elastic: value %q: its pointer is nil", v.name)
	}
	fresh := new(T)
	if v.plain {
		to := value[T]{live: fresh}.memory()
		if len(b) != len(to) || reflect.TypeFor[T]().Kind() == reflect.Bool && b[0] > 1 {
			return fmt.Errorf("elastic: value %q: the %d bytes are not a %v", v.name, len(b), reflect.TypeFor[T]())
		}
		copy(to, b)
	} else if err := gob.NewDecoder(bytes.NewReader(b)).Decode(fresh); err != nil {
		return fmt.Errorf("elastic: value %q: decode: %w", v.name, err)
	}
	*v.live = *fresh
	return nil
}

// decoded returns the value encoded in b, without changing the live value.
func (v value[T]) decoded(b []byte) (*T, error) {
	fresh := new(T)
	return fresh, value[T]{v.name, fresh, v.plain}.decode(b)
}

func (v value[T]) canonical(encoded []byte) ([]byte, error) {
	fresh, err := v.decoded(encoded)
	if err != nil {
		return nil, err
	}
	b, err := appendCanonical(nil, reflect.ValueOf(fresh).Elem())
	if err != nil {
		return nil, fmt.Errorf("elastic: value %q: %w", v.name, err)
	}
	return b, nil
}

func (v value[T]) tensors(name string) []checkpoint.Tensor {
	if v.plain {
		return []checkpoint.Tensor{{Name: name, Type: dtypeOf(reflect.TypeFor[T]()), Scalar: true}}
	}
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

func (v value[T]) text(b []byte) string {
	fresh, err := v.decoded(b)
	if err != nil {
		return ""
	}
	return fmt.Sprint(*fresh)
}

// Marshaler is a value that encodes and decodes itself: the random sources [math/rand/v2.PCG] and
// [math/rand/v2.ChaCha8], for example, or a type of the program.
type Marshaler interface {
	encoding.BinaryMarshaler
	encoding.BinaryUnmarshaler
}

// Binary is a Part whose live value is v, encoded and decoded by its own methods; v stays the same
// object. Every save calls MarshalBinary, which must return the same bytes for the same value on
// all ranks. The name must be unique within a State.
//
// After a sync all ranks have the root's value. A random source from which ranks draw differently
// must be a [Local] part.
func Binary(name string, v Marshaler) Part {
	return newPart(content{
		name:       name,
		layout:     func() string { return fmt.Sprintf("binary %q: %T", name, v) },
		comparison: comparison{opaque: true},
		// Both functions copy, because v may reuse the memory of its results and arguments.
		encode: func() ([]byte, error) {
			if v == nil {
				return nil, fmt.Errorf("elastic: binary %q: v is nil", name)
			}
			b, err := v.MarshalBinary()
			if err != nil {
				return nil, fmt.Errorf("elastic: binary %q: %w", name, err)
			}
			return append([]byte(nil), b...), nil
		},
		decode: func(b []byte) error {
			if err := v.UnmarshalBinary(append([]byte(nil), b...)); err != nil {
				return fmt.Errorf("elastic: binary %q: %w", name, err)
			}
			return nil
		},
	})
}
