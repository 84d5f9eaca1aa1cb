package elastic

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// Part is one piece of a State: something that can be kept, gone back to, and made the same on
// every rank.
//
// Parts are used by one goroutine at a time.
type Part interface {
	// Save keeps a private copy of the live value in place of the last one. Where it fails, the
	// last one must stay.
	Save() error
	// Restore makes the live value that of the last Save.
	Restore() error
	// Sync makes the live value of every rank that of root. It is collective, and may leave the
	// live value half overwritten where it fails: a Restore follows.
	Sync(ctx context.Context, g *collective.Group, root int) error
}

// Imaged is what a Part of another package may be besides, in order to be in digests and
// checkpoints as the parts of this package are.
type Imaged interface {
	Part
	// Image returns what the last Save has kept: bytes that are the same where the values are, on
	// any rank. It is called after every Save of the State; nobody writes to the bytes afterwards.
	Image() ([]byte, error)
	// SetImage makes the live value that of an image.
	SetImage([]byte) error
}

// Deferred is what an Imaged part may be besides, where a copy takes long and the live value can be
// given free at once: its Save returns before the copy is whole.
type Deferred interface {
	Imaged
	// Pending returns what blocks until the last Save is whole, and then gives what it has kept. It
	// is called by a goroutine of the State, at most once for each Save, while nothing else is done
	// with the part. An error says that the Save has failed after all: Restore and Image are then
	// of the one before.
	Pending() func() ([]byte, error)
}

// Exposed is what a part may be besides, to whose live value other ranks may write, as those that
// have memory of a device open do in its collectives. What they had begun of an operation that was
// aborted may end after this rank's Restore. So Run calls Restore once more when every member of
// the next world has left that operation, before the OnReset functions.
type Exposed interface {
	Part
	// Exposed tells whether others may have written to the live value since the world began.
	Exposed() bool
}

// kept is a part that is in images.
type kept interface {
	// sources appends what the live value is in an image; always as many pieces. It fails before
	// anything is kept.
	sources([]image.Source) ([]image.Source, error)
	// restore makes the live value that of the pieces, of which the first are those that sources
	// appends.
	restore([]image.Piece) error
	// sums returns the checksums of these pieces, which are the same in all processes where the
	// values are.
	sums([]image.Piece) ([]uint32, error)
}

// own is a Part of this package. A State does not call its Save and Restore, but keeps what it
// holds in an image together with all others, so that either all of them are saved or none.
type own interface {
	Part
	kept
	// self is the part itself. It tells it from a user's type that embeds it, whose own methods
	// must be called.
	self() Part
	// name is unique within a State; empty for a part without one.
	name() string
	// layout says what it is; the same on all ranks, or their states do not fit.
	layout() string
}

// foreign is a user's part in images. The State calls its Save and Restore as well.
type foreign struct{ Imaged }

func (f foreign) sources(to []image.Source) ([]image.Source, error) {
	if d, ok := f.Imaged.(Deferred); ok {
		return append(to, image.Source{Later: d.Pending()}), nil
	}
	b, err := f.Image()
	return append(to, image.Source{Bytes: b, Given: true}), err
}

func (f foreign) restore(pieces []image.Piece) error          { return f.SetImage(pieces[0].Bytes()) }
func (f foreign) sums(pieces []image.Piece) ([]uint32, error) { return pieces[0].Sums(), nil }

// carried is a part that may be small enough to travel with others in the one message that begins a
// sync.
type carried interface {
	own
	// travels tells whether it is; all ranks agree where their layouts do.
	travels() bool
	encode() ([]byte, error) // the live value
	decode([]byte) error     // into the live value
}

// inMemory is a part that is nothing but memory, which a sync may write to piece by piece.
type inMemory interface {
	own
	memory() [][]byte // as many as sources appends, and the same
}

