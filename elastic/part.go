package elastic

import (
	"context"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Part is one component of a State: a value that can be saved, restored and made equal on every
// rank.
//
// A Part must be used by one goroutine at a time.
type Part interface {
	// Save replaces the last private copy by a copy of the live value. If it fails, it must leave
	// the last copy in place.
	Save() error
	// Restore sets the live value to the last Save.
	Restore() error
	// Sync sets the live value of every rank to that of root. It is collective. If it fails, the
	// live value may be partly overwritten; a Restore follows.
	Sync(ctx context.Context, g *collective.Group, root int) error
}

// Imaged is implemented by a Part of another package if digests and checkpoints must include its
// value, as they include those of this package's parts.
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
	// Exposed reports whether other ranks may have written to the live value since the world began.
	Exposed() bool
}

// part implements Part for its content. A State uses only the content; store and sources hold the
// last save of a part that is used without a State.
type part struct {
	c       content
	store   snapshot.Store
	sources []snapshot.Source
}

func newPart(c content) *part {
	p := &part{c: c}
	p.c.self = p
	return p
}

func (p *part) content() *content { return &p.c }

// Save keeps a copy of the live value.
func (p *part) Save() error {
	if p.sources == nil {
		p.sources = make([]snapshot.Source, p.c.blobs())
	}
	if err := p.c.sources(p.sources); err != nil {
		return err
	}
	next := p.store.Begin(0, p.sources)
	next.Copy()
	next.Seal()
	return nil
}

// Restore sets the live value to that of the last Save.
func (p *part) Restore() error {
	last := p.store.Last()
	if last == nil {
		return errNothingSaved
	}
	return p.c.restore(last.Blobs(), allChanged)
}

// Sync sets the live value to root's, and the rank and size of the part, if it has them, to those
// of g. It is collective.
func (p *part) Sync(ctx context.Context, g *collective.Group, root int) error {
	if p.c.setRank != nil {
		p.c.setRank(g.Rank(), g.Size())
	}
	return p.c.sync(ctx, g, root)
}
