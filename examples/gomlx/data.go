package main

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

const (
	side    = 28          // of an image, in pixels
	pixels  = side * side // of an image, row by row
	classes = 10          // T-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, boot
)

// debianData is the folder of the Debian package dataset-fashion-mnist.
const debianData = "/usr/share/datasets/fashion-mnist"

// images is a set of labelled images. Image i is pixels[i*pixels:(i+1)*pixels], each 0..255, with
// labels[i].
type images struct {
	pixels []byte
	labels []byte
}

func (s *images) len() int { return len(s.labels) }

// load returns the training images and the held-out images from the four files in dir.
func load(dir string) (train, heldOut *images, err error) {
	if train, err = loadImages(dir, "train"); err == nil {
		heldOut, err = loadImages(dir, "t10k")
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("fashion: the data set Fashion-MNIST is not in %s: install the Debian package dataset-fashion-mnist"+
			" (apt-get install dataset-fashion-mnist), or give its folder by -data (%w)", dir, err)
	}
	return train, heldOut, err
}

func loadImages(dir, part string) (*images, error) {
	s := new(images)
	var n int
	err := readGzip(filepath.Join(dir, part+"-images-idx3-ubyte.gz"), func(r io.Reader) (err error) {
		n, s.pixels, err = readIDX(r, side, side)
		return err
	})
	if err != nil {
		return nil, err
	}
	var labels int
	err = readGzip(filepath.Join(dir, part+"-labels-idx1-ubyte.gz"), func(r io.Reader) (err error) {
		labels, s.labels, err = readIDX(r)
		return err
	})
	if err != nil {
		return nil, err
	}
	if n == 0 || n != labels {
		return nil, fmt.Errorf("fashion: %s has %d images of part %s, and %d labels", dir, n, part, labels)
	}
	for i, l := range s.labels {
		if l >= classes {
			return nil, fmt.Errorf("fashion: %s: image %d of part %s has the label %d", dir, i, part, l)
		}
	}
	return s, nil
}

func readGzip(path string, read func(io.Reader) error) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("fashion: %w", err)
	}
	defer f.Close()
	z, err := gzip.NewReader(bufio.NewReader(f))
	if err == nil {
		err = read(z)
	}
	if err != nil {
		return fmt.Errorf("fashion: %s: %w", path, err)
	}
	return nil
}

// maxExamples limits the memory that a corrupt file can make the program allocate.
const maxExamples = 1 << 20

// readIDX reads a file of the format IDX: n examples of bytes, each of the given dimensions.
func readIDX(r io.Reader, dims ...int) (n int, data []byte, err error) {
	header := make([]byte, 4*(2+len(dims)))
	if _, err := io.ReadFull(r, header); err != nil {
		return 0, nil, err
	}
	const unsignedByte = 8
	if kind := binary.BigEndian.Uint32(header); kind != unsignedByte<<8|uint32(1+len(dims)) {
		return 0, nil, fmt.Errorf("its first word is %#x: not an IDX file of bytes in %d dimensions", kind, 1+len(dims))
	}
	count := binary.BigEndian.Uint32(header[4:])
	if count > maxExamples {
		return 0, nil, fmt.Errorf("%d examples, more than %d", count, maxExamples)
	}
	size := 1
	for i, d := range dims {
		if got := binary.BigEndian.Uint32(header[8+4*i:]); got != uint32(d) {
			return 0, nil, fmt.Errorf("dimension %d is %d, not %d", i+1, got, d)
		}
		size *= d
	}
	data = make([]byte, int(count)*size)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, err
	}
	return int(count), data, nil
}