// asInMemory returns o where a sync can take of it what differs, or nil.
func asInMemory(o own) inMemory {
	if m, ok := o.(inMemory); ok && asCarried(o) == nil {
		return m
	}
	return nil
}

// placed is a part that depends on the rank.
type placed interface{ place(rank, size int) }

// asOwn returns p as a part of ours, or nil.
func asOwn(p Part) own {
	if o, ok := p.(own); ok && o.self() == p {
		return o
	}
	return nil
}

// asCarried returns o where it travels in the message that begins a sync, or nil.
func asCarried(o own) carried {
	if c, ok := o.(carried); ok && c.travels() {
		return c
	}
	return nil
}

var errNothingSaved = errors.New("elastic: nothing has been saved yet that could be restored")

// alone keeps what a part holds where it is saved by itself and not by a State.
type alone struct {
	store   image.Store
	sources []image.Source
}

func (a *alone) save(o own) (err error) {
	if a.sources, err = o.sources(a.sources[:0]); err != nil {
		return err
	}
	p := a.store.Begin(0, a.sources)
	p.Copy()
	p.Seal()
	return nil
}

func (a *alone) restore(o own) error {
	last := a.store.Last()
	if last == nil {
		return errNothingSaved
	}
	return o.restore(last.Pieces())
}

// carriedTensor is the size in bytes up to which a tensor travels with others.
const carriedTensor = 16 << 10

// Tensor is a Part whose live value is data, broadcast in place. For the last commit it keeps a
// copy of data, and while the next is made copies of the chunks of 1 MiB that have changed. The
// name must be unique within a State. The slice must not be replaced by another; its length and
// type must be the same on every rank. What has changed is found by reading all of data; see
// [Watched].
func Tensor[T collective.Element](name string, data []T) Part {
	return &tensor[T]{label: name, live: data}
}

type tensor[T collective.Element] struct {
	label string
	live  []T
	kept  alone
	watchable
}

func (t *tensor[T]) Save() error    { return t.kept.save(t) }
func (t *tensor[T]) Restore() error { return t.kept.restore(t) }

func (t *tensor[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	return collective.Broadcast(ctx, g, t.live, root)
}

func (t *tensor[T]) self() Part   { return t }
func (t *tensor[T]) name() string { return t.label }
func (t *tensor[T]) layout() string {
	return fmt.Sprintf("tensor %q: %T of %d", t.label, t.live, len(t.live))
}

func (t *tensor[T]) memory() [][]byte { return [][]byte{memoryOf(t.live)} }

func (t *tensor[T]) sources(to []image.Source) ([]image.Source, error) {
	return append(to, image.Source{Bytes: memoryOf(t.live)}), nil
}

func (t *tensor[T]) restore(pieces []image.Piece) error {
	pieces[0].CopyTo(memoryOf(t.live))
	return nil
}

func (t *tensor[T]) sums(pieces []image.Piece) ([]uint32, error) { return pieces[0].Sums(), nil }

func (t *tensor[T]) travels() bool           { return len(memoryOf(t.live)) <= carriedTensor }
func (t *tensor[T]) encode() ([]byte, error) { return memoryOf(t.live), nil }

func (t *tensor[T]) decode(b []byte) error {
	live := memoryOf(t.live)
	if len(b) != len(live) {
		return fmt.Errorf("elastic: tensor %q: %d bytes for one of %d", t.label, len(b), len(live))
	}
	copy(live, b)
	return nil
}

// memoryOf is the memory of data, without a copy.
func memoryOf[T collective.Element](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(data[0])))
}

// Value is a Part whose live value is *v, which may be anything that encoding/gob can encode; as
// with gob, unexported fields are not carried. A Restore or Sync gives *v a fresh value: maps and
// slices of the old one are neither merged into nor written to. The name must be unique within a
// State. For digests a value is compared field by field, and a type that has a GobEncode or
// MarshalBinary must give the same bytes for the same value.
func Value[T any](name string, v *T) Part {
	t := reflect.TypeFor[T]()
	return &value[T]{label: name, live: v, plain: isNumber(t.Kind()) && reflect.PointerTo(t).NumMethod() == 0}
}

