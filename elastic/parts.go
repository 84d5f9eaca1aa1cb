package elastic

import (
	"fmt"
	"strings"

	"github.com/hvdrun/hvdrun/elastic/internal/image"
)

// parts are the parts of a State and their positions in its images.
type parts struct {
	all   []Part
	of    []*content // of all[i]; nil: in no image
	first []int      // index of all[i]'s first blob in an image
}

// newParts puts the parts of this package first in images, because their saves precede those of
// foreign parts. Nil parts and duplicate names are errors.
func newParts(all []Part) (parts, error) {
	ps := parts{all, make([]*content, len(all)), make([]int, len(all))}
	var err error
	names := make(map[string]bool)
	for i, p := range all {
		if p == nil {
			return ps, fmt.Errorf("elastic: part %d of the state is nil", i)
		}
		ps.of[i] = contentOf(p)
		if !ps.own(i) {
			continue
		}
		if name := ps.of[i].name; name != "" && names[name] {
			err = fmt.Errorf("elastic: two parts of the state are named %q", name)
		} else {
			names[name] = true
		}
	}
	next := 0
	for _, own := range []bool{true, false} {
		for i, c := range ps.of {
			if c != nil && ps.own(i) == own {
				ps.first[i] = next
				next += c.blobs()
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

// withoutImage returns the names of the parts that are in no image.
func (ps *parts) withoutImage() (names []string) {
	for i, c := range ps.of {
		if c == nil {
			names = append(names, ps.name(i))
		}
	}
	return names
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

// memory returns these slices and a description of their parts.
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

// memoryIn returns the blobs of these slices in an image.
func (ps *parts) memoryIn(m *image.Image) (pieces []*image.Blob) {
	ps.inMemory(func(i, j int, _ []byte) { pieces = append(pieces, ps.piece(m, i, j)) })
	return pieces
}

// piece returns blob j of part i in an image.
func (ps *parts) piece(m *image.Image, i, j int) *image.Blob { return &m.Blobs()[ps.first[i]+j] }

// sums returns the checksums of the chunks of each part, nil for parts in no image. After a sync,
// opaque parts are left out: the opening message that carried them has a checksum. It does not read
// live values.
func (ps *parts) sums(m *image.Image, synced bool) ([][]uint32, error) {
	if m == nil {
		return nil, errNothingSaved
	}
	sums := make([][]uint32, len(ps.all))
	for i, c := range ps.of {
		if c == nil || synced && c.opaque {
			continue
		}
		var err error
		if sums[i], err = c.sums(m.Blobs()[ps.first[i]:]); err != nil {
			return nil, err
		}
	}
	return sums, nil
}

// restore restores the parts for which which returns true from an image, which may be nil. torn:
// foreign parts may have saved a newer value than the image has.
func (ps *parts) restore(m *image.Image, torn bool, which func(Part) bool) (errs []error) {
	for i, p := range ps.all {
		if !which(p) {
			continue
		}
		var err error
		switch {
		case m != nil && (ps.own(i) || torn && ps.of[i] != nil):
			err = ps.of[i].restore(m.Blobs()[ps.first[i]:])
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

// sources appends the sources of an image, of this package's parts or of foreign ones. It calls
// Save of foreign parts first.
func (ps *parts) sources(to []image.Source, own bool) ([]image.Source, error) {
	for i, p := range ps.all {
		if ps.own(i) != own {
			continue
		}
		if !own {
			if err := p.Save(); err != nil {
				return nil, fmt.Errorf("elastic: save part %d (%T): %w", i, p, err)
			}
		}
		c := ps.of[i]
		if c == nil {
			continue
		}
		var err error
		if to, err = c.sources(to); err != nil && !own {
			return nil, fmt.Errorf("elastic: image of part %d (%T): %w", i, p, err)
		} else if err != nil {
			return nil, err
		}
	}
	return to, nil
}
