package cudatest

import (
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
)

// TestLibrary: the library is a driver with a device that computes and knows how much of its memory
// is allocated.
func TestLibrary(t *testing.T) {
	t.Setenv("GOCACHE", t.TempDir()) // it is compiled, whatever is kept
	d, err := cuda.Open(cuda.Config{Library: Library(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before, _, err := d.Memory()
	if err != nil {
		t.Fatal(err)
	}
	v, err := cuda.Alloc[int64](d, 1000)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if after, _, err := d.Memory(); err != nil || before-after != 8000 {
		t.Error(before, after, err)
	}
	got := make([]int64, 1000)
	for i := range got {
		got[i] = int64(i) - 500
	}
	if err := v.CopyFrom(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	if err := cuda.Combine(s, v, v, v, collective.Product); err != nil {
		t.Fatal(err)
	}
	if err := v.CopyTo(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got[:2], []int64{250_000, 249_001}) {
		t.Error(got[:2])
	}
	if err := v.Free(); err != nil {
		t.Fatal(err)
	}
	if after, _, err := d.Memory(); err != nil || after != before {
		t.Error(before, after, err)
	}
}
