package gomlx

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/gomlx/ml/model"

	"github.com/hvdrun/hvdrun/elastic"
)

var _ elastic.Imaged = (*State)(nil)

// head is the head of an image. The image begins with the length of its JSON, in four bytes; the
// values of the variables follow the JSON.
type head struct {
	// Order contains the paths of the trainable variables in the order of their creation.
	Order []string
	// Variables are those with a value, sorted by path, because the order of their creation can
	// differ between ranks.
	Variables []variable
}

// kept is a variable with its value.
type kept struct {
	variable
	value []byte
}

// Image returns the last save, without variables that had no value then. It makes the variables
// part of digests, of comparisons of the ranks' states and of elastic.Checkpoint's files. It
// allocates memory for the values and copies them.
func (s *State) Image() ([]byte, error) {
	if !s.hasSaved {
		return nil, errors.New("gomlx: there is no save")
	}
	var h head
	var all []kept
	rest := s.saved.values
	for _, v := range s.saved.variables {
		if v.Initial {
			continue
		}
		all = append(all, kept{v, rest[:v.Bytes]})
		rest = rest[v.Bytes:]
		if v.Trainable {
			h.Order = append(h.Order, v.Path)
		}
	}
	slices.SortFunc(all, func(a, b kept) int { return cmp.Compare(a.Path, b.Path) })
	for _, k := range all {
		h.Variables = append(h.Variables, k.variable)
	}
	text, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("gomlx: %w", err)
	}
	b := make([]byte, 0, 4+len(text)+len(s.saved.values))
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(text))), text...)
	for _, k := range all {
		b = append(b, k.value...)
	}
	return b, nil
}

// SetImage sets the variables to an image, and creates missing ones. Variables without a value, in
// the image or the store, are unchanged. If the image is of another model it returns an error and
// changes nothing.
func (s *State) SetImage(b []byte) error {
	from, err := parse(b)
	if err != nil {
		return fmt.Errorf("gomlx: image: %w", err)
	}
	there := make(map[string]bool, len(from.variables))
	for _, v := range from.variables {
		there[v.Path] = true
	}
	valued := *s
	valued.Skip = func(v *model.Variable) bool {
		return s.Skip != nil && s.Skip(v) || !v.HasValue() && !there[v.Path()]
	}
	if err := valued.fits(from); err != nil {
		return fmt.Errorf("gomlx: image: %w", err)
	}
	return s.assign(from)
}

// parse decodes an image. The order of its variables is one in which they can be created. It does
// not check the lengths of values.
func parse(b []byte) (snapshot, error) {
	if len(b) < 4 || uint64(len(b)-4) < uint64(binary.LittleEndian.Uint32(b)) {
		return snapshot{}, errors.New("it is truncated")
	}
	n := 4 + int(binary.LittleEndian.Uint32(b))
	var h head
	if err := json.Unmarshal(b[4:n], &h); err != nil {
		return snapshot{}, err
	}
	place := make(map[string]int, len(h.Order))
	for i, path := range h.Order {
		place[path] = i + 1
	}
	var all []kept
	rest := b[n:]
	for _, v := range h.Variables {
		if v.Bytes < 0 || v.Bytes > len(rest) || v.Trainable != (place[v.Path] > 0) {
			return snapshot{}, fmt.Errorf("its variable %v is truncated", v)
		}
		all = append(all, kept{v, rest[:v.Bytes]})
		rest = rest[v.Bytes:]
	}
	slices.SortStableFunc(all, func(a, b kept) int { return cmp.Compare(place[a.Path], place[b.Path]) })
	from := snapshot{values: make([]byte, 0, len(b)-n)}
	for _, k := range all {
		from.variables = append(from.variables, k.variable)
		from.values = append(from.values, k.value...)
	}
	from.values = append(from.values, rest...)
	return from, nil
}
