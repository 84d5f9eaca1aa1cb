package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/internal/image"
)

// Part is one component of a State: a value that can be saved, restored and made equal on every
// rank.
//
// A Part must be used by one goroutine at a time.
type Part interface {
	// Save replaces the last private copy by a copy of the live value. If it fails, the last copy
	// must stay.
	Save() error
	// Restore sets the live value to the last Save.
	Restore() error
	// Sync sets the live value of every rank to that of root. It is collective. If it fails, the
	// live value may be partly overwritten; a Restore follows.
	Sync(ctx context.Context, g *collective.Group, root int) error
}

// Imaged is implemented by a Part of another package whose value is to be included in digests and
// checkpoints, as those of this package's parts are.
type Imaged interface {
	Part
	// Image returns the value of the last Save. Equal values give equal bytes on all ranks. The
	// State calls it after every Save; nothing may write to the bytes afterwards.
	Image() ([]byte, error)
	// SetImage sets the live value to that of an image.
	SetImage([]byte) error
}

// Deferred is implemented by an Imaged part whose Save returns before the copy is complete, because
// copying takes long and the live value may already be changed.
type Deferred interface {
	Imaged
	// Pending returns a function that blocks until the last Save is complete and returns the saved
	// value. A goroutine of the State calls it at most once per Save, while it uses the part for
	// nothing else. An error means that the Save has failed: Restore and Image then refer to the
	// previous one.
	Pending() func() ([]byte, error)
}

// Exposed is implemented by a part whose live value other ranks may write to, for example device
// memory that they have mapped for its collectives. Writes of an aborted operation may end after
// this rank's Restore, so Run calls Restore again when every member of the next world has left that
// operation, before the OnReset functions.
type Exposed interface {
	Part
	// Exposed reports whether others may have written to the live value since the world began.
	Exposed() bool
}

// content describes a part to its State. Optional functions are nil. Either memory or both encode
// and decode are set.
type content struct {
	self   Part          // the part; a type that embeds it is another, and its own methods must be called
	name   string        // unique within a State; empty: unnamed
	layout func() string // describes the part; states are compatible if all ranks have the same layouts
	kind   func() string // the layout in checkpoints, for which options that may change are left out; nil: layout

	// memory returns the live value of a part that consists of memory only, always in the same
	// number of slices. A sync may write to it chunk by chunk.
	memory  func() [][]byte
	watched bool // see Watched

	encode func() ([]byte, error) // returns the live value; nothing writes to the bytes afterwards
	decode func([]byte) error     // sets the live value from encoded bytes
	later  func() func() ([]byte, error)
	// canonical converts encoded bytes to bytes that are equal in all processes if the values are;
	// nil: the encoded bytes are.
	canonical func([]byte) ([]byte, error)
	// opaque: encoded bytes of equal values can differ between processes, so they are not compared
	// after a sync.
	opaque bool

	tensors func(name string) []checkpoint.Tensor // the part's tensors in a checkpoint; nil: one of bytes
	text    func([]byte) string                   // formats encoded bytes for logs; nil: no text

	setRank func(rank, size int) // nil: the part does not depend on the rank
	local   localPart            // nil: all ranks have the same value
	// foreign: a part of another package; the State calls its Save and Restore too.
	foreign bool
}

// ownPart is a part of this package. A State does not call its Save and Restore: it stores its
// value in one image with all other parts, so that a save is atomic.
type ownPart interface {
	Part
	content() *content
}

// contentOf returns the content of p; nil if p is in no image.
func contentOf(p Part) *content {
	if o, ok := p.(ownPart); ok {
		if c := o.content(); c.self == p {
			return c
		}
	}
	f, ok := p.(Imaged)
	if !ok {
		return nil
	}
	c := &content{self: p, foreign: true, kind: func() string { return fmt.Sprintf("%T", p) }, encode: f.Image, decode: f.SetImage}
	c.layout = c.kind
	if d, ok := p.(Deferred); ok {
		c.later = d.Pending
	}
	return c
}

// blobs returns the number of blobs that the part has in an image.
func (c *content) blobs() int {
	if c.memory != nil {
		return len(c.memory())
	}
	return 1
}

// sources appends the sources from which an image copies the live value.
func (c *content) sources(to []image.Source) ([]image.Source, error) {
	switch {
	case c.memory != nil:
		for _, b := range c.memory() {
			to = append(to, image.Source{Bytes: b})
		}
		return to, nil
	case c.later != nil:
		return append(to, image.Source{Later: c.later()}), nil
	}
	b, err := c.encode()
	if err != nil {
		return to, err
	}
	return append(to, image.Source{Bytes: b, Given: true}), nil
}

