package elastic

import (
	"context"
	"encoding"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// Tensors is a Part of several slices, as a network's layers or an optimizer's moments are held in
// Go: each is what [Tensor] says of one, and they are saved and restored together. Their number,
// lengths and type must be the same on every rank, and none must be replaced by another. In a
// checkpoint they are named name.0, name.1 and so on.
func Tensors[T collective.Element](name string, data [][]T) Part {
	return &tensors[T]{label: name, live: data}
}

type tensors[T collective.Element] struct {
	label string
	live  [][]T
	kept  alone
	watchable
}

func (t *tensors[T]) Save() error    { return t.kept.save(t) }
func (t *tensors[T]) Restore() error { return t.kept.restore(t) }

func (t *tensors[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	for _, data := range t.live {
		if err := collective.Broadcast(ctx, g, data, root); err != nil {
			return err
		}
	}
	return nil
}

func (t *tensors[T]) self() Part   { return t }
func (t *tensors[T]) name() string { return t.label }
func (t *tensors[T]) kind() string { return t.layout() }

func (t *tensors[T]) layout() string {
	lengths := make([]int, len(t.live))
	for i, data := range t.live {
		lengths[i] = len(data)
	}
	return fmt.Sprintf("tensors %q: %T of %v", t.label, t.live, lengths)
}

func (t *tensors[T]) memory() [][]byte {
	all := make([][]byte, len(t.live))
	for i, data := range t.live {
		all[i] = memoryOf(data)
	}
	return all
}

func (t *tensors[T]) sources(to []image.Source) ([]image.Source, error) {
	for _, data := range t.live {
		to = append(to, image.Source{Bytes: memoryOf(data)})
	}
	return to, nil
}

func (t *tensors[T]) restore(pieces []image.Piece) error {
	for i, data := range t.live {
		pieces[i].CopyTo(memoryOf(data))
	}
	return nil
}

func (t *tensors[T]) sums(pieces []image.Piece) (sums []uint32, err error) {
	for i := range t.live {
		sums = append(sums, pieces[i].Sums()...)
	}
	return sums, nil
}

func (t *tensors[T]) size() (n int) {
	for _, data := range t.live {
		n += len(memoryOf(data))
	}
	return n
}

func (t *tensors[T]) travels() bool { return t.size() <= carriedTensor }

func (t *tensors[T]) encode() ([]byte, error) {
	b := make([]byte, 0, t.size())
	for _, data := range t.live {
		b = append(b, memoryOf(data)...)
	}
	return b, nil
}

func (t *tensors[T]) decode(b []byte) error {
	if len(b) != t.size() {
		return fmt.Errorf("elastic: tensors %q: %d bytes for some of %d", t.label, len(b), t.size())
	}
	for _, data := range t.live {
		b = b[copy(memoryOf(data), b):]
	}
	return nil
}

func (t *tensors[T]) tensors(name string) []checkpoint.Tensor {
	all := make([]checkpoint.Tensor, len(t.live))
	for i := range all {
		all[i] = checkpoint.Tensor{Name: fmt.Sprint(name, ".", i), Type: dtype[T]()}
	}
	return all
}

func (t *tensors[T]) text([]image.Piece) string { return "" }

// Marshaler is what can write itself down and read itself back: the random sources
// [math/rand/v2.PCG] and [math/rand/v2.ChaCha8], for example, and whatever of a user's own has two
// such methods.
type Marshaler interface {
	encoding.BinaryMarshaler
	encoding.BinaryUnmarshaler
}

// Binary is a Part whose live value is v, written down and read back by its own methods; v stays
// the same object. MarshalBinary is called in each save, and must give the same bytes for the same
// value on all ranks. The name must be unique within a State.
//
// After a sync all ranks hold the root's value: a random source that each rank draws from
// differently is a [Local] part.
func Binary(name string, v Marshaler) Part { return &binaryPart{label: name, live: v} }

type binaryPart struct {
	label string
	live  Marshaler
	kept  alone
}

func (p *binaryPart) Save() error    { return p.kept.save(p) }
func (p *binaryPart) Restore() error { return p.kept.restore(p) }

func (p *binaryPart) Sync(ctx context.Context, g *collective.Group, root int) error {
	return syncCarried(ctx, g, root, p)
}

func (p *binaryPart) self() Part                                        { return p }
func (p *binaryPart) name() string                                      { return p.label }
func (p *binaryPart) kind() string                                      { return p.layout() }
func (p *binaryPart) layout() string                                    { return fmt.Sprintf("binary %q: %T", p.label, p.live) }
func (p *binaryPart) sources(to []image.Source) ([]image.Source, error) { return encoded(to, p) }
func (p *binaryPart) restore(pieces []image.Piece) error                { return p.decode(pieces[0].Bytes()) }
func (p *binaryPart) sums(pieces []image.Piece) ([]uint32, error)       { return pieces[0].Sums(), nil }
func (p *binaryPart) travels() bool                                     { return true }
func (p *binaryPart) onlyCarried() bool                                 { return true }
func (p *binaryPart) text([]image.Piece) string                         { return "" }

func (p *binaryPart) tensors(name string) []checkpoint.Tensor {
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

// encode clones: v may go on using the memory of what it has returned.
func (p *binaryPart) encode() ([]byte, error) {
	if p.live == nil {
		return nil, fmt.Errorf("elastic: binary %q: there is no value", p.label)
	}
	b, err := p.live.MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("elastic: binary %q: %w", p.label, err)
	}
	return append([]byte(nil), b...), nil
}

func (p *binaryPart) decode(b []byte) error {
	if err := p.live.UnmarshalBinary(append([]byte(nil), b...)); err != nil {
		return fmt.Errorf("elastic: binary %q: %w", p.label, err)
	}
	return nil
}
