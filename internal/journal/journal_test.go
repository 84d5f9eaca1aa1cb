package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// written creates a journal of these records and returns its path.
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

// headLen is the number of bytes before the first record of a file of written.
const headLen = firstAt + frame + int64(len("run")) + frame + markLen

// elsewhere makes this test read journals as on another machine, or as after a restart of this one.
func elsewhere(t testing.TB) {
	t.Helper()
	before := machine
	machine = func() [16]byte { return [16]byte{0: 1} }
	t.Cleanup(func() { machine = before })
}

// endsOf returns the offsets at which the records of a file of written end; the first is the end of
// its head.
func endsOf(records []string) []int64 {
	ends := []int64{headLen}
	for _, r := range records {
		ends = append(ends, ends[len(ends)-1]+frame+int64(len(r)))
	}
	return ends
}

// TestCutAnywhere: a file that lacks any number of its last bytes counts as damaged on its writer's
// machine.
func TestCutAnywhere(t *testing.T) {
	b := content(t, written(t, some...))
	for cut := range len(b) {
		records, _, err := readAll(b[:cut])
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) && !(cut < int(firstAt) && errors.Is(err, errFormat)) {
			t.Fatalf("cut at %d: %d records, %v", cut, len(records), err)
		}
	}
}

// TestCutByTheMachinesDeath: after the machine's death a file yields its complete records, and the
// synced ones must be there. The next writer appends after them.
func TestCutByTheMachinesDeath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := Create(path, "run")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for i, r := range some {
		if err := j.Append([]byte(r)); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if err := j.Sync(); err != nil {
				t.Fatal(err)
			}
		}
	}
	b, ends := content(t, path), endsOf(some)
	elsewhere(t)
	cutPath := filepath.Join(t.TempDir(), "cut")
	for cut := ends[0]; cut <= int64(len(b)); cut++ {
		records, end, err := readAll(b[:cut])
		if cut < ends[1] {
			if corrupt := (*CorruptError)(nil); !errors.As(err, &corrupt) || corrupt.Offset != ends[0] {
				t.Fatalf("cut at %d, before the end of what is synced: %v", cut, err)
			}
			continue
		}
		n := 1
		for n < len(some) && ends[n+1] <= cut {
			n++
		}
		if err != nil || end != ends[n] || !slices.Equal(records, some[:n]) {
			t.Fatalf("cut at %d: %d records to %d, %v; want %d to %d", cut, len(records), end, err, n, ends[n])
		}
		if cut%97 != 0 && cut != end {
			continue
		}
		if err := os.WriteFile(cutPath, b[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, run, err := Open(cutPath, func([]byte) error { return nil })
		if err != nil || run != "run" || j.Lost() != int64(len(b))-end {
			t.Fatalf("cut at %d: run %q, %v", cut, run, err)
		}
		if err := errors.Join(j.Append([]byte("more")), j.Sync(), j.Close()); err != nil {
			t.Fatal(err)
		}
		records, _, err = readAll(content(t, cutPath))
		if want := append(slices.Clone(some[:n]), "more"); err != nil || !slices.Equal(records, want) {
			t.Fatalf("cut at %d and gone on: %q, %v", cut, records, err)
		}
	}
}

// TestCutByTheWritersDeath: a record that is incomplete because the writer died does not count, and
// the next writer overwrites it. A complete one is read even if the mark does not include it.
func TestCutByTheWritersDeath(t *testing.T) {
	b := content(t, written(t, some...))
	seed := seedOf(b[len(magic):firstAt])
	torn := appendRecord(nil, []byte("torn"), seed)
	path := filepath.Join(t.TempDir(), "torn")
	for n := range len(torn) + 1 {
		if err := os.WriteFile(path, append(slices.Clone(b), torn[:n]...), 0o600); err != nil {
			t.Fatal(err)
		}
		want := slices.Clone(some)
		if n == len(torn) {
			want = append(want, "torn")
		}
		j, _, err := Open(path, func([]byte) error { return nil })
		if err != nil || j.Lost() != 0 {
			t.Fatalf("%d bytes of a record: %v", n, err)
		}
		if err := errors.Join(j.Append([]byte("more")), j.Close()); err != nil {
			t.Fatal(err)
		}
		got, _, err := readAll(content(t, path))
		if err != nil || !slices.Equal(got, append(want, "more")) {
			t.Fatalf("%d bytes of a record: %q, %v", n, got, err)
		}
	}
}

// TestAnyFlippedBit: every changed bit is detected, and Open leaves the file unchanged.
func TestAnyFlippedBit(t *testing.T) {
	b := content(t, written(t, "one", "two", "three"))
	path := filepath.Join(t.TempDir(), "damaged")
	for bit := range len(b) * 8 {
		bad := slices.Clone(b)
		bad[bit/8] ^= 1 << (bit % 8)
		if records, _, err := readAll(bad); err == nil {
			t.Fatalf("bit %d: %q is read", bit, records)
		}
		if bit%7 != 0 {
			continue
		}
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Open(path, func([]byte) error { return nil }); err == nil || !bytes.Equal(content(t, path), bad) {
			t.Fatalf("bit %d: %v, and the file has changed: %v", bit, err, !bytes.Equal(content(t, path), bad))
		}
	}
}

// TestRandomDamage: damage at one place of a file is detected unless the records are unchanged. It
// is tried 300 times: a flipped bit anywhere, a flipped bit of a length, a truncated end, and
// zeroed bytes.
func TestRandomDamage(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var records []string
	for i := range 200 {
		records = append(records, fmt.Sprintf(`{"record":%d,"text":"%s"}`, i, strings.Repeat("x", rnd.IntN(400))))
	}
	path := written(t, records...)
	ends := endsOf(records)
	size := ends[len(records)]
	for _, room := range []int64{0, 1 << 20} { // reserved
		b := append(content(t, path), make([]byte, room)...)
		for name, damage := range map[string]func(b []byte) []byte{
			"bit":    func(b []byte) []byte { b[rnd.Int64N(size)] ^= 1 << rnd.IntN(8); return b },
			"length": func(b []byte) []byte { b[ends[rnd.IntN(len(records))]+rnd.Int64N(4)] ^= 1 << rnd.IntN(8); return b },
			"cut":    func(b []byte) []byte { return b[:rnd.Int64N(size)] },
			"zeros": func(b []byte) []byte {
				at := rnd.Int64N(size)
				clear(b[at:min(at+16+rnd.Int64N(4096), int64(len(b)))])
				return b
			},
		} {
			for i := range 300 {
				bad := damage(slices.Clone(b))
				if got, _, err := readAll(bad); err == nil && !slices.Equal(got, records) {
					t.Errorf("%s %d, %d bytes reserved: %d of %d records are read", name, i, room, len(got), len(records))
				}
			}
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

// TestHugeLength: a length without data allocates no memory.
func TestHugeLength(t *testing.T) {
	b := content(t, written(t))
	b = binary.LittleEndian.AppendUint32(b, MaxRecord)
	b = append(b, "12345"...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	elsewhere(t)
	if _, _, err := readAll(b); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes for a record that is not there", n)
	}
}

// FuzzRead: for any file, writing the records that were read reproduces the beginning of the file.
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
		seed := seedOf(b[len(magic):firstAt])
		again := appendRecord(slices.Clone(b[:firstAt]), []byte(run), seed)
		if string(b[:len(magic)]) == magic {
			again = append(again, b[len(again):len(again)+frame+markLen]...)
		}
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
