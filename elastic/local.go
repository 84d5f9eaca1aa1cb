package elastic

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// Local is a Part whose live value *v is another on every rank: a shard of the data, a random
// source, a position of its own. It is anything that encoding/gob can encode, as with [Value]; a
// slice of numbers is carried as it lies in memory. The name must be unique within a State, and all
// ranks have the same Local parts. What a rank has at a commit is its piece.
//
// Before a commit counts, each rank gives its pieces to as many others as --commit-replicas says,
// of other hosts first, and when the hosts change to all others, so that ranks which leave in good
// order leave nothing behind. A piece is lost only where a rank dies together with all those that
// keep its pieces, and then a warning names part and rank. (One that is asked to leave at the very
// moment when another dies leaves as if it had died: nobody meets it at a commit any more.)
//
// In the sync of a new world every rank that was in the last one goes on with its own piece, of the
// commit that all go back to. The pieces of those that are gone, in the order of their ranks, are
// taken by the newcomers, in the order of theirs; what nobody takes is kept, and offered to
// newcomers again in later worlds, after those of ranks that have gone since. A newcomer for whom
// there is none begins with what *v was at NewState. [Redistribute] puts a function of the user's
// in place of all that.
//
// Local parts are neither in digests nor compared. What an OnReset function changes of them is
// overwritten on all ranks. With Local parts a commit costs one reduction of eight bytes more, and
// sends the chunks of 1 MiB of pieces that have changed to each of those who keep them.
func Local[T any](name string, v *T, options ...LocalOption[T]) Part {
	l := &local[T]{value: Value(name, v).(*value[T]), flat: isFlat(reflect.TypeFor[T]())}
	for _, o := range options {
		o(l)
	}
	return l
}

// LocalOption changes what becomes of a Local part's pieces.
type LocalOption[T any] func(*local[T])

// Piece is what one rank of an earlier world had at the commit that all have gone back to.
type Piece[T any] struct {
	// Rank is that in the world that made the commit.
	Rank  int
	Value T
	// Lost says that nobody has the piece any more, and Value is zero.
	Lost bool
}

// Redistribute has f make the live value of a Local part wherever the ranks of a new world are not
// those of the last one: it gets the pieces of all ranks of the world that made the commit, in
// their order, and this rank's place in the new world. It is called on every rank, newcomers
// included, while the state is synchronised, and what it returns must depend on its arguments
// alone: it may be called again for the same commit, where the sync fails. The pieces are its own.
// An error ends Run.
//
// All ranks hold all pieces for the time of the call.
func Redistribute[T any](f func(pieces []Piece[T], rank, size int) (T, error)) LocalOption[T] {
	return func(l *local[T]) { l.redistribute = f }
}

type local[T any] struct {
	value        *value[T]
	flat         bool // a slice of numbers: its memory says all
	redistribute func([]Piece[T], int, int) (T, error)
	last         []byte // the live value at the last write
	written      bool   // last is what the next save is to hold
	kept         alone
}

// localPart is a local of any type.
type localPart interface {
	own
	// write writes the live value down, for the save that follows as well, and returns it. Nobody
	// writes to the bytes afterwards; they are those of the last time where nothing has changed.
	write() ([]byte, error)
	// forget has the next save write the live value down itself.
	forget()
	// read makes the live value that of a piece.
	read(*piece) error
	// shared tells whether there is a function that makes the live value of all pieces, which deal
	// calls; nil is a lost one.
	shared() bool
	// tensor is how a piece is found in a checkpoint.
	tensor(name string) checkpoint.Tensor
	deal(pieces []*piece, rank, size int) error
}

// isFlat tells whether t is a slice of numbers without methods.
func isFlat(t reflect.Type) bool {
	if t.Kind() != reflect.Slice || reflect.PointerTo(t).NumMethod() > 0 {
		return false
	}
	e := t.Elem()
	return isNumber(e.Kind()) && e.Kind() != reflect.Bool && reflect.PointerTo(e).NumMethod() == 0
}

// flatMemory is the memory of v, a slice of numbers.
func flatMemory(v reflect.Value) []byte {
	n := v.Len() * int(v.Type().Elem().Size())
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(v.UnsafePointer()), n)
}

func (l *local[T]) self() Part     { return l }
func (l *local[T]) name() string   { return l.value.label }
func (l *local[T]) Save() error    { return l.kept.save(l) }
func (l *local[T]) shared() bool   { return l.redistribute != nil }
func (l *local[T]) forget()        { l.written = false }
func (l *local[T]) String() string { return fmt.Sprintf("%q", l.value.label) }

// Restore goes back to the last save.
func (l *local[T]) Restore() error { return l.kept.restore(l) }

// Sync leaves the value as it is: a State gives every rank its own.
func (l *local[T]) Sync(context.Context, *collective.Group, int) error { return nil }

func (l *local[T]) layout() string {
	dealt := ""
	if l.shared() {
		dealt = ", redistributed"
	}
	return l.kind() + dealt
}

func (l *local[T]) kind() string {
	return fmt.Sprintf("local %q: %v", l.value.label, reflect.TypeFor[T]())
}
func (l *local[T]) tensors(string) []checkpoint.Tensor { return nil } // it has as many as the world has ranks
func (l *local[T]) text([]image.Piece) string          { return "" }

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

func (l *local[T]) sources(to []image.Source) ([]image.Source, error) {
	if !l.written {
		if _, err := l.write(); err != nil {
			return to, err
		}
	}
	l.written = false
	return append(to, image.Source{Bytes: l.last, Given: true}), nil
}

func (l *local[T]) restore(pieces []image.Piece) error {
	return l.decode(pieces[0].Bytes(), l.value.live)
}
func (l *local[T]) sums(pieces []image.Piece) ([]uint32, error) { return nil, nil }

func (l *local[T]) write() ([]byte, error) {
	b, err := l.encode()
	if err != nil {
		return nil, err
	}
	l.last, l.written = b, true
	return b, nil
}

// encode returns last where the live value is the same.
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

// decode makes *to what b says; to is the live value or a fresh one.
func (l *local[T]) decode(b []byte, to *T) error {
	if !l.flat || to == nil {
		v := value[T]{label: l.value.label, live: to, plain: l.value.plain}
		return v.decode(b)
	}
	t := reflect.TypeFor[T]()
	each := int(t.Elem().Size())
	if len(b)%each != 0 {
		return fmt.Errorf("elastic: local %q: %d bytes are no whole numbers", l.value.label, len(b))
	}
	fresh := reflect.MakeSlice(t, len(b)/each, len(b)/each)
	copy(flatMemory(fresh), b)
	reflect.ValueOf(to).Elem().Set(fresh)
	return nil
}

func (l *local[T]) read(p *piece) error { return l.decode(p.bytes(), l.value.live) }

func (l *local[T]) deal(pieces []*piece, rank, size int) error {
	all := make([]Piece[T], len(pieces))
	for i, p := range pieces {
		all[i] = Piece[T]{Rank: i, Lost: p == nil}
		if p == nil {
			continue
		}
		if err := l.decode(p.bytes(), &all[i].Value); err != nil {
			return err
		}
	}
	v, err := l.redistribute(all, rank, size)
	if err != nil {
		return fmt.Errorf("elastic: local %q: redistribute: %w", l.value.label, err)
	}
	*l.value.live = v
	return nil
}
