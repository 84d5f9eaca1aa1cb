// Package checkpoint stores commits in files: Write writes a checkpoint, List finds those in a
// folder, and Open reads one.
//
// A checkpoint is a safetensors file, so that other tools can read its tensors: eight bytes with
// the length of the header, little-endian; the header, JSON padded with spaces to a multiple of
// eight; the bytes of the tensors. Version 2 of this package's format adds:
//
//   - The header's "__metadata__" has one key "hvdrun": a JSON text with "version" (2), "commits"
//     (the number of the commit), "time", "size" (ranks of the world) and "parts". Each part of the
//     state has its "name", its "kind" (which must match in the program that reads it), an optional
//     readable "text", its "tensors" by name, and "sums": for each tensor the CRC-32 of each chunk
//     of 1 MiB, the last of which may be shorter. The CRC-32 is that of zlib, which Python has.
//   - Values that are not tensors are tensors of type U8, numbers of their own type without a
//     dimension. Values are encoded by encoding/gob, samplers as three varints, other parts by
//     their own methods.
//   - A part that differs between ranks has one tensor per rank, "name.0" and so on, and after
//     these the orphaned ones of workers of earlier worlds.
//   - The last tensor, "hvdrun.seal", is twelve bytes: "hvdrseal" and the CRC-32C of everything
//     before the tensors.
//
// A file that is truncated or in which any bit has changed is detected as damaged. A file gets its
// name after all of it is on disk.
package checkpoint

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Version is the version of the format.
const Version = 2

const (
	metadataKey = "__metadata__"
	ownKey      = "hvdrun"
	sealName    = "hvdrun.seal"
	sealMagic   = "hvdrseal"
	sealSize    = len(sealMagic) + 4
	// maxHeader bounds the header, in bytes, which is read before anything is verified. It suffices
	// for 10 TB of tensors.
	maxHeader = 256 << 20
)

// ErrDamaged is wrapped by errors about a file that is incomplete, corrupted or not a checkpoint.
var ErrDamaged = errors.New("the checkpoint is damaged")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// About is the metadata of a checkpoint.
type About struct {
	Version int       `json:"version"`
	Commits uint64    `json:"commits"`
	Time    time.Time `json:"time"`
	Size    int       `json:"size"`
	Parts   []Part    `json:"parts"`
}

// Part describes one part of the state.
type Part struct {
	Name string `json:"name"`
	// Kind must be the same in the reading program as in the one that wrote the file.
	Kind string `json:"kind"`
	// Text is a readable summary of the value; it may be empty.
	Text    string   `json:"text,omitempty"`
	Tensors []string `json:"tensors"`
	// Sums contains the checksums of each tensor's chunks.
	Sums [][]uint32 `json:"sums"`
}

// Tensor describes one blob of a snapshot in the file.
type Tensor struct {
	// Name is unique in the file.
	Name string
	// Type is a type of safetensors: F64, F32, F16, BF16, I64, …, U8, BOOL.
	Type string
	// Scalar means that the tensor has no dimension. Otherwise it has one.
	Scalar bool
}

