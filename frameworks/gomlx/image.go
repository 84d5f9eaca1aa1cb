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

// head begins an image: the length of its JSON, in four bytes, and then the values of the
// variables, one after the other.
type head struct {
	// Order is that of the trainable variables' creation, by path.
	Order []string
	// Variables are those that have a value, by path: the rest of their order may differ from rank
	// to rank.
	Variables []variable
}

// Image returns what the last save has kept, without variables that had no value then: it makes the
// variables part of digests, of comparisons of the ranks' states and of elastic.Checkpoint's files.
// It takes memory for the values and copies them.
func (s *State) Image() ([]byte, error) {
	if !s.hasSaved {
		return nil, errors.New("gomlx: nothing has been saved yet")
	}
	type kept struct {
		variable
		value []byte
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

// SetImage gives the variables the values of an image, and creates those that are missing. One that
// has no value yet, there or here, stays as it is. Where the image has another model's variables it
// returns an error and changes nothing.
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

// parse returns what is in an image, in an order in which it can be created. What it says of
// lengths is not checked.
func parse(b []byte) (snapshot, error) {
	if len(b) < 4 || uint64(len(b)-4) < uint64(binary.LittleEndian.Uint32(b)) {
		return snapshot{}, errors.New("it is cut short")
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
	type kept struct {
		variable
		value []byte
	}
	var all []kept
	rest := b[n:]
	for _, v := range h.Variables {
		if v.Bytes < 0 || v.Bytes > len(rest) || v.Trainable != (place[v.Path] > 0) {
			return snapshot{}, fmt.Errorf("its variable %v is not whole", v)
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
