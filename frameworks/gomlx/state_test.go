package gomlx

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/hvdrun/hvdrun/collective"
)

// newStore returns a store with a variable for each value, all trainable except those whose name
// begins with '#'.
func newStore(t *testing.T, pairs ...any) *model.Store {
	t.Helper()
	store := model.NewStore()
	for i := 0; i < len(pairs); i += 2 {
		v, err := store.CreateVariable(pairs[i].(string), tensors.MustFromAnyValue(pairs[i+1]))
		if err != nil {
			t.Fatal(err)
		}
		v.SetTrainable(!strings.Contains(v.Path(), "#"))
	}
	return store
}

func set(t *testing.T, store *model.Store, path string, value any) {
	t.Helper()
	if err := store.GetVariable(path).SetValue(tensors.MustFromAnyValue(value)); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func digest(t *testing.T, s *State) uint64 {
	t.Helper()
	d, err := s.Digest()
	must(t, err)
	return d
}

func TestRestore(t *testing.T) {
	store := newStore(t, "a", []float32{1, 2}, "#n", int64(7), "half", [][]bool{{true}, {false}}, "#empty", tensors.FromShape(shapes.Make(dtypes.Float32, 0, 3)))
	s := NewState(store)
	if err := s.Restore(); err == nil {
		t.Error("restored what was never saved")
	}
	must(t, s.Save())
	saved := digest(t, s)
	must(t, s.Restore())
	if got := digest(t, s); got != saved {
		t.Error("a restore without a change changed something")
	}
	tensors.MustMutableFlatData(store.GetVariable("a").MustValue(), func(flat []float32) { flat[1] = 5 }) // in place
	set(t, store, "#n", int64(8))
	set(t, store, "half", [][]bool{{false}, {false}})
	if digest(t, s) == saved {
		t.Error("the digest does not tell that values have changed")
	}
	for range 2 { // the copy must stay valid after its first use
		must(t, s.Restore())
		if got := digest(t, s); got != saved {
			t.Error("the values are not those saved")
		}
		tensors.MustMutableFlatData(store.GetVariable("a").MustValue(), func(flat []float32) { flat[0] = -1 })
	}
	set(t, store, "#n", int64(9))
	must(t, s.Save())
	must(t, s.Restore())
	if got := store.GetVariable("#n").MustValue().Value(); got != int64(9) {
		t.Errorf("n is %v, want that of the second save", got)
	}
}

func TestRestoreOfWhatWasNotThere(t *testing.T) {
	store := newStore(t, "a", []float32{1, 2})
	late := store.VariableWithShape("late", shapes.Make(dtypes.Float32, 2), graph.Zeros)
	s := NewState(store)
	must(t, s.Save())
	set(t, store, "late", []float32{3, 4})
	must(t, s.Restore())
	if late.HasValue() {
		t.Error("a variable that had no value has one")
	}
	must(t, store.InitializeVariables(backend, nil))
	if got := tensors.MustCopyFlatData[float32](late.MustValue()); got[0] != 0 || got[1] != 0 {
		t.Errorf("it was initialized as %v", got)
	}

	_, err := store.CreateVariable("later", tensors.FromScalar(float32(1)))
	must(t, err)
	before := digest(t, s)
	if err := s.Restore(); err == nil || !strings.Contains(err.Error(), `"/later"`) {
		t.Errorf("error %v, want one that names the variable", err)
	}
	if digest(t, s) != before {
		t.Error("a restore that failed has changed something")
	}
	s.Skip = func(v *model.Variable) bool { return v.Name() == "later" }
	must(t, s.Restore())
}

func TestSaveThatFailsKeepsTheLast(t *testing.T) {
	store := newStore(t, "a", []float32{1}, "b", []float32{2})
	s := NewState(store)
	must(t, s.Save())
	set(t, store, "a", []float32{3})
	b := store.GetVariable("b")
	old, err := b.MustValue().LocalClone()
	must(t, err)
	must(t, b.MustValue().FinalizeAll()) // makes the value unreadable
	if err := s.Save(); err == nil {
		t.Fatal("saved a value that is gone")
	}
	must(t, b.SetValuePreservingOld(old))
	must(t, s.Restore())
	if got := store.GetVariable("a").MustValue().Value().([]float32)[0]; got != 1 {
		t.Errorf("a is %v, want that of the save that succeeded", got)
	}
}

// syncAll synchronises the states, one per rank, and returns each rank's error.
func syncAll(ctx context.Context, root int, states ...*State) []error {
	errs := make([]error, len(states))
	var running sync.WaitGroup
	for r, g := range collective.Local(len(states)) {
		running.Go(func() {
			defer g.Close()
			errs[r] = states[r].Sync(ctx, g, root)
		})
	}
	running.Wait()
	return errs
}

func TestSync(t *testing.T) {
	root := NewState(newStore(t, "w", [][]float32{{1, 2}, {3, 4}}, "#step", int64(5), "b", []float64{6}, "#adam/w", []float32{7}))
	other := NewState(newStore(t, "w", [][]float32{{0, 0}, {0, 0}}, "#step", int64(0)))
	empty := NewState(model.NewStore())
	must(t, errors.Join(syncAll(t.Context(), 1, other, root, empty)...))
	want := digest(t, root)
	for name, s := range map[string]*State{"other": other, "empty": empty} {
		if got := digest(t, s); got != want {
			t.Errorf("%s: digest %x, the root's is %x", name, got, want)
		}
		for v := range root.store.IterVariables() {
			if got := s.store.GetVariable(v.Path()); got == nil || got.Trainable != v.Trainable {
				t.Errorf("%s: %s is missing, or trainable where it should not be", name, v.Path())
			}
		}
	}
	// Ranks do not share values.
	tensors.MustMutableFlatData(root.store.GetVariable("b").MustValue(), func(flat []float64) { flat[0] = 0 })
	if digest(t, other) != want || digest(t, empty) != want {
		t.Error("a change on the root is seen elsewhere")
	}
}

// TestRestoreAfterAFailedSync: the sync of the variables succeeds but that of another part fails,
// so there is no save.
func TestRestoreAfterAFailedSync(t *testing.T) {
	root, empty := NewState(newStore(t, "w", []float32{1}, "#step", int64(5))), NewState(model.NewStore())
	must(t, empty.Save())
	must(t, errors.Join(syncAll(t.Context(), 0, root, empty)...))
	must(t, empty.Restore())
	if n := empty.store.NumVariables(); n != 0 {
		t.Errorf("%d variables are left", n)
	}
	must(t, errors.Join(syncAll(t.Context(), 0, root, empty)...))
	must(t, empty.Save())
	must(t, empty.Restore())
	if digest(t, empty) != digest(t, root) {
		t.Error("the states differ")
	}
}

func TestSyncRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		root, other []any
		want        string
	}{
		"another shape": {[]any{"w", []float32{1}}, []any{"w", []float32{1, 2}}, `"/w": this rank's is a Float32 [2], the root's a Float32 [1]`},
		"another type":  {[]any{"w", []float32{1}}, []any{"w", []int32{1}}, "this rank's is a Int32 [1], the root's a Float32 [1]"},
		"more":          {[]any{"w", []float32{1}}, []any{"w", []float32{1}, "#m", float32(1)}, `"/#m": the root of the sync does not have it`},
		"another order": {[]any{"w", []float32{1}, "v", []float32{1}}, []any{"v", []float32{1}}, "in the order [/v /w] on this rank and [/w /v] on the root"},
	} {
		t.Run(name, func(t *testing.T) {
			other := NewState(newStore(t, c.other...))
			before := digest(t, other)
			errs := syncAll(t.Context(), 0, NewState(newStore(t, c.root...)), other)
			if errs[0] != nil || errs[1] == nil || !strings.Contains(errs[1].Error(), c.want) {
				t.Errorf("errors %v, want %s", errs, c.want)
			}
			if digest(t, other) != before {
				t.Error("the refused state was taken over")
			}
		})
	}
}

func TestFitsRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		variables string
		values    int
	}{
		"no type":         {`[{"Path":"/a","DType":"Huge","Dims":[1],"Bytes":4}]`, 4},
		"invalid type":    {`[{"Path":"/a","DType":"InvalidDType","Dims":[1],"Bytes":0}]`, 0},
		"negative":        {`[{"Path":"/a","DType":"Float32","Dims":[-1],"Bytes":4}]`, 4},
		"overflow":        {`[{"Path":"/a","DType":"Float32","Dims":[4294967296,4294967296],"Bytes":0}]`, 0},
		"too large":       {`[{"Path":"/a","DType":"Float32","Dims":[1073741824],"Bytes":4294967296}]`, 4},
		"length":          {`[{"Path":"/a","DType":"Float32","Dims":[2],"Bytes":4}]`, 4},
		"negative length": {`[{"Path":"/a","DType":"Float32","Dims":[0],"Bytes":-4}]`, 0},
		"left over":       {`[{"Path":"/a","DType":"Float32","Dims":[1],"Bytes":4}]`, 8},
		"twice":           {`[{"Path":"/a","DType":"Float32","Bytes":4},{"Path":"/a","DType":"Float32","Bytes":4}]`, 8},
		"initial value":   {`[{"Path":"/a","DType":"Float32","Initial":true,"Bytes":4}]`, 4},
	} {
		t.Run(name, func(t *testing.T) {
			from := snapshot{values: make([]byte, c.values)}
			must(t, json.Unmarshal([]byte(c.variables), &from.variables))
			if err := NewState(model.NewStore()).fits(from); err == nil {
				t.Error("it was taken")
			}
		})
	}
}
