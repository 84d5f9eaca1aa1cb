package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// content describes a part to its State. Optional functions are nil. Either memory or both encode
// and decode are set.
type content struct {
	self   Part          // the part; if another type embeds it, self is of that type, whose methods must be called
	name   string        // unique within a State; empty: unnamed
	layout func() string // describes the part; states are compatible if all ranks have the same layouts
	absent bool          // its slice is nil, so that training cannot write to it
	kind   func() string // the layout in checkpoints, without options that may change; nil: layout

	// memory returns the live value of a part that consists of memory only, always in the same
	// number of slices. A sync may write to it chunk by chunk.
	memory func() [][]byte

	encode func() ([]byte, error) // returns the live value; nothing writes to the bytes afterwards
	decode func([]byte) error     // sets the live value from encoded bytes
	later  func() func() ([]byte, error)
	comparison
	variable

	tensors func(name string) []checkpoint.Tensor // the part's tensors in a checkpoint; nil: one of bytes
	text    func([]byte) string                   // formats encoded bytes for logs; nil: no text

	setRank func(rank, size int) // nil: the part does not depend on the rank
	local   localPart            // nil: all ranks have the same value
	// foreign means that the part is of another package. The State then calls its Save and Restore
	// too.
	foreign bool
}

// variable is what is known about the program's variable of a part.
type variable struct {
	number  *int         // the live value, if it is an int; nil: it is not
	moved   func() error // fails if a tensor is no longer the part's memory; nil: unknown
	watched bool         // see Watched
}

// comparison describes how encoded bytes of several processes are compared.
type comparison struct {
	// canonical converts encoded bytes to bytes that are equal in all processes if the values are
	// equal; nil: the encoded bytes already are.
	canonical func([]byte) ([]byte, error)
	// opaque means that encoded bytes of equal values can differ between processes, so that they
	// are not compared after a sync.
	opaque bool
}

// ownPart is a part of this package. A State does not call its Save and Restore: the State stores
// the values of all such parts in one snapshot, so that a save is atomic.
type ownPart interface {
	Part
	content() *content
}

// contentOf returns the content of p; nil if p is not part of snapshots.
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

// blobs returns the number of blobs that the part has in a snapshot.
func (c *content) blobs() int {
	if c.memory != nil {
		return len(c.memory())
	}
	return 1
}

// sources sets the sources from which a snapshot copies the live value. They are the first elements
// of to.
func (c *content) sources(to []snapshot.Source) error {
	switch {
	case c.memory != nil:
		if c.moved != nil {
			if err := c.moved(); err != nil {
				return err
			}
		}
		for i, b := range c.memory() {
			to[i] = snapshot.Source{Bytes: b}
		}
	case c.later != nil:
		to[0] = snapshot.Source{Later: c.later()}
	default:
		b, err := c.encode()
		if err != nil {
			return err
		}
		to[0] = snapshot.Source{Bytes: b, Given: true}
	}
	return nil
}

// restore sets the live value from the part's blobs, which are the first elements of pieces.
// changed returns, for each blob, the chunks that may differ from the live value; nil: all chunks.
func (c *content) restore(pieces []snapshot.Blob, changed func(blob int) []bool) error {
	if c.memory == nil {
		return c.decode(pieces[0].Bytes())
	}
	for i, b := range c.memory() {
		pieces[i].Restore(b, changed(i))
	}
	return nil
}

// allChanged says that any chunk of any blob may have changed.
func allChanged(int) []bool { return nil }

