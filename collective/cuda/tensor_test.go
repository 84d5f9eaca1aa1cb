package cuda

import (
	"errors"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

var _ elastic.Deferred = Tensor[float32]("", nil)

// tensors returns a part for each way of saving.
func tensors[T collective.Element](t *testing.T, d *Device, v *Slice[T]) map[string]*Part[T] {
	stream, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	return map[string]*Part[T]{"snapshot": Tensor("weights", v), "in a stream": TensorWith("weights", v, TensorOptions{Stream: stream}),
		"none": TensorWith("weights", v, TensorOptions{NoSnapshot: true})}
}

func TestTensor(t *testing.T) {
	w := newWorld(t, 3, 1, Config{})
	for _, way := range []string{"snapshot", "in a stream", "none"} {
		w.must(t, func(rank int, d *Device, g *collective.Group) error {
			v := vector(t, d, slices.Repeat([]int32{int32(rank)}, pieceSize/4+10))
			p := tensors(t, d, v)[way]
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
			if same, _ := p.Pending()(); &same[0] != &first[0] {
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
			if &second[0] == &first[0] || kernel.Elements[int32](first)[v.Len()-1] != int32(rank) || kernel.Elements[int32](second)[v.Len()-1] != 77 {
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
			if err := errors.Join(p.Free(), p.Restore()); err != nil || values(t, v)[v.Len()-1] != 77 {
				return errors.Join(err, errors.New("not the saved value without the snapshot"))
			}
			return errors.Join(p.Save(), p.Free(), p.Free())
		})
	}
}

// TestSnapshot: what is written to the slice after Save has returned is not in the saved value.
// With a stream, the order is that of the stream, and Save does not wait.
func TestSnapshot(t *testing.T) {
	n := newNode(t)
	d := open(t, n.process(), Config{})
	v := vector(t, d, make([]float32, pieceSize/2))
	all := tensors(t, d, v)
	for i := range 20 {
		for way, p := range all {
			want := slices.Repeat([]float32{float32(i)}, v.Len())
			if err := v.CopyFrom(t.Context(), want); err != nil {
				t.Fatal(err)
			}
			if err := p.Save(); err != nil {
				t.Fatal(err)
			}
			if p.options.Stream == nil {
				if err := v.Zero(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if b, err := p.Image(); err != nil || !slices.Equal(kernel.Elements[float32](b), want) {
				t.Fatalf("%s: not what was saved: %v", way, err)
			}
		}
	}
	p := all["in a stream"]
	n.gate = make(chan struct{})
	if err := v.CopyFrom(t.Context(), slices.Repeat([]float32{3}, v.Len())); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := errors.Join(Scale(p.options.Stream, v, 2), p.Save(), Scale(p.options.Stream, v, 5)); err != nil {
			t.Fatal(err)
		}
		if n.gate != nil {
			close(n.gate)
			n.gate = nil
		}
	}
	if b, err := p.Image(); err != nil || kernel.Elements[float32](b)[7] != 60 {
		t.Error(kernel.Elements[float32](b)[7], err)
	}
	if err := p.Restore(); err != nil || values(t, v)[7] != 60 {
		t.Error(values(t, v)[7], err)
	}
}

// TestNoRoom: if the device has no memory for a snapshot, Save makes none.
func TestNoRoom(t *testing.T) {
	n := newNode(t)
	d := open(t, n.process(), Config{})
	v := vector(t, d, []float32{1, 2, 3})
	p := Tensor("weights", v)
	n.limit = n.used + 1
	if err := p.Save(); err != nil || p.bank != 0 {
		t.Fatal(p.bank, err)
	}
	if err := v.Zero(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Restore(); err != nil || !slices.Equal(values(t, v), []float32{1, 2, 3}) {
		t.Error(values(t, v), err)
	}
}

// TestSaveFails: whichever call of a save fails, in Save or in the background, the caller gets the
// error once, and the previous save remains.
func TestSaveFails(t *testing.T) {
	for _, call := range []string{"cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent",
		"cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2"} {
		for _, way := range []string{"snapshot", "in a stream", "none"} {
			for at := 0; ; at++ {
				if !saveFails(t, call, way, at) {
					break
				}
			}
		}
	}
}

func saveFails(t *testing.T, call, way string, at int) (failed bool) {
	f := newNode(t).process()
	d := open(t, f, Config{})
	v := vector(t, d, make([]float32, pieceSize/2))
	p := tensors(t, d, v)[way]
	set := func(x float32) {
		if err := v.CopyFrom(t.Context(), slices.Repeat([]float32{x}, v.Len())); err != nil {
			t.Fatal(err)
		}
	}
	set(1)
	if err := p.Save(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Image(); err != nil {
		t.Fatal(err)
	}
	set(2)
	if call == "cuMemAlloc_v2" { // a save that has to allocate memory
		if err := p.Free(); err != nil {
			t.Fatal(err)
		}
	}
	if call == "cuStreamCreate" || call == "cuEventCreate" { // a save that needs new staging memory
		spare := d.spare
		d.spare = nil
		defer func() {
			for _, s := range spare {
				d.keep(s)
			}
		}()
	}
	restore := f.failCalls(call, at, 1, notSupported)
	err := p.Save()
	if err == nil {
		_, err = p.Image()
	}
	failed = restore()
	if failed != isCode(err, notSupported) {
		t.Errorf("%s, call %d of %s fails: %v", way, at, call, err)
	}
	f.drain() // the failed save may still be reading
	set(3)
	want := float32(2)
	if err != nil {
		want = 1
	}
	if err := p.Restore(); err != nil || values(t, v)[v.Len()-1] != want {
		t.Errorf("%s, call %d of %s fails: %v is restored, %v", way, at, call, values(t, v)[0], err)
	}
	set(4)
	if err := p.Save(); err != nil {
		t.Error(err)
	}
	if b, err := p.Image(); err != nil || kernel.Elements[float32](b)[v.Len()-1] != 4 {
		t.Errorf("%s, after call %d of %s has failed: %v", way, at, call, err)
	}
	return failed
}

// TestState commits, restores and computes the digest of a state on a device.
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