type value[T any] struct {
	label string
	live  *T
	plain bool // a number or a truth without methods: its memory says all, and gob would take longer
	kept  alone
}

func isNumber(k reflect.Kind) bool {
	return k >= reflect.Bool && k <= reflect.Float64 && k != reflect.Uintptr
}

// memory is the value's own.
func (v *value[T]) memory() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v.live)), unsafe.Sizeof(*v.live))
}

func (v *value[T]) Save() error    { return v.kept.save(v) }
func (v *value[T]) Restore() error { return v.kept.restore(v) }

func (v *value[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	return syncCarried(ctx, g, root, v)
}

func (v *value[T]) self() Part     { return v }
func (v *value[T]) name() string   { return v.label }
func (v *value[T]) layout() string { return fmt.Sprintf("value %q: %v", v.label, reflect.TypeFor[T]()) }

func (v *value[T]) sources(to []image.Source) ([]image.Source, error) { return encoded(to, v) }
func (v *value[T]) restore(pieces []image.Piece) error                { return v.decode(pieces[0].Bytes()) }
func (v *value[T]) travels() bool                                     { return true }

func (v *value[T]) onlyCarried() bool { return !v.plain }

func (v *value[T]) sums(pieces []image.Piece) ([]uint32, error) {
	if v.plain {
		return pieces[0].Sums(), nil
	}
	fresh, err := v.decoded(pieces[0].Bytes())
	if err != nil {
		return nil, err
	}
	b, err := appendCanonical(nil, reflect.ValueOf(fresh).Elem())
	if err != nil {
		return nil, fmt.Errorf("elastic: value %q: %w", v.label, err)
	}
	return sumsOf(b), nil
}

func (v *value[T]) encode() ([]byte, error) {
	if v.live == nil {
		return nil, fmt.Errorf("elastic: value %q: its pointer is nil", v.label)
	}
	if v.plain {
		return bytes.Clone(v.memory()), nil
	}
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(v.live); err != nil {
		return nil, fmt.Errorf("elastic: value %q: encode: %w", v.label, err)
	}
	return b.Bytes(), nil
}

func (v *value[T]) decode(b []byte) error {
	if v.live == nil {
		return fmt.Errorf("elastic: value %q: its pointer is nil", v.label)
	}
	if v.plain {
		if len(b) != len(v.memory()) || reflect.TypeFor[T]().Kind() == reflect.Bool && b[0] > 1 {
			return fmt.Errorf("elastic: value %q: %d bytes that are none of its", v.label, len(b))
		}
		copy(v.memory(), b)
		return nil
	}
	fresh, err := v.decoded(b)
	if err != nil {
		return err
	}
	*v.live = *fresh
	return nil
}

func (v *value[T]) decoded(b []byte) (*T, error) {
	fresh := new(T)
	if err := gob.NewDecoder(bytes.NewReader(b)).Decode(fresh); err != nil {
		return nil, fmt.Errorf("elastic: value %q: decode: %w", v.label, err)
	}
	return fresh, nil
}

// encoded appends the live value of c, encoded anew, as the one piece of a part.
func encoded(to []image.Source, c carried) ([]image.Source, error) {
	b, err := c.encode()
	if err != nil {
		return to, err
	}
	return append(to, image.Source{Bytes: b, Given: true}), nil
}

// syncCarried makes the live value of c that of root, in a message of its own.
func syncCarried(ctx context.Context, g *collective.Group, root int, c carried) error {
	var b []byte
	var err error
	if g.Rank() == root {
		if b, err = c.encode(); err != nil {
			return err
		}
	}
	if b, err = collective.BroadcastBytes(ctx, g, b, root); err != nil || g.Rank() == root {
		return err
	}
	return c.decode(b)
}
