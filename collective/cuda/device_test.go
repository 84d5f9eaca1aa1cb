package cuda

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// vector allocates a slice with the given values on a device, and frees it when the test ends.
func vector[T collective.Element](t testing.TB, d *Device, values []T) *Slice[T] {
	t.Helper()
	s, err := Alloc[T](d, len(values))
	if err == nil {
		err = s.CopyFrom(context.Background(), values)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Free() })
	return s
}

func values[T collective.Element](t testing.TB, s *Slice[T]) []T {
	t.Helper()
	v := make([]T, s.Len())
	if err := s.CopyTo(context.Background(), v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestNoDriver(t *testing.T) {
	for _, err := range []error{
		func() error { _, err := Open(Config{Library: "/nowhere/libcuda.so.1"}); return err }(),
		func() error { _, err := Devices("/nowhere/libcuda.so.1"); return err }(),
	} {
		if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "libcuda.so.1") {
			t.Error(err)
		}
	}
}

func TestDevices(t *testing.T) {
	f := newNode(t).process()
	all, err := f.api().devices()
	if err != nil || len(all) != 2 || all[1].Index != 1 || all[1].Name != "Fake 1" || all[1].Bus != "0000:01:00.0" ||
		all[1].Major != 9 || all[1].Multiprocessors != 2 || all[1].Memory != 1<<30 || all[1].Exclusive {
		t.Fatalf("%+v, %v", all, err)
	}
	for _, index := range []int{-1, 2} {
		if _, err := f.api().open(Config{Device: index}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("device %d: %v", index, err)
		}
	}
	d := open(t, f, Config{Device: 1})
	if d.Info() != all[1] {
		t.Errorf("%+v", d.Info())
	}
	if free, total, err := d.Memory(); err != nil || free != total || total != 1<<30 {
		t.Error(free, total, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != ErrClosed {
		t.Error(err)
	}
	if _, err := Alloc[int8](d, 1); err != ErrClosed {
		t.Error(err)
	}
}

// TestCopies copies vectors of several pieces, with and without registering the host's memory.
func TestCopies(t *testing.T) {
	for _, register := range []bool{true, false} {
		f := newNode(t).process()
		f.register = register
		d := open(t, f, Config{})
		for _, n := range []int{0, 1, 1000, pieceSize / 8, pieceSize/4 + 3} {
			want := make([]int64, n)
			for i := range want {
				want[i] = int64(i * 7)
			}
			s := vector(t, d, want)
			if s.Len() != n || s.Device() != d || n > 0 && s.Address()%256 != 0 {
				t.Errorf("a slice of %d at %#x", s.Len(), s.Address())
			}
			if !slices.Equal(values(t, s), want) {
				t.Errorf("%d elements come back as others", n)
			}
			copied := vector(t, d, make([]int64, n))
			if err := copied.CopySlice(t.Context(), s); err != nil {
				t.Error(err)
			}
			if n > 3 {
				part := s.Slice(1, n-1)
				if err := part.Slice(0, 1).Zero(t.Context()); err != nil {
					t.Error(err)
				}
				want = slices.Clone(want)
				if got := values(t, part); got[0] != 0 || !slices.Equal(got[1:], want[2:n-1]) {
					t.Errorf("a part of %d is wrong", n)
				}
				if err := part.Free(); err != nil || values(t, copied)[n-1] != want[n-1] {
					t.Errorf("a part is freed: %v", err)
				}
			}
		}
		s := vector(t, d, make([]int64, 4))
		if s.CopyFrom(t.Context(), make([]int64, 3)) == nil || s.CopyTo(t.Context(), make([]int64, 5)) == nil ||
			s.CopySlice(t.Context(), s.Slice(0, 1)) == nil {
			t.Error("copies of other lengths")
		}
	}
}

func TestWrap(t *testing.T) {
	d := open(t, newNode(t).process(), Config{})
	s := vector(t, d, []int32{1, 2, 3, 4})
	w, err := Wrap[int32](d, s.Address()+4, 2)
	if err != nil || !slices.Equal(values(t, w), []int32{2, 3}) {
		t.Error(err)
	}
	if err := w.Free(); err != nil {
		t.Error(err)
	}
	for what, err := range map[string]error{
		"a negative length": func() error { _, err := Wrap[int32](d, 4096, -1); return err }(),
		"nothing":           func() error { _, err := Wrap[int32](d, 0, 1); return err }(),
		"an odd address":    func() error { _, err := Wrap[int32](d, 4098, 1); return err }(),
		"the end of memory": func() error { _, err := Wrap[int32](d, 1<<64-8, 3); return err }(),
		"a length of Alloc": func() error { _, err := Alloc[int64](d, 1<<61); return err }(),
		"too much": func() error {
			_, err := Alloc[byte](d, 1<<31)
			if !errors.Is(err, ErrOutOfMemory) {
				return nil
			}
			return err
		}(),
	} {
		if err == nil {
			t.Errorf("%s is not refused", what)
		}
	}
	if err := s.Free(); err != nil {
		t.Error(err)
	}
	if err := s.Free(); err == nil {
		t.Error("freed twice")
	}
}

// TestStreams: work on a stream waits for the events that it should, and for the gate of the
// device.
func TestStreams(t *testing.T) {
	n := newNode(t)
	n.gate = make(chan struct{})
	d := open(t, n.process(), Config{})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	other, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	v := vector(t, d, []float32{1, 2})
	if err := Scale(s, v, 2); err != nil {
		t.Fatal(err)
	}
	e, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Wait(e); err != nil {
		t.Fatal(err)
	}
	behind, err := other.Record()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := behind.Synchronize(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, event := range []*Event{e, behind} {
		if done, err := event.Done(); done || err != nil {
			t.Error(done, err)
		}
	}
	close(n.gate)
	if err := behind.Synchronize(t.Context()); err != nil {
		t.Error(err)
	}
	if done, err := e.Done(); !done || err != nil {
		t.Error(done, err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if wrapped := d.WrapStream(s.Handle()); wrapped.Synchronize(t.Context()) != nil || wrapped.Close() != nil {
		t.Error("a wrapped stream")
	}
	if !slices.Equal(values(t, v), []float32{2, 4}) {
		t.Error("not scaled")
	}
}

// TestErrors: errors have CUDA's names, and errors after which the process cannot continue are
// ErrSticky.
func TestErrors(t *testing.T) {
	f := newNode(t).process()
	d := open(t, f, Config{})
	v := vector(t, d, []float32{1})
	f.mu.Lock()
	f.fault = func(call string) result {
		if call == "cuMemcpyHtoDAsync_v2" {
			return 4242
		}
		return success
	}
	f.mu.Unlock()
	var e *Error
	if err := v.CopyFrom(t.Context(), []float32{2}); !errors.As(err, &e) || e.Code != 4242 || errors.Is(err, ErrSticky) ||
		err.Error() != "cuda: cuMemcpyHtoDAsync_v2: CUresult 4242" {
		t.Error(err)
	}
	f.mu.Lock()
	f.fault = nil
	f.mu.Unlock()
	if err := v.CopyFrom(t.Context(), []float32{2}); err != nil {
		t.Error(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	wild, err := Wrap[float32](d, 4096, 100)
	if err != nil {
		t.Fatal(err)
	}
	if err := Scale(s, wild, 2); err != nil {
		t.Fatal(err)
	}
	err = s.Synchronize(t.Context())
	if !errors.Is(err, ErrSticky) || errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Error(err)
	}
	if _, err := Alloc[float32](d, 1); !errors.Is(err, ErrSticky) {
		t.Error(err)
	}
	s.Close()
}

// TestFailedOpens: whatever call fails, everything that was allocated is freed.
func TestFailedOpens(t *testing.T) {
	for _, call := range []string{"cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuEventCreate", "cuMemHostAlloc", "cuMemAlloc_v2",
		"cuMemsetD8Async", "cuEventRecord", "cuEventQuery", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuLaunchKernel"} {
		f := newNode(t).process()
		f.register = false
		f.fault = func(c string) result {
			if c == call {
				return outOfMemory
			}
			return success
		}
		err := func() error {
			d, err := f.api().open(Config{})
			if err != nil {
				return err
			}
			defer d.Close()
			v, err := Alloc[float32](d, 100)
			if err != nil {
				return err
			}
			defer v.Free()
			s, err := d.NewStream()
			if err != nil {
				return err
			}
			defer s.Close()
			return Scale(s, v, 2)
		}()
		if !errors.Is(err, ErrOutOfMemory) {
			t.Errorf("%s fails: %v", call, err)
		}
	}
}
