package cuda

import (
	"errors"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
)

var _ elastic.Imaged = Tensor[float32]("", nil)

func TestTensor(t *testing.T) {
	w := newWorld(t, 3, 1, Config{})
	w.must(t, func(rank int, d *Device, g *collective.Group) error {
		v := vector(t, d, slices.Repeat([]int32{int32(rank)}, pieceSize/4+10))
		p := Tensor("weights", v)
		if err := p.Restore(); err == nil {
			return errors.New("something is restored that was never saved")
		}
		if _, err := p.Image(); err == nil {
			return errors.New("an image of nothing")
		}
		if err := p.Save(); err != nil {
			return err
		}
		first, err := p.Image()
		if err != nil {
			return err
		}
		if err := p.Save(); err != nil {
			return err
		}
		if same, _ := p.Image(); &same[0] != &first[0] {
			return errors.New("what has not changed is copied")
		}
		if err := p.Sync(t.Context(), g, 2); err != nil {
			return err
		}
		if got := values(t, v); got[0] != 2 || got[len(got)-1] != 2 {
			return errors.New("not the root's value")
		}
		if err := p.Restore(); err != nil {
			return err
		}
		if got := values(t, v); got[0] != int32(rank) || got[len(got)-1] != int32(rank) {
			return errors.New("not the saved value")
		}
		if err := v.Slice(v.Len()-1, v.Len()).CopyFrom(t.Context(), []int32{77}); err != nil {
			return err
		}
		if err := p.Save(); err != nil {
			return err
		}
		second, err := p.Image()
		if err != nil {
			return err
		}
		if &second[0] == &first[0] || elements[int32](first)[v.Len()-1] != int32(rank) || elements[int32](second)[v.Len()-1] != 77 {
			return errors.New("an image has changed")
		}
		if p.SetImage(first[4:]) == nil {
			return errors.New("an image of another size")
		}
		if err := p.SetImage(first); err != nil {
			return err
		}
		if got := values(t, v); got[len(got)-1] != int32(rank) {
			return errors.New("not the image's value")
		}
		return nil
	})
}

// TestSaveFails: the last one stays.
func TestSaveFails(t *testing.T) {
	f := newNode(t).process()
	d := open(t, f, Config{})
	v := vector(t, d, []float32{1, 2, 3})
	p := Tensor("weights", v)
	if err := p.Save(); err != nil {
		t.Fatal(err)
	}
	if err := v.CopyFrom(t.Context(), []float32{4, 5, 6}); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.fault = func(call string) result {
		if call == "cuMemcpyDtoHAsync_v2" {
			return outOfMemory
		}
		return success
	}
	f.mu.Unlock()
	if err := p.Save(); !errors.Is(err, ErrOutOfMemory) {
		t.Error(err)
	}
	f.mu.Lock()
	f.fault = nil
	f.mu.Unlock()
	if err := p.Restore(); err != nil || !slices.Equal(values(t, v), []float32{1, 2, 3}) {
		t.Error(values(t, v), err)
	}
}

// TestState: a commit, a rollback and a digest of a state that is on a device.
func TestState(t *testing.T) {
	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	d := open(t, newNode(t).process(), Config{})
	v := vector(t, d, []float32{1, 2, 3})
	step := 0
	state := elastic.NewState(w, Tensor("weights", v), elastic.Value("step", &step))
	if err := state.Commit(); err != nil {
		t.Fatal(err)
	}
	step = 1
	if err := v.CopyFrom(t.Context(), []float32{4, 5, 6}); err != nil {
		t.Fatal(err)
	}
	if err := state.Restore(); err != nil || step != 0 || !slices.Equal(values(t, v), []float32{1, 2, 3}) {
		t.Error(step, values(t, v), err)
	}
}