// restore sets the live value from the part's blobs, which are the first of pieces.
func (c *content) restore(pieces []image.Blob) error {
	if c.memory == nil {
		return c.decode(pieces[0].Bytes())
	}
	for i, b := range c.memory() {
		pieces[i].CopyTo(b)
	}
	return nil
}

// sums returns the checksums of the part's blobs, which are the first of pieces. They are equal in
// all processes if the values are.
func (c *content) sums(pieces []image.Blob) (sums []uint32, err error) {
	switch {
	case c.local != nil:
		return nil, nil
	case c.canonical != nil:
		b, err := c.canonical(pieces[0].Bytes())
		if err != nil {
			return nil, err
		}
		return sumsOf(b), nil
	}
	for i := range c.blobs() {
		sums = append(sums, pieces[i].Sums()...)
	}
	return sums, nil
}

// maxCarried is the size in bytes up to which a tensor is part of the opening message of a sync.
const maxCarried = 16 << 10

// carried reports whether the part is part of the opening message of a sync. Ranks with the same
// layouts agree on it.
func (c *content) carried() bool {
	return !c.foreign && c.local == nil && (c.memory == nil || c.size() <= maxCarried)
}

// inMemory reports whether a sync can send only the part's changed chunks.
func (c *content) inMemory() bool { return c.memory != nil && !c.carried() }

// size returns the size of the part's memory in bytes.
func (c *content) size() (n int) {
	for _, b := range c.memory() {
		n += len(b)
	}
	return n
}

// write returns the live value for a message.
func (c *content) write() ([]byte, error) {
	if c.memory != nil {
		return slices.Concat(c.memory()...), nil
	}
	return c.encode()
}

// read sets the live value from the bytes of write.
func (c *content) read(b []byte) error {
	if c.memory == nil {
		return c.decode(b)
	}
	if n := c.size(); len(b) != n {
		return fmt.Errorf("elastic: %s: %d bytes instead of %d", c.layout(), len(b), n)
	}
	for _, live := range c.memory() {
		b = b[copy(live, b):]
	}
	return nil
}

// sync sets the live value to that of root with messages of its own.
func (c *content) sync(ctx context.Context, g *collective.Group, root int) error {
	if c.local != nil {
		return nil // State.Sync synchronises local parts
	}
	if c.memory != nil {
		for _, b := range c.memory() {
			if err := collective.Broadcast(ctx, g, b, root); err != nil {
				return err
			}
		}
		return nil
	}
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

// kindName identifies the part in a checkpoint.
func (c *content) kindName() string {
	if c.kind != nil {
		return c.kind()
	}
	return c.layout()
}

// tensorsAs returns the tensors of the part in a checkpoint under the given name.
func (c *content) tensorsAs(name string) []checkpoint.Tensor {
	if c.tensors != nil {
		return c.tensors(name)
	}
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

// textOf formats the part's value for logs.
func (c *content) textOf(pieces []image.Blob) string {
	if c.text == nil {
		return ""
	}
	text := c.text(pieces[0].Bytes())
	if len(text) > maxText {
		return text[:maxText] + "…"
	}
	return text
}

// maxText limits the length of a part's text in bytes.
const maxText = 200

// part implements Part by its content.
type part struct {
	c    content
	kept savedAlone
}

func newPart(c content) *part {
	p := &part{c: c}
	p.c.self = p
	return p
}

func (p *part) content() *content { return &p.c }
func (p *part) Save() error       { return p.kept.save(&p.c) }
func (p *part) Restore() error    { return p.kept.restore(&p.c) }

func (p *part) Sync(ctx context.Context, g *collective.Group, root int) error {
	return p.c.sync(ctx, g, root)
}

var errNothingSaved = errors.New("elastic: there is no save to restore")

// savedAlone holds the save of a part that is used without a State.
type savedAlone struct {
	store   image.Store
	sources []image.Source
}

func (a *savedAlone) save(c *content) (err error) {
	if a.sources, err = c.sources(a.sources[:0]); err != nil {
		return err
	}
	p := a.store.Begin(0, a.sources)
	p.Copy()
	p.Seal()
	return nil
}

func (a *savedAlone) restore(c *content) error {
	last := a.store.Last()
	if last == nil {
		return errNothingSaved
	}
	return c.restore(last.Blobs())
}