// entry is a tensor in the header.
type entry struct {
	DType   string    `json:"dtype"`
	Shape   []int64   `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// sizes contains the size in bytes of an element of each type.
var sizes = map[string]int{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
	"I8": 1, "U8": 1, "BOOL": 1}

// encode writes a checkpoint to w. tensors describes the tensors of each part, and blobs contains
// their bytes in the same order. encode sets Tensors and Sums of the parts.
func encode(w io.Writer, about About, tensors [][]Tensor, blobs []snapshot.Blob) error {
	about.Version = Version
	about.Parts = slices.Clone(about.Parts)
	header := map[string]any{}
	type placed struct {
		Tensor
		blob *snapshot.Blob
	}
	var all []placed
	for i := range about.Parts {
		p := &about.Parts[i]
		p.Tensors, p.Sums = nil, nil
		for _, t := range tensors[i] {
			blob := &blobs[len(all)]
			chunks := make([]uint32, blob.Chunks())
			for c := range chunks {
				chunks[c] = crc32.ChecksumIEEE(blob.Chunk(c))
			}
			p.Tensors, p.Sums = append(p.Tensors, t.Name), append(p.Sums, chunks)
			all = append(all, placed{t, blob})
		}
	}
	// Sorting by element size aligns all elements, which some readers require.
	slices.SortStableFunc(all, func(a, b placed) int { return cmp.Compare(sizes[b.Type], sizes[a.Type]) })
	offset := uint64(0)
	for _, t := range all {
		if _, twice := header[t.Name]; twice || t.Name == metadataKey || t.Name == sealName {
			return fmt.Errorf("checkpoint: two tensors are named %q", t.Name)
		}
		e := entry{DType: t.Type, Shape: []int64{}, Offsets: [2]uint64{offset, offset + uint64(t.blob.Len())}}
		if !t.Scalar {
			e.Shape = append(e.Shape, int64(t.blob.Len()/sizes[t.Type]))
		}
		header[t.Name] = e
		offset = e.Offsets[1]
	}
	header[sealName] = entry{"U8", []int64{int64(sealSize)}, [2]uint64{offset, offset + uint64(sealSize)}}
	own, err := json.Marshal(about)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	header[metadataKey] = map[string]string{ownKey: string(own)}
	text, err := json.Marshal(header)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	head := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	if _, err := w.Write(head); err != nil {
		return err
	}
	for _, t := range all {
		for c := range t.blob.Chunks() {
			if _, err := w.Write(t.blob.Chunk(c)); err != nil {
				return err
			}
		}
	}
	_, err = w.Write(seal(head))
	return err
}

func seal(head []byte) []byte {
	return binary.LittleEndian.AppendUint32([]byte(sealMagic), snapshot.Sum(head))
}

// File is an open checkpoint.
type File struct {
	About About
	// Size is the size of the file in bytes.
	Size int64

	file    *os.File
	data    int64 // offset of the tensors
	entries map[string]entry
}

// Open opens a checkpoint and verifies all of it except the bytes of the tensors. It returns errors
// of reading, and ErrDamaged, wrapped. For an unknown version, and for a safetensors file of
// another program, it returns an error that says so. The caller must call Close.
func Open(path string) (*File, error) { return open(path, safefile.Read) }

// OpenOwn is like Open, for a checkpoint from which training continues: the file must belong to
// this user or to root, and nobody else may be able to write to it. Otherwise, in a folder in which
// others may create files, anyone could provide the newest checkpoint.
func OpenOwn(path string) (*File, error) {
	return open(path, func(path string) (*os.File, error) {
		f, err := safefile.ReadOwn(path)
		if err != nil {
			err = fmt.Errorf("checkpoint: training cannot go on from it: %w", err)
		}
		return f, err
	})
}

func open(path string, by func(string) (*os.File, error)) (*File, error) {
	f, err := by(path)
	if err != nil {
		return nil, err
	}
	c := &File{file: f}
	if err := c.readHead(); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("checkpoint: %s: %w", path, err)
	}
	return c, nil
}

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }

func (f *File) readHead() error {
	info, err := f.file.Stat()
	if err != nil {
		return err
	}
	f.Size = info.Size()
	var length [8]byte
	if f.Size < int64(len(length)+sealSize) {
		return damaged("it has %d bytes", f.Size)
	}
	if _, err := f.file.ReadAt(length[:], 0); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader || n > uint64(f.Size)-uint64(len(length)+sealSize) {
		return damaged("its header is of %d bytes, the file of %d", n, f.Size)
	}
	head := make([]byte, len(length)+int(n))
	if _, err := f.file.ReadAt(head, 0); err != nil {
		return err
	}
	f.data = int64(len(head))
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(head[len(length):], &fields); err != nil {
		return damaged("its header is not JSON: %v", err)
	}
	end := make([]byte, sealSize)
	if _, err := f.file.ReadAt(end, f.Size-int64(sealSize)); err != nil {
		return err
	}
	if !bytes.Equal(end, seal(head)) {
		if _, ours := fields[sealName]; !ours {
			return damaged("it is a safetensors file of another program")
		}
		return damaged("its seal does not match its header")
	}
	// The seal has verified the header.
	return f.parse(fields)
}

// parse decodes the header.
func (f *File) parse(fields map[string]json.RawMessage) error {
	var metadata map[string]string
	if err := json.Unmarshal(fields[metadataKey], &metadata); err != nil {
		return damaged("its metadata: %v", err)
	}
	delete(fields, metadataKey)
	if err := json.Unmarshal([]byte(metadata[ownKey]), &f.About); err != nil {
		return damaged("its metadata: %v", err)
	}
	if f.About.Version != Version {
		return fmt.Errorf("its format has version %d, this program reads version %d", f.About.Version, Version)
	}
	f.entries = make(map[string]entry, len(fields))
	last, sum := uint64(0), uint64(0)
	for name, text := range fields {
		var e entry
		if err := json.Unmarshal(text, &e); err != nil {
			return damaged("tensor %q: %v", name, err)
		}
		size := uint64(f.Size - f.data)
		if e.Offsets[0] > e.Offsets[1] || e.Offsets[1] > size || e.Offsets[1]-e.Offsets[0] > math.MaxInt {
			return damaged("tensor %q is at %v of %d", name, e.Offsets, size)
		}
		f.entries[name] = e
		last = max(last, e.Offsets[1])
		if sum += e.Offsets[1] - e.Offsets[0]; sum > size {
			return damaged("its tensors have more bytes than the file")
		}
	}
	if f.data+int64(last) != f.Size {
		return damaged("its tensors end at %d, the file at %d", f.data+int64(last), f.Size)
	}
	taken := make(map[string]bool, len(f.entries))
	for _, p := range f.About.Parts {
		if len(p.Sums) != len(p.Tensors) {
			return damaged("part %q has %d tensors but checksums of %d", p.Name, len(p.Tensors), len(p.Sums))
		}
		for i, name := range p.Tensors {
			e, ok := f.entries[name]
			if n := int(e.Offsets[1] - e.Offsets[0]); !ok || len(p.Sums[i]) != snapshot.Chunks(n) {
				return damaged("part %q has no tensor %q of its length", p.Name, name)
			}
			if taken[name] {
				return damaged("tensor %q is in two parts", name)
			}
			taken[name] = true
		}
	}
	return nil
}

// Len returns the size of a part in bytes.
func (f *File) Len(p Part) (n int64) {
	for _, name := range p.Tensors {
		e := f.entries[name]
		n += int64(e.Offsets[1] - e.Offsets[0])
	}
	return n
}

// each reads tensor i of p chunk by chunk, and calls visit with each verified chunk.
func (f *File) each(p Part, i int, visit func(chunk []byte)) error {
	e := f.entries[p.Tensors[i]]
	n := int64(e.Offsets[1] - e.Offsets[0])
	r := bufio.NewReaderSize(io.NewSectionReader(f.file, f.data+int64(e.Offsets[0]), n), snapshot.ChunkSize)
	buf := make([]byte, min(n, snapshot.ChunkSize))
	for c, sum := range p.Sums[i] {
		chunk := buf[:min(n-int64(c)*snapshot.ChunkSize, snapshot.ChunkSize)]
		if _, err := io.ReadFull(r, chunk); err != nil {
			return fmt.Errorf("checkpoint: tensor %q: %w", p.Tensors[i], err)
		}
		if crc32.ChecksumIEEE(chunk) != sum {
			return fmt.Errorf("checkpoint: %w", damaged("tensor %q, chunk %d", p.Tensors[i], c))
		}
		visit(chunk)
	}
	return nil
}

// Check reads a part and returns an error that wraps ErrDamaged if it has changed since it was
// written.
func (f *File) Check(p Part) error {
	for i := range p.Tensors {
		if err := f.each(p, i, func([]byte) {}); err != nil {
			return err
		}
	}
	return nil
}

// Read returns the verified bytes of a part's tensors.
func (f *File) Read(p Part) ([][]byte, error) {
	all := make([][]byte, len(p.Tensors))
	for i, name := range p.Tensors {
		e := f.entries[name]
		all[i] = make([]byte, 0, e.Offsets[1]-e.Offsets[0])
		if err := f.each(p, i, func(chunk []byte) { all[i] = append(all[i], chunk...) }); err != nil {
			return nil, err
		}
	}
	return all, nil
}
