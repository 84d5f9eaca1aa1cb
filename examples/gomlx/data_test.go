package main

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// idx returns an uncompressed IDX file.
func idx(n int, data []byte, dims ...int) []byte {
	b := binary.BigEndian.AppendUint32(nil, 8<<8|uint32(1+len(dims)))
	b = binary.BigEndian.AppendUint32(b, uint32(n))
	for _, d := range dims {
		b = binary.BigEndian.AppendUint32(b, uint32(d))
	}
	return append(b, data...)
}

func writeGzip(t *testing.T, path string, data []byte) {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// stripes returns a data set that is learned in a few steps: class c is a bright stripe in row
// 2c+4, with noise.
func stripes(n int, seed uint64) *images {
	random := rand.New(rand.NewPCG(seed, 0))
	s := &images{pixels: make([]byte, n*pixels), labels: make([]byte, n)}
	for i := range s.pixels {
		s.pixels[i] = byte(random.IntN(100))
	}
	for i := range s.labels {
		s.labels[i] = byte(i % classes)
		row := s.pixels[i*pixels+(2*int(s.labels[i])+4)*side:]
		for x := 4; x < side-4; x++ {
			row[x] = byte(200 + random.IntN(56))
		}
	}
	return s
}

// write writes the sets to a new folder in the format of Fashion-MNIST and returns the folder.
func write(t *testing.T, train, heldOut *images) string {
	t.Helper()
	dir := t.TempDir()
	for part, s := range map[string]*images{"train": train, "t10k": heldOut} {
		writeGzip(t, filepath.Join(dir, part+"-images-idx3-ubyte.gz"), idx(s.len(), s.pixels, side, side))
		writeGzip(t, filepath.Join(dir, part+"-labels-idx1-ubyte.gz"), idx(s.len(), s.labels))
	}
	return dir
}

func TestLoad(t *testing.T) {
	want, wantHeldOut := stripes(30, 1), stripes(20, 2)
	train, heldOut, err := load(write(t, want, wantHeldOut))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(train.pixels, want.pixels) || !bytes.Equal(train.labels, want.labels) {
		t.Error("the images to train on are not those written")
	}
	if !bytes.Equal(heldOut.pixels, wantHeldOut.pixels) || !bytes.Equal(heldOut.labels, wantHeldOut.labels) {
		t.Error("the images held out are not those written")
	}
}

func TestLoadSaysWhatToInstall(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "none")
	_, _, err := load(dir)
	if err == nil || !strings.Contains(err.Error(), "not in "+dir+": install the Debian package dataset-fashion-mnist") {
		t.Errorf("error %v", err)
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		data []byte
		want string
	}{
		"too few labels": {"train-labels-idx1-ubyte.gz", idx(29, make([]byte, 29)), "30 images of part train, and 29 labels"},
		"a label":        {"train-labels-idx1-ubyte.gz", idx(30, bytes.Repeat([]byte{10}, 30)), "image 0 of part train has the label 10"},
		"none":           {"t10k-labels-idx1-ubyte.gz", idx(0, nil), "and 0 labels"},
		"cut short":      {"t10k-images-idx3-ubyte.gz", idx(20, make([]byte, 19*pixels), side, side), "unexpected EOF"},
		"no header":      {"t10k-images-idx3-ubyte.gz", []byte{0, 0, 8}, "unexpected EOF"},
		"other kind":     {"t10k-images-idx3-ubyte.gz", idx(20, make([]byte, 20*pixels)), "its first word is 0x801"},
		"other size":     {"t10k-images-idx3-ubyte.gz", idx(20, make([]byte, 20*pixels), side, 27), "dimension 2 is 27, not 28"},
		"too many":       {"t10k-images-idx3-ubyte.gz", idx(1<<30, nil, side, side), "1073741824 examples, more than"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := write(t, stripes(30, 1), stripes(20, 2))
			writeGzip(t, filepath.Join(dir, c.file), c.data)
			if _, _, err := load(dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %s", err, c.want)
			}
		})
	}
	dir := write(t, stripes(30, 1), stripes(20, 2))
	if err := os.WriteFile(filepath.Join(dir, "train-images-idx3-ubyte.gz"), []byte("this is no compressed file"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := load(dir); err == nil || !strings.Contains(err.Error(), "train-images-idx3-ubyte.gz: gzip: invalid header") {
		t.Errorf("error %v", err)
	}
}
