package elastic

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
)

// gather sends all pieces of the last commit to rank 0 for a checkpoint, if wanted is set, which
// must be the same on all ranks. Without Local parts it does nothing.
func (l *locals) gather(ctx context.Context, wanted bool) error {
	l.gathered = nil
	set := l.set(l.current)
	if !wanted || len(l.parts) == 0 || set == nil {
		return nil
	}
	g := l.worker.group()
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
	whole := &pieceSet{id: set.id, size: set.size, orphans: set.orphans, of: make(map[int]bundle)}
	for _, n := range set.own() {
		whole.of[n] = set.of[n]
	}
	for from, m := range all {
		if len(m) == 0 {
			continue
		}
		got, err := l.parse(m, set.id, nil)
		if err != nil {
			return fmt.Errorf("elastic: local parts: pieces from rank %d for a checkpoint: %w", from, err)
		}
		for n, b := range got {
			whole.of[n] = b
		}
	}
	l.gathered = whole
	return nil
}

// complete reports whether this rank has all pieces that a checkpoint of the last commit needs.
func (l *locals) complete() bool {
	return len(l.parts) == 0 || l.gathered != nil && l.gathered.id == l.current
}

// whole returns the pieces of all ranks in the save that Restore goes back to. It returns nil if
// this rank lacks some of them, or there are no Local parts.
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
	for n := range set.size + len(set.orphans) {
		if set.of[n] == nil {
			return nil
		}
	}
	return set
}

// durable returns the tensors of Local part i for a checkpoint: one for each rank, followed by one
// for each orphaned piece.
func (s *pieceSet) durable(p localPart, i int, name string) ([]checkpoint.Tensor, []snapshot.Blob) {
	var tensors []checkpoint.Tensor
	var sources []snapshot.Source
	for n := range s.size + len(s.orphans) {
		src := snapshot.Source{Given: true}
		if b := s.of[n]; b != nil && b[i] != nil {
			src.Bytes = b[i].Bytes()
		}
		tensor := p.tensor(fmt.Sprint(name, ".", n))
		if tensor.Scalar && len(src.Bytes) == 0 {
			tensor.Scalar = false // an orphaned piece of a part with Redistribute is empty
		}
		tensors, sources = append(tensors, tensor), append(sources, src)
	}
	var store snapshot.Store
	store.Begin(0, sources).Seal()
	return tensors, store.Last().Blobs()
}

var errPieces = errors.New("elastic: the number of its local pieces does not match its number of ranks")

// loaded returns the set of the pieces in a checkpoint, from the pieces of each part; nil without
// Local parts.
func (l *locals) loaded(about checkpoint.About, parts [][][]byte) (*pieceSet, error) {
	if len(parts) == 0 {
		return nil, nil
	}
	// No save of a world has this ID.
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
				b[i] = transfer.NewValue(tensors[n], nil)
			}
		}
		set.of[n] = b
		if n >= about.Size {
			set.orphans = append(set.orphans, origin{0, n})
		}
	}
	return set, nil
}
