package gomlx

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/hvdrun/hvdrun/elastic"
)

func image(t *testing.T, s *State) []byte {
	t.Helper()
	must(t, s.Save())
	b, err := s.Image()
	must(t, err)
	return b
}

// Images of equal values are equal, whatever the order in which variables were created, and restore
// them in any compatible state, also in an empty one.
func TestImage(t *testing.T) {
	if _, err := NewState(model.NewStore()).Image(); err == nil {
		t.Error("an image of what was never saved")
	}
	pairs := []any{"w", []float32{1, 2}, "#step", int64(5), "b", []float64{6}}
	s := NewState(newStore(t, pairs...))
	want := image(t, s)
	other := NewState(newStore(t, append(append([]any{}, pairs[2:4]...), "w", []float32{0, 0}, "b", []float64{0})...))
	other.store.VariableWithShape("late", shapes.Make(dtypes.Float32, 2), graph.Zeros).SetTrainable(false)
	if bytes.Equal(image(t, other), want) {
		t.Error("other values have the same image")
	}
	set(t, other.store, "w", []float32{1, 2})
	set(t, other.store, "b", []float64{6})
	if !bytes.Equal(image(t, other), want) {
		t.Error("the same values have another image")
	}
	set(t, other.store, "w", []float32{3, 4})
	empty := NewState(model.NewStore())
	_ = image(t, empty)
	for name, s := range map[string]*State{"other": other, "empty": empty} {
		must(t, s.SetImage(want))
		if !bytes.Equal(image(t, s), want) {
			t.Errorf("%s: the image has not been taken over", name)
		}
	}
	var order []string
	for v := range empty.store.IterVariables() {
		if v.Trainable {
			order = append(order, v.Name())
		}
	}
	if strings.Join(order, " ") != "w b" {
		t.Errorf("trainable variables were created in the order %v", order)
	}
}

func TestImageRefuses(t *testing.T) {
	with := func(text string, values int) []byte {
		return append(append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...), make([]byte, values)...)
	}
	const a = `{"Path":"/a","DType":"Float32","Dims":[1],"Bytes":4,"Trainable":true}`
	for name, b := range map[string][]byte{
		"empty":           nil,
		"cut":             with("{}", 0)[:5],
		"no JSON":         with("{", 0),
		"cut values":      with(`{"Order":["/a"],"Variables":[`+a+`]}`, 3),
		"left over":       with(`{"Order":["/a"],"Variables":[`+a+`]}`, 5),
		"negative length": with(`{"Variables":[{"Path":"/a","DType":"Float32","Dims":[0],"Bytes":-4}]}`, 0),
		"no order":        with(`{"Variables":[`+a+`]}`, 4),
		"no type":         with(`{"Variables":[{"Path":"/a","DType":"Huge","Dims":[1],"Bytes":4}]}`, 4),
		"another shape":   with(`{"Order":["/w"],"Variables":[{"Path":"/w","DType":"Float32","Dims":[2],"Bytes":8,"Trainable":true}]}`, 8),
		"another model":   with(`{"Order":["/a"],"Variables":[`+a+`]}`, 4),
	} {
		t.Run(name, func(t *testing.T) {
			s := NewState(newStore(t, "w", []float32{1}))
			before := digest(t, s)
			if err := s.SetImage(b); err == nil || !strings.HasPrefix(err.Error(), "gomlx: image: ") {
				t.Error(err)
			}
			if digest(t, s) != before {
				t.Error("it has changed something")
			}
		})
	}
}

// TestCheckpoint: a new program continues from a checkpoint, optimizer included.
func TestCheckpoint(t *testing.T) {
	dir := t.TempDir()
	errStop := errors.New("stop")
	stop := func(s *elastic.Steps[float32]) error {
		if s.Applied() == 3 {
			return errStop
		}
		return nil
	}
	if _, err := train(t.Context(), 1, stop, elastic.Checkpoint(dir)); !errors.Is(err, errStop) {
		t.Fatal(err)
	}
	first := uint64(0)
	got, err := train(t.Context(), 1, func(s *elastic.Steps[float32]) error {
		first = cmp.Or(first, s.Applied())
		return nil
	}, elastic.Checkpoint(dir))
	must(t, err)
	if first != 4 {
		t.Errorf("step %d is the first one after the checkpoint, not 4", first)
	}
	want, err := train(t.Context(), 1, nil)
	must(t, err)
	if got != want {
		t.Errorf("digest %x, want %x as without an end in between", got, want)
	}
}
