package elastic

import (
	"bytes"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/elastic/checkpoint"
)

// Local is a Part whose live value *v differs between ranks: a shard of the data, a random source,
// a position. T is any type that encoding/gob can encode, as with [Value]; a slice of numbers is
// sent as raw memory. The name must be unique within a State, and all ranks must have the same
// Local parts. The value of one rank at a commit is called its piece.
//
// Before a commit counts, each rank sends copies of its pieces to as many other ranks as
// --commit-replicas says, preferably on other hosts. Before the hosts change it sends them to all
// other ranks, so that no piece is lost when ranks leave without a failure. A piece is lost only if
// a rank fails together with all ranks that keep its copies; a warning then names the part and the
// rank. A rank that is asked to leave while another rank fails leaves without sending its pieces,
// as if it had failed too.
//
// In the sync of a new world every rank of the previous world continues with its own piece of the
// commit that is restored. New ranks, in rank order, take over the pieces of ranks that have left,
// in their rank order. Pieces that no rank takes over are kept and offered to new ranks of later
// worlds, after those of ranks that have left since. A new rank without a piece starts with the
// value that *v had at NewState. [Redistribute] replaces this assignment by a function of the
// program.
//
// Local parts are neither in digests nor compared between ranks. The sync overwrites what an
// OnReset function changes in them on all ranks. With Local parts a commit costs an additional
// reduction of one byte, and sends the changed chunks of 1 MiB of each piece to each rank that
// keeps a copy.
func Local[T any](name string, v *T, options ...LocalOption[T]) Part {
	l := &local[T]{value: newValue(name, v), flat: isFlat(reflect.TypeFor[T]())}
	for _, o := range options {
		o(l)
	}
	kind := fmt.Sprintf("local %q: %v", name, reflect.TypeFor[T]())
	return newPart(content{
		name: name,
		kind: func() string { return kind },
		layout: func() string {
			if l.shared() {
				return kind + ", redistributed"
			}
			return kind
		},
		encode:  l.take,
		decode:  func(b []byte) error { return l.decode(b, l.value.live) },
		tensors: func(string) []checkpoint.Tensor { return nil }, // their number depends on the size of the world; see durable
		local:   l,
	})
}

// LocalOption configures a Local part.
type LocalOption[T any] func(*local[T])

// Piece is the value of one rank of an earlier world at the restored commit.
type Piece[T any] struct {
	// Rank is the rank in the world that made the commit.
	Rank  int
	Value T
	// Lost means that no rank has the piece any more; Value is then the zero value.
	Lost bool
}

// Redistribute makes f compute the live value of a Local part in every new world whose ranks differ
// from the previous world's. f receives the pieces of all ranks of the world that made the commit,
// in rank order, and the rank and size of this worker in the new world. It is called on every rank,
// including new ones, during the sync. Its result must depend only on its arguments, because it can
// be called again for the same commit if the sync fails. f owns the pieces. An error ends Run.
//
// Each rank holds the pieces of all ranks in memory during the call.
func Redistribute[T any](f func(pieces []Piece[T], rank, size int) (T, error)) LocalOption[T] {
	return func(l *local[T]) { l.redistribute = f }
}

type local[T any] struct {
	value        value[T]
	flat         bool // a slice of numbers, encoded as its memory
	redistribute func([]Piece[T], int, int) (T, error)
	last         []byte // the last encoded live value
	encoded      bool   // the next save uses last
}

// localPart is a local with any type argument.
type localPart interface {
	label() string
	// write encodes the live value. The next save uses the same bytes, to which nothing writes
	// afterwards. If the value is unchanged, write returns the bytes of the previous call.
	write() ([]byte, error)
	// forget makes the next save encode the live value again.
	forget()
	// read sets the live value from a piece.
	read(*piece) error
	// shared reports whether the part has a Redistribute function. deal calls it with all pieces,
	// nil for lost ones.
	shared() bool
	deal(pieces []*piece, rank, size int) error
	// tensor describes a piece in a checkpoint.
	tensor(name string) checkpoint.Tensor
}

// isFlat reports whether t is a slice of numbers without methods.
func isFlat(t reflect.Type) bool {
	if t.Kind() != reflect.Slice || reflect.PointerTo(t).NumMethod() > 0 {
		return false
	}
	e := t.Elem()
	return isNumber(e.Kind()) && e.Kind() != reflect.Bool && reflect.PointerTo(e).NumMethod() == 0
}

// flatMemory returns the memory of v, a slice of numbers.
func flatMemory(v reflect.Value) []byte {
	n := v.Len() * int(v.Type().Elem().Size())
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(v.UnsafePointer()), n)
}

func (l *local[T]) label() string { return l.value.name }
func (l *local[T]) shared() bool  { return l.redistribute != nil }
func (l *local[T]) forget()       { l.encoded = false }

func (l *local[T]) tensor(name string) checkpoint.Tensor {
	t := checkpoint.Tensor{Name: name, Type: "U8"}
	switch {
	case l.flat:
		t.Type = dtypeOf(reflect.TypeFor[T]().Elem())
	case l.value.plain:
		t.Type, t.Scalar = dtypeOf(reflect.TypeFor[T]()), true
	}
	return t
}

// take returns the bytes of write, or encodes the live value.
func (l *local[T]) take() ([]byte, error) {
	if !l.encoded {
		if _, err := l.write(); err != nil {
			return nil, err
		}
	}
	l.encoded = false
	return l.last, nil
}

func (l *local[T]) write() ([]byte, error) {
	b, err := l.encode()
	if err != nil {
		return nil, err
	}
	l.last, l.encoded = b, true
	return b, nil
}

// encode returns last if the live value is unchanged.
func (l *local[T]) encode() ([]byte, error) {
	var b []byte
	if l.flat && l.value.live != nil {
		b = flatMemory(reflect.ValueOf(l.value.live).Elem())
	} else {
		var err error
		if b, err = l.value.encode(); err != nil {
			return nil, err
		}
	}
	if l.last != nil && bytes.Equal(b, l.last) {
		return l.last, nil
	}
	if l.flat {
		b = append(make([]byte, 0, len(b)), b...)
	}
	return b, nil
}

// decode sets *to, the live or a new value, from b.
func (l *local[T]) decode(b []byte, to *T) error {
	if !l.flat || to == nil {
		return value[T]{l.value.name, to, l.value.plain}.decode(b)
	}
	t := reflect.TypeFor[T]()
	each := int(t.Elem().Size())
	if len(b)%each != 0 {
		return fmt.Errorf("elastic: local %q: %d bytes are not a whole number of elements", l.value.name, len(b))
	}
	fresh := reflect.MakeSlice(t, len(b)/each, len(b)/each)
	copy(flatMemory(fresh), b)
	reflect.ValueOf(to).Elem().Set(fresh)
	return nil
}

func (l *local[T]) read(p *piece) error { return l.decode(p.Bytes(), l.value.live) }

func (l *local[T]) deal(pieces []*piece, rank, size int) error {
	all := make([]Piece[T], len(pieces))
	for i, p := range pieces {
		all[i] = Piece[T]{Rank: i, Lost: p == nil}
		if p == nil {
			continue
		}
		if err := l.decode(p.Bytes(), &all[i].Value); err != nil {
			return err
		}
	}
	v, err := l.redistribute(all, rank, size)
	if err != nil {
		return fmt.Errorf("elastic: local %q: redistribute: %w", l.value.name, err)
	}
	*l.value.live = v
	return nil
}
