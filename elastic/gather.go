package elastic

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// gather brings all pieces of the last commit to rank 0, for a checkpoint, where one is wanted; all
// ranks must want the same. Without Local parts it does nothing.
func (s *State) gather(ctx context.Context, wanted bool) error {
	l := &s.locals
	l.gathered = nil
	set := l.set(l.current)
	if !wanted || len(l.parts) == 0 || set == nil {
		return nil
	}
	g := s.worker.Group()
	parts := make([][]byte, g.Size())
	if set.mine != 0 {
		own := set.own()
		m := appendHead(nil, set.id, saveID{}, len(own))
		for _, n := range own {
			m = appendBundle(m, n, -1, set.of[n])
		}
		parts[0] = m
	}
	all, err := collective.AllToAll(ctx, g, parts)
	if err != nil || set.mine != 0 {
		return err
	}
	whole := &pieceSet{id: set.id, size: set.size, strays: set.strays, of: make(map[int]bundle)}
	for _, n := range set.own() {
		whole.of[n] = set.of[n]
	}
	for from, m := range all {
		if len(m) == 0 {
			continue
		}
		got, err := l.parse(m, set.id, nil)
		if err != nil {
			return fmt.Errorf("elastic: local parts: what rank %d gave for a checkpoint: %w", from, err)
		}
		for n, b := range got {
			whole.of[n] = b
		}
	}
	l.gathered = whole
	return nil
}

// complete tells whether this rank has all that a checkpoint of the last commit needs of Local
// parts.
func (l *locals) complete() bool {
	return len(l.parts) == 0 || l.gathered != nil && l.gathered.id == l.current
}

// whole returns all ranks' pieces of the save that the state goes back to; nil where some are not
// here, or there are no parts.
func (l *locals) whole() *pieceSet {
	if len(l.parts) == 0 {
		return nil
	}
	if l.gathered != nil && l.gathered.id == l.current {
		return l.gathered
	}
	set := l.set(l.current)
	if set == nil {
		return nil
	}
	for n := range set.size + len(set.strays) {
		if set.of[n] == nil {
			return nil
		}
	}
	return set
}

// index is which of the parts p is.
func (l *locals) index(p localPart) int {
	for i := range l.parts {
		if l.parts[i] == p {
			return i
		}
	}
	return -1
}

// durable returns what a checkpoint has of part i: a tensor for each rank, and after them one for
// each stray.
func (s *pieceSet) durable(p localPart, i int, name string) ([]checkpoint.Tensor, []image.Piece) {
	var tensors []checkpoint.Tensor
	var sources []image.Source
	for n := range s.size + len(s.strays) {
		src := image.Source{Given: true}
		if b := s.of[n]; b != nil && b[i] != nil {
			src.Bytes = b[i].bytes()
		}
		tensor := p.tensor(fmt.Sprint(name, ".", n))
		if tensor.Scalar && len(src.Bytes) == 0 {
			tensor.Scalar = false // a stray of a part with a function has nothing here
		}
		tensors, sources = append(tensors, tensor), append(sources, src)
	}
	var store image.Store
	store.Begin(0, sources).Seal()
	return tensors, store.Last().Pieces()
}

var errPieces = errors.New("elastic: its local parts are not of as many ranks as it says")

// loaded returns the set of a checkpoint's pieces, given each part's; nil without Local parts.
func (l *locals) loaded(about checkpoint.About, parts [][][]byte) (*pieceSet, error) {
	if len(parts) == 0 {
		return nil, nil
	}
	// No save of a world has this id.
	set := &pieceSet{id: saveID{Save: about.Commits + 1}, size: about.Size, mine: -1, of: make(map[int]bundle)}
	total := len(parts[0])
	for _, tensors := range parts {
		if about.Size < 1 || total < about.Size || len(tensors) != total {
			return nil, errPieces
		}
	}
	for n := range total {
		b := make(bundle, len(parts))
		for i, tensors := range parts {
			if n < about.Size || !l.parts[i].shared() {
				b[i] = pieceOf(tensors[n], nil)
			}
		}
		set.of[n] = b
		if n >= about.Size {
			set.strays = append(set.strays, origin{0, n})
		}
	}
	return set, nil
}
