package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// written creates a journal of those records and returns its path.
func written(t testing.TB, records ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "journal")
	j, err := Create(path, "run")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for _, r := range records {
		if err := j.Append([]byte(r)); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func readAll(b []byte) (records []string, end int64, err error) {
	_, end, err = Read(bytes.NewReader(b), func(p []byte) error {
		records = append(records, string(p))
		return nil
	})
	return records, end, err
}

func content(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var some = []string{"one", strings.Repeat("two ", 1000), "3", strings.Repeat("\x00", 100)}

// A file cut anywhere yields its complete records, and the next writer appends after them.
func TestCutAnywhere(t *testing.T) {
	b := content(t, written(t, some...))
	head := int64(len(magic) + 4 + frame + len("run"))
	ends := []int64{head}
	for _, r := range some {
		ends = append(ends, ends[len(ends)-1]+frame+int64(len(r)))
	}
	path := filepath.Join(t.TempDir(), "cut")
	for cut := int64(0); cut <= int64(len(b)); cut++ {
		records, end, err := readAll(b[:cut])
		if cut < head {
			if !errors.Is(err, errFormat) {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			continue
		}
		n := 0
		for ends[n] <= cut && n < len(some) && ends[n+1] <= cut {
			n++
		}
		if err != nil || end != ends[n] || !slices.Equal(records, some[:n]) {
			t.Fatalf("cut at %d: %d records to %d, %v; want %d to %d", cut, len(records), end, err, n, ends[n])
		}
		if cut%97 != 0 && cut != end {
			continue
		}
		if err := os.WriteFile(path, b[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, run, err := Open(path, func([]byte) error { return nil })
		if err != nil || run != "run" {
			t.Fatalf("cut at %d: run %q, %v", cut, run, err)
		}
		if err := errors.Join(j.Append([]byte("more")), j.Sync(), j.Close()); err != nil {
			t.Fatal(err)
		}
		records, _, err = readAll(content(t, path))
		if want := append(slices.Clone(some[:n]), "more"); err != nil || !slices.Equal(records, want) {
			t.Fatalf("cut at %d and gone on: %q, %v", cut, records, err)
		}
	}
}

// Every changed bit is detected.
func TestAnyFlippedBit(t *testing.T) {
	b := content(t, written(t, "one", "two", "three"))
	whole, _, _ := readAll(b)
	for bit := range len(b) * 8 {
		bad := slices.Clone(b)
		bad[bit/8] ^= 1 << (bit % 8)
		records, _, err := readAll(bad)
		if len(records) > len(whole) || !slices.Equal(records, whole[:len(records)]) || err == nil && len(records) == len(whole) {
			// The run id is covered by its own checksum, the magic by comparison.
			t.Fatalf("bit %d: %q, %v", bit, records, err)
		}
	}
}

func TestDamageInTheMiddle(t *testing.T) {
	b := content(t, written(t, "one", "two", "three"))
	b[bytes.Index(b, []byte("two"))] = 'T'
	_, _, err := readAll(b)
	var corrupt *CorruptError
	if !errors.As(err, &corrupt) || corrupt.Offset != int64(bytes.Index(b, []byte("Two"))-frame) {
		t.Errorf("got %v", err)
	}
}

func TestOneWriter(t *testing.T) {
	path := written(t, "one")
	locked := func(want bool) {
		t.Helper()
		if got, err := Locked(path); err != nil || got != want {
			t.Errorf("locked %v, %v; want %v", got, err, want)
		}
	}
	locked(false)
	j, _, err := Open(path, func([]byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	locked(true)
	if _, _, err := Open(path, nil); !errors.Is(err, ErrLocked) {
		t.Errorf("a second writer: %v", err)
	}
	if _, err := Create(path, "run"); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second journal: %v", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	locked(false)
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	for _, run := range []string{"", strings.Repeat("x", maxRun+1)} {
		if _, err := Create(filepath.Join(dir, "j"), run); err == nil {
			t.Errorf("a run id of %d bytes passes", len(run))
		}
	}
	j, err := Create(filepath.Join(dir, "j"), "run")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{0, MaxRecord + 1} {
		if err := j.Append(make([]byte, n)); err == nil {
			t.Errorf("a record of %d bytes passes", n)
		}
	}
	stop := errors.New("stop")
	b := content(t, written(t, "one", "two"))
	if _, _, err := Read(bytes.NewReader(b), func([]byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("an error of the visitor: %v", err)
	}
	// After a failure the journal accepts nothing.
	j.file.Close()
	if j.Append([]byte("x")) == nil || j.Append([]byte("y")) == nil || j.Sync() == nil {
		t.Error("a closed file takes records")
	}
}

// A length without data allocates no memory.
func TestHugeLength(t *testing.T) {
	b := content(t, written(t))
	b = binary.LittleEndian.AppendUint32(b, MaxRecord)
	b = append(b, "12345"...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, _, err := readAll(b); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes for a record that is not there", n)
	}
}

// FuzzRead: for any file, writing the records that are read again reproduces the beginning of the
// file.
func FuzzRead(f *testing.F) {
	f.Add(content(f, written(f)))
	f.Add(content(f, written(f, some...)))
	f.Add(content(f, written(f, "one", "two"))[:40])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		var records [][]byte
		run, end, err := Read(bytes.NewReader(b), func(p []byte) error {
			records = append(records, slices.Clone(p))
			return nil
		})
		if err != nil {
			return
		}
		if run == "" || end > int64(len(b)) {
			t.Fatalf("run %q, %d bytes of %d", run, end, len(b))
		}
		head := slices.Clone(b[:len(magic)+4])
		seed := seedOf(head[len(magic):])
		again := appendRecord(head, []byte(run), seed)
		for _, r := range records {
			again = appendRecord(again, r, seed)
		}
		if !bytes.Equal(again, b[:end]) {
			t.Fatalf("%d records make\n%q, read from\n%q", len(records), again, b[:end])
		}
	})
}

func ExampleRead() {
	dir, _ := os.MkdirTemp("", "journal")
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "journal")
	j, _ := Create(path, "run 7")
	j.Append([]byte("hosts found"))
	j.Append([]byte("world published"))
	j.Sync()
	j.Close()
	f, _ := os.Open(path)
	defer f.Close()
	run, _, _ := Read(f, func(p []byte) error {
		fmt.Printf("%s\n", p)
		return nil
	})
	fmt.Println(run)
	// Output:
	// hosts found
	// world published
	// run 7
}
