package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

var sample = About{Commits: 7, Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Size: 4,
	Parts: []Part{{Name: "epoch", Kind: "value int64"}, {Name: "layers", Kind: "two"}, {Name: "tags", Kind: "value map", Text: "map[]"}}}

var sampleTensors = [][]Tensor{{{"epoch", "I64", true}}, {{"layers.0", "F32", false}, {"layers.1", "F16", false}}, {{"tags", "U8", false}}}

func sampleBytes() [][]byte {
	large := make([]byte, snapshot.ChunkSize+8)
	large[snapshot.ChunkSize] = 1
	return [][]byte{{3, 0, 0, 0, 0, 0, 0, 0}, binary.LittleEndian.AppendUint32(large, math.Float32bits(1.5)), {1, 2}, {9, 8, 7}}
}

// Progress is reported as data reaches the disk.
func TestWriteReportsProgress(t *testing.T) {
	const size = 5*settleEvery + 1000
	var s snapshot.Store
	p := s.Begin(1, []snapshot.Source{{Bytes: bytes.Repeat([]byte("x"), size), Given: true}})
	p.Copy()
	p.Seal()
	dir, parts, all := t.TempDir(), 0, int64(0)
	about := About{Commits: 1, Parts: []Part{{Name: "x", Kind: "bytes"}}}
	err := Write(dir, false, about, [][]Tensor{{{Name: "x", Type: "U8"}}}, s.Last().Blobs(), func(n int64) {
		parts, all = parts+1, all+n
	})
	if err != nil || parts != 4 || all != 4*settleEvery {
		t.Errorf("%d bytes were told of %d, in %d parts, %v", all, size, parts, err)
	}
	f, err := Open(Path(dir, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Check(f.About.Parts[0]); err != nil {
		t.Error(err)
	}
}

func blobs() []snapshot.Blob {
	var s snapshot.Store
	var sources []snapshot.Source
	for _, b := range sampleBytes() {
		sources = append(sources, snapshot.Source{Bytes: b, Given: true})
	}
	p := s.Begin(7, sources)
	p.Copy()
	p.Seal()
	return s.Last().Blobs()
}

// small is the sample without the large tensor, small enough to damage each byte of it.
func small(t *testing.T) []byte {
	t.Helper()
	about, tensors := sample, slices.Clone(sampleTensors)
	about.Parts = about.Parts[:1]
	var b bytes.Buffer
	if err := encode(&b, about, tensors[:1], blobs()[:1]); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// read opens a checkpoint and reads all of it.
func read(path string) (*File, [][]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	var all [][]byte
	for _, p := range f.About.Parts {
		b, err := f.Read(p)
		if err := errors.Join(err, f.Check(p)); err != nil {
			return nil, nil, err
		}
		all = append(all, b...)
	}
	return f, all, nil
}

func TestWriteAndRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	f, got, err := read(Path(dir, 7))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range sampleBytes() {
		if !bytes.Equal(got[i], want) {
			t.Errorf("tensor %d is another", i)
		}
	}
	a := f.About
	if a.Version != Version || a.Commits != 7 || !a.Time.Equal(sample.Time) || a.Size != 4 || len(a.Parts) != 3 || a.Parts[2].Text != "map[]" ||
		!slices.Equal(a.Parts[1].Tensors, []string{"layers.0", "layers.1"}) || f.Len(a.Parts[1]) != snapshot.ChunkSize+12+2 {
		t.Errorf("%+v", a)
	}
	if all, err := List(dir); err != nil || !slices.Equal(all, []uint64{7}) {
		t.Error(all, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// The file follows the safetensors format, as read by code that knows only that format.
func TestFormat(t *testing.T) {
	var b bytes.Buffer
	if err := encode(&b, sample, sampleTensors, blobs()); err != nil {
		t.Fatal(err)
	}
	file := b.Bytes()
	n := binary.LittleEndian.Uint64(file)
	var header map[string]json.RawMessage
	if err := json.Unmarshal(file[8:8+n], &header); err != nil || n%8 != 0 || file[8] != '{' {
		t.Fatal(n, err)
	}
	var metadata map[string]string
	if err := json.Unmarshal(header["__metadata__"], &metadata); err != nil || !strings.HasPrefix(metadata["hvdrun"], `{"version":2,"commits":7,`) {
		t.Error(metadata, err)
	}
	delete(header, "__metadata__")
	data, covered := file[8+n:], make([]bool, len(file)-8-int(n))
	want := map[string]struct {
		dtype string
		shape []int
		bytes []byte
	}{
		"epoch": {"I64", []int{}, sampleBytes()[0]}, "layers.0": {"F32", []int{snapshot.ChunkSize/4 + 3}, sampleBytes()[1]},
		"layers.1": {"F16", []int{1}, sampleBytes()[2]}, "tags": {"U8", []int{3}, sampleBytes()[3]},
	}
	for name, text := range header {
		var e struct {
			DType   string `json:"dtype"`
			Shape   []int  `json:"shape"`
			Offsets []int  `json:"data_offsets"`
		}
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatal(err)
		}
		elements := 1
		for _, d := range e.Shape {
			elements *= d
		}
		if e.Offsets[1]-e.Offsets[0] != elements*sizes[e.DType] || e.Offsets[0]%sizes[e.DType] != 0 {
			t.Errorf("%s: %+v", name, e)
		}
		for i := e.Offsets[0]; i < e.Offsets[1]; i++ {
			if covered[i] {
				t.Fatalf("%s overlaps another", name)
			}
			covered[i] = true
		}
		w, ok := want[name]
		if ok && (e.DType != w.dtype || !slices.Equal(e.Shape, w.shape) || e.Shape == nil || !bytes.Equal(data[e.Offsets[0]:e.Offsets[1]], w.bytes)) {
			t.Errorf("%s: %+v", name, e)
		}
		if delete(want, name); !ok && name != "hvdrun.seal" {
			t.Errorf("%s is nobody's", name)
		}
	}
	if len(want) > 0 || slices.Contains(covered, false) {
		t.Errorf("missing: %v, or a hole", want)
	}
}

// A file that is truncated, extended or has any flipped bit is damaged.
func TestDamage(t *testing.T) {
	path, file := filepath.Join(t.TempDir(), "f"), small(t)
	try := func(b []byte, why string, at int) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := read(path); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s %d: %v", why, at, err)
		}
	}
	for n := range file {
		try(file[:n], "cut at", n)
	}
	for at := range file {
		b := slices.Clone(file)
		b[at] ^= 1 << (at % 8)
		try(b, "a bit flipped in byte", at)
	}
	try(append(slices.Clone(file), 0), "a byte more than", len(file))
	var b bytes.Buffer // a tensor of two chunks
	if err := encode(&b, sample, sampleTensors, blobs()); err != nil {
		t.Fatal(err)
	}
	large := b.Bytes()
	for _, at := range []int{len(large) - 13, len(large) - snapshot.ChunkSize, len(large) - snapshot.ChunkSize/2} {
		large[at] ^= 16
		try(large, "a bit flipped in byte", at)
		large[at] ^= 16
	}
	if err := os.WriteFile(path, large, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := read(path); err != nil {
		t.Error(err)
	}
}

func TestOthersFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	header := `{"a":{"dtype":"U8","shape":[40],"data_offsets":[0,40]}} `
	theirs := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header+strings.Repeat("x", 40)...)
	later := bytes.Replace(small(t), []byte(`\"version\":2`), []byte(`\"version\":3`), 1)
	n := 8 + int(binary.LittleEndian.Uint64(later))
	copy(later[len(later)-sealSize:], seal(later[:n]))
	for want, b := range map[string][]byte{
		"of another program": theirs, "version 3": later, "its header is of": bytes.Repeat([]byte{255}, 100), "it has 0 bytes": nil,
	} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if _, err := Open(path + "none"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestPruneAndSetAside(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []uint64{5, 1, 20, 3} {
		about := sample
		about.Commits = n
		if err := Write(dir, false, about, sampleTensors, blobs(), func(int64) {}); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "commit-x.safetensors"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Prune(dir, 3, 1); err != nil { // 5 and 20 belong to another job
		t.Fatal(err)
	}
	if all, err := List(dir); err != nil || !slices.Equal(all, []uint64{20, 5, 3}) {
		t.Error(all, err)
	}
	if err := errors.Join(Prune(dir, 20, 2), SetAside(Path(dir, 5))); err != nil {
		t.Fatal(err)
	}
	if all, err := List(dir); err != nil || !slices.Equal(all, []uint64{20}) {
		t.Error(all, err)
	}
	if all, err := List(filepath.Join(dir, "none")); err != nil || all != nil {
		t.Error(all, err)
	}
}

// Incomplete files of killed writers are removed; those of running writers are not.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	dead, alive := filepath.Join(dir, ".commit-dead.tmp"), filepath.Join(dir, ".commit-alive.tmp")
	f, err := os.Create(alive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(os.WriteFile(dead, []byte("x"), 0o600), syscall.Flock(int(f.Fd()), syscall.LOCK_EX)); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Error("the dead one's file is there:", err)
	}
	if _, err := os.Stat(alive); err != nil {
		t.Error("the living one's file is gone:", err)
	}
}

// If a disk becomes full at any point, the error says so, no incomplete file remains, and existing
// checkpoints are intact. The limit on file sizes applies to a process, so the test starts another
// one.
func TestFullDisk(t *testing.T) {
	const variable = "CHECKPOINT_TEST_FULL_DISK"
	if dir := os.Getenv(variable); dir != "" {
		about := sample
		about.Commits = 8
		whole, err := os.Stat(Path(dir, 7))
		if err != nil {
			t.Fatal(err)
		}
		for limit := uint64(0); limit < uint64(whole.Size()); limit += 1 + limit/2 {
			if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: limit, Max: math.MaxUint64}); err != nil {
				t.Fatal(err)
			}
			if err := Write(dir, false, about, sampleTensors, blobs(), func(int64) {}); !errors.Is(err, syscall.EFBIG) {
				t.Errorf("at %d bytes: %v", limit, err)
			}
		}
		return
	}
	dir := t.TempDir()
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestFullDisk$")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, _, err := read(Path(dir, 7)); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Error(left, err)
	}
}

