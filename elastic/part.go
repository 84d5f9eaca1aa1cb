package elastic

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"reflect"

	"github.com/hvdrun/hvdrun/collective"
)

// Part is one piece of a State: something that can be kept, gone back to, and made the same on every rank.
//
// Parts are used by one goroutine at a time.
type Part interface {
	// Save keeps a private copy of the live value in place of the last one. Where it fails, the last one must stay.
	Save() error
	// Restore makes the live value that of the last Save.
	Restore() error
	// Sync makes the live value of every rank that of root. It is collective, and may leave the live value half
	// overwritten where it fails: a Restore follows.
	Sync(ctx context.Context, g *collective.Group, root int) error
}

// own is a Part of this package. Its Save has two steps, so that either all of them are kept or none.
type own interface {
	Part
	// self is the part itself. It tells it from a user's type that embeds it, whose own methods must be called.
	self() Part
	// name is unique within a State; empty for a part without one.
	name() string
	// layout says what it is; the same on all ranks, or their states do not fit.
	layout() string
	// stage prepares a save without touching the last one.
	stage() error
	// keep makes what was staged the last save. It cannot fail.
	keep()
}

// carried is a part small enough to travel with others in the one message that begins a sync.
type carried interface {
	own
	encode() ([]byte, error) // the live value
	decode([]byte) error     // into the live value
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

var errNothingSaved = errors.New("elastic: nothing has been saved yet that could be restored")

// Tensor is a Part whose live value is data, broadcast in place. It keeps one copy of data for the last commit. The
// name must be unique within a State. The slice must not be replaced by another; its length and type must be the same
// on every rank.
func Tensor[T collective.Element](name string, data []T) Part {
	return &tensor[T]{label: name, live: data, saved: make([]T, len(data))}
}

type tensor[T collective.Element] struct {
	label       string
	live, saved []T
	hasSaved    bool
}

func (t *tensor[T]) Save() error {
	t.keep()
	return nil
}

func (t *tensor[T]) Restore() error {
	if !t.hasSaved {
		return errNothingSaved
	}
	copy(t.live, t.saved)
	return nil
}

func (t *tensor[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	return collective.Broadcast(ctx, g, t.live, root)
}

func (t *tensor[T]) self() Part   { return t }
func (t *tensor[T]) name() string { return t.label }
func (t *tensor[T]) layout() string {
	return fmt.Sprintf("tensor %q: %T of %d", t.label, t.live, len(t.live))
}
func (t *tensor[T]) stage() error { return nil }

func (t *tensor[T]) keep() {
	copy(t.saved, t.live)
	t.hasSaved = true
}

// Value is a Part whose live value is *v, which may be anything that encoding/gob can encode; as with gob, unexported
// fields are not carried. A Restore or Sync gives *v a fresh value: maps and slices of the old one are neither merged
// into nor written to. The name must be unique within a State.
func Value[T any](name string, v *T) Part {
	return &value[T]{label: name, live: v}
}

type value[T any] struct {
	label         string
	live          *T
	staged, saved []byte // encoded; saved is nil before the first save
}

func (v *value[T]) Save() error {
	if err := v.stage(); err != nil {
		return err
	}
	v.keep()
	return nil
}

func (v *value[T]) Restore() error {
	if v.saved == nil {
		return errNothingSaved
	}
	return v.decode(v.saved)
}

func (v *value[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	return syncCarried(ctx, g, root, v)
}

func (v *value[T]) self() Part     { return v }
func (v *value[T]) name() string   { return v.label }
func (v *value[T]) layout() string { return fmt.Sprintf("value %q: %v", v.label, reflect.TypeFor[T]()) }

func (v *value[T]) stage() (err error) {
	v.staged, err = v.encode()
	return err
}

func (v *value[T]) keep() { v.saved, v.staged = v.staged, nil }

func (v *value[T]) encode() ([]byte, error) {
	if v.live == nil {
		return nil, fmt.Errorf("elastic: value %q: its pointer is nil", v.label)
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
	var fresh T
	if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&fresh); err != nil {
		return fmt.Errorf("elastic: value %q: decode: %w", v.label, err)
	}
	*v.live = fresh
	return nil
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