// sums returns the checksums of the part's blobs, which are the first elements of pieces. They are
// equal in all processes if the values are equal.
func (c *content) sums(pieces []snapshot.Blob) (sums []uint32, err error) {
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

// carried reports whether the opening message of a sync includes the part. Ranks with the same
// layouts agree on that.
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

// write returns the live value, encoded for a message.
func (c *content) write() ([]byte, error) {
	if c.memory != nil {
		return slices.Concat(c.memory()...), nil
	}
	return c.encode()
}

// read sets the live value from bytes that write has returned.
func (c *content) read(b []byte) error {
	if c.memory == nil {
		return c.decode(b)
	}
	if n := c.size(); len(b) != n {
		return fmt.Errorf("elastic: %s: the value has %d bytes instead of %d", c.layout(), len(b), n)
	}
	for _, live := range c.memory() {
		b = b[copy(live, b):]
	}
	return nil
}

// sync sets the live value to that of root, with messages for this part alone.
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
func (c *content) textOf(pieces []snapshot.Blob) string {
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

var errNothingSaved = errors.New("elastic: there is no save to restore")

// parts are the parts of a State and their positions in its snapshots.
type parts struct {
	all   []Part
	of    []*content // content of all[i]; nil: not in snapshots
	first []int      // index of all[i]'s first blob in a snapshot
	blobs int        // number of blobs of a snapshot
}

// newParts puts the parts of this package first in snapshots, because their saves precede those of
// foreign parts. Nil parts and duplicate names are errors.
func newParts(all []Part) (parts, error) {
	ps := parts{all: all, of: make([]*content, len(all)), first: make([]int, len(all))}
	var err error
	names := make(map[string]bool)
	for i, p := range all {
		if p == nil {
			return ps, fmt.Errorf("elastic: part %d of the state is nil", i)
		}
		ps.of[i] = contentOf(p)
		if c := ps.of[i]; c != nil && c.absent {
			return ps, fmt.Errorf("elastic: tensor %q of the state is nil", c.name)
		}
		if !ps.own(i) {
			continue
		}
		if name := ps.of[i].name; name != "" && names[name] {
			err = fmt.Errorf("elastic: two parts of the state are named %q", name)
		} else {
			names[name] = true
		}
	}
	for _, own := range []bool{true, false} {
		for i, c := range ps.of {
			if c != nil && ps.own(i) == own {
				ps.first[i] = ps.blobs
				ps.blobs += c.blobs()
			}
		}
	}
	return ps, err
}

// own reports whether part i is of this package.
func (ps *parts) own(i int) bool { return ps.of[i] != nil && !ps.of[i].foreign }

// name returns the name of part i for messages.
func (ps *parts) name(i int) string {
	if c := ps.of[i]; c != nil && c.name != "" {
		return fmt.Sprintf("%q", c.name)
	}
	return fmt.Sprintf("part %d (%T)", i, ps.all[i])
}

// fileName returns the name of part i in a checkpoint.
func (ps *parts) fileName(i int) string {
	if c := ps.of[i]; c != nil && c.name != "" {
		return c.name
	}
	return fmt.Sprintf("part.%d", i)
}

func (ps *parts) layouts() []string {
	all := make([]string, len(ps.all))
	for i, c := range ps.of {
		if c != nil {
			all[i] = c.layout()
		} else {
			all[i] = fmt.Sprintf("%T", ps.all[i])
		}
	}
	return all
}

// withoutImage returns the names of the parts that no image includes.
func (ps *parts) withoutImage() (names []string) {
	for i, c := range ps.of {
		if c == nil {
			names = append(names, ps.name(i))
		}
	}
	return names
}

// anyWatched reports whether the program has asked for a part to be Watched.
func (ps *parts) anyWatched() bool {
	return slices.ContainsFunc(ps.of, func(c *content) bool { return c != nil && c.watched })
}

func (ps *parts) setRank(rank, size int) {
	for _, c := range ps.of {
		if c != nil && c.setRank != nil {
			c.setRank(rank, size)
		}
	}
}

func (ps *parts) local() (all []localPart) {
	for _, c := range ps.of {
		if c != nil && c.local != nil {
			all = append(all, c.local)
		}
	}
	return all
}

// inMemory calls f for slice j of each part i whose changed chunks a sync can send.
func (ps *parts) inMemory(f func(i, j int, live []byte)) {
	for i, c := range ps.of {
		if c == nil || !c.inMemory() {
			continue
		}
		for j, b := range c.memory() {
			f(i, j, b)
		}
	}
}

// memory returns these slices, and a description of their parts.
func (ps *parts) memory() (layout string, memory [][]byte) {
	var text strings.Builder
	ps.inMemory(func(i, j int, live []byte) {
		if j == 0 {
			fmt.Fprintf(&text, "%d %s\n", i, ps.of[i].layout())
		}
		memory = append(memory, live)
	})
	return text.String(), memory
}

// memoryIn returns the blobs of these slices among those of a snapshot.
func (ps *parts) memoryIn(blobs []snapshot.Blob) (pieces []*snapshot.Blob) {
	ps.inMemory(func(i, j int, _ []byte) { pieces = append(pieces, &blobs[ps.first[i]+j]) })
	return pieces
}

// piece returns blob j of part i in a snapshot.
func (ps *parts) piece(m *snapshot.Snapshot, i, j int) *snapshot.Blob {
	return &m.Blobs()[ps.first[i]+j]
}

// carried returns the encoded live values of the parts that the opening of a sync includes; nil for
// others.
func (ps *parts) carried() ([][]byte, error) {
	values := make([][]byte, len(ps.of))
	for i, c := range ps.of {
		if c == nil || !c.carried() {
			continue
		}
		var err error
		if values[i], err = c.write(); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// readCarried sets the live values of these parts.
func (ps *parts) readCarried(values [][]byte) error {
	if len(values) != len(ps.of) {
		return errUnlike
	}
	for i, c := range ps.of {
		if c == nil || !c.carried() {
			continue
		}
		if err := c.read(values[i]); err != nil {
			return err
		}
	}
	return nil
}

// sums returns the checksums of the chunks of each part, nil for parts that are not in snapshots.
// After a sync, it leaves out opaque parts, for which the checksum of the opening message stands.
// It does not read live values.
func (ps *parts) sums(m *snapshot.Snapshot, synced bool) ([][]uint32, error) {
	if m == nil {
		return nil, errNothingSaved
	}
	return ps.sumsOf(m.Blobs(), synced)
}

// sumsOf is like sums, for the blobs of a snapshot.
func (ps *parts) sumsOf(blobs []snapshot.Blob, synced bool) ([][]uint32, error) {
	sums := make([][]uint32, len(ps.all))
	for i, c := range ps.of {
		if c == nil || synced && c.opaque {
			continue
		}
		var err error
		if sums[i], err = c.sums(blobs[ps.first[i]:]); err != nil {
			return nil, err
		}
	}
	return sums, nil
}

// restore restores the selected parts from a snapshot, which may be nil. torn means that foreign
// parts may have saved a newer value than the snapshot's. changed returns the chunks of a blob of
// the snapshot that may differ from the live value; nil: all chunks.
func (ps *parts) restore(m *snapshot.Snapshot, torn bool, which func(Part) bool, changed func(blob int) []bool) (errs []error) {
	for i, p := range ps.all {
		if !which(p) {
			continue
		}
		var err error
		switch {
		case m != nil && (ps.own(i) || torn && ps.of[i] != nil):
			err = ps.of[i].restore(m.Blobs()[ps.first[i]:], func(j int) []bool { return changed(ps.first[i] + j) })
		case ps.own(i):
			err = errNothingSaved
		default:
			err = p.Restore()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("elastic: restore part %d: %w", i, err))
		}
	}
	return errs
}

// sources sets the sources of a snapshot, of either this package's parts or the foreign ones. It
// calls Save of foreign parts first.
func (ps *parts) sources(to []snapshot.Source, own bool) error {
	for i, p := range ps.all {
		if ps.own(i) != own {
			continue
		}
		if !own {
			if err := p.Save(); err != nil {
				return fmt.Errorf("elastic: save part %d (%T): %w", i, p, err)
			}
		}
		c := ps.of[i]
		if c == nil {
			continue
		}
		if err := c.sources(to[ps.first[i]:]); err != nil && !own {
			return fmt.Errorf("elastic: image of part %d (%T): %w", i, p, err)
		} else if err != nil {
			return err
		}
	}
	return nil
}