func TestNamesThatClash(t *testing.T) {
	for _, name := range []string{"epoch", sealName, metadataKey} {
		tensors := [][]Tensor{{{"epoch", "I64", true}}, {{name, "F32", false}, {"b", "F16", false}}, {{"c", "U8", false}}}
		if err := encode(&bytes.Buffer{}, sample, tensors, blobs()); err == nil || !strings.Contains(err.Error(), "two tensors are named") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAcquire(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	mine, other := Owner{"mine", "process 1 on a"}, Owner{"other", "process 2 on b"}
	first, err := Acquire(dir, false, mine)
	if err != nil || first == nil {
		t.Fatal(first, err)
	}
	if again, err := Acquire(dir, false, Owner{"mine", "process 3 on c"}); again != nil || err != nil {
		t.Error(again, err)
	}
	var locked *LockedError
	if l, err := Acquire(dir, false, other); l != nil || !errors.As(err, &locked) || locked.Owner != mine || locked.Dir != dir {
		t.Error(l, err)
	}
	if want := "checkpoint: the job mine writes into " + dir + " (process 1 on a): each job"; !strings.HasPrefix(locked.Error(), want) {
		t.Error(locked)
	}
	first.Release()
	second, err := Acquire(dir, false, Owner{"", "p"})
	if err != nil || second == nil {
		t.Fatal(second, err)
	}
	defer second.Release()
	// Two programs without a job do not count as the same job.
	if l, err := Acquire(dir, false, Owner{}); l != nil || !errors.As(err, &locked) || locked.Owner != (Owner{"", "p"}) ||
		!strings.HasPrefix(locked.Error(), "checkpoint: another program writes") {
		t.Error(l, err)
	}
	if left, err := List(dir); err != nil || left != nil {
		t.Error(left, err)
	}
	var none *Lock
	none.Release()
	if _, err := Acquire(filepath.Join(dir, lockName, "below"), false, mine); err == nil || errors.As(err, &locked) {
		t.Error(err)
	}
}

// full mounts a file system of 16 MiB in memory, which requires root.
func full(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("no file system can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// A checkpoint is written to a file system with no free byte, then again with more and more free
// space. Each time it is either complete or absent, and earlier checkpoints are intact.
func TestFullFileSystem(t *testing.T) {
	dir := full(t)
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Close()
	block := make([]byte, 4096)
	taken := int64(0)
	for ; err == nil; taken += int64(len(block)) {
		_, err = ballast.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	about := sample
	about.Commits = 8
	failed := 0
	for err = syscall.ENOSPC; err != nil; failed++ {
		if err = Write(dir, false, about, sampleTensors, blobs(), func(int64) {}); err != nil && !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		if _, _, err := read(Path(dir, 7)); err != nil {
			t.Fatal(err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, temporary)); len(left) > 0 {
			t.Fatalf("left: %v", left)
		}
		taken -= 100 << 10
		if err := ballast.Truncate(taken); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := read(Path(dir, 8)); err != nil || failed < 5 {
		t.Errorf("%v after %d that failed", err, failed)
	}
}

// The Python library safetensors, if installed, reads the sample.
func TestPythonReadsIt(t *testing.T) {
	if out, err := exec.Command("python3", "-c", "import safetensors").CombinedOutput(); err != nil {
		t.Skipf("Python's safetensors is not there: %v: %s", err, bytes.TrimSpace(out))
	}
	dir := t.TempDir()
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	const program = `
import json, sys
from safetensors import deserialize
for name, t in sorted(deserialize(open(sys.argv[1], "rb").read())):
    print(name, t["dtype"], t["shape"], len(t["data"]), bytes(t["data"])[-4:].hex())
`
	out, err := exec.Command("python3", "-c", program, Path(dir, 7)).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var want strings.Builder
	names := map[string]string{"epoch": "I64 []", "layers.0": "F32 [262147]", "layers.1": "F16 [1]", "tags": "U8 [3]"}
	for i, name := range []string{"epoch", "layers.0", "layers.1", "tags"} {
		b := sampleBytes()[i]
		fmt.Fprintf(&want, "%s %s %d %x\n", name, names[name], len(b), b[max(0, len(b)-4):])
	}
	var got strings.Builder
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, sealName) {
			got.WriteString(line)
		}
	}
	if got.String() != want.String() {
		t.Errorf("%s\nwant\n%s", out, &want)
	}
}
