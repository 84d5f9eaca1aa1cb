// Package dataset contains 1,797 images of handwritten digits for examples.
//
// digits.csv.gz has a line for each image, with 8×8 pixels of 0..16 and, last, the label. It is the
// test part of Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998, UCI
// Machine Learning Repository, https://doi.org/10.24432/C50P49, used under the licence CC BY 4.0,
// https://creativecommons.org/licenses/by/4.0/. The file was compressed and is otherwise unchanged.
package dataset

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Sizes of an image, which is stored row by row, and the number of digits.
const (
	Pixels  = 8 * 8
	Classes = 10

	maxGrey = 16 // maximum of a pixel in the file
)

// digitsCSV is the data set: one line per image, with its pixels and its label.
//
//go:embed digits.csv.gz
var digitsCSV []byte

// Images is a set of labelled images. Image i is Pixels[i*64:(i+1)*64], each 0..1, with Labels[i].
type Images struct {
	Pixels []float32
	Labels []uint8
}

// Len returns the number of images.
func (s *Images) Len() int { return len(s.Labels) }

// Image returns the pixels of image i. The slice aliases Pixels.
func (s *Images) Image(i int) []float32 { return s.Pixels[i*Pixels : (i+1)*Pixels] }

// Add appends an image of 64 pixels.
func (s *Images) Add(image []float32, label uint8) {
	s.Pixels = append(s.Pixels, image...)
	s.Labels = append(s.Labels, label)
}

// Load returns the training images and the held-out images. The latter are every fifth of the data
// set, the same in every worker and every run.
func Load() (train, heldOut *Images, err error) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return nil, nil, fmt.Errorf("dataset: %w", err)
	}
	all, err := parseDigits(z)
	if err != nil {
		return nil, nil, err
	}
	train, heldOut = new(Images), new(Images)
	for i, label := range all.Labels {
		part := train
		if i%5 == 4 {
			part = heldOut
		}
		part.Add(all.Image(i), label)
	}
	return train, heldOut, nil
}

// parseDigits reads lines of 64 pixels and a label, separated by commas. Errors name the line.
func parseDigits(r io.Reader) (*Images, error) {
	set := new(Images)
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		image, label, err := parseDigit(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("dataset: line %d: %w", n, err)
		}
		set.Add(image[:], label)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("dataset: after line %d: %w", set.Len(), err)
	}
	return set, nil
}

func parseDigit(line string) (image [Pixels]float32, label uint8, err error) {
	fields := strings.Split(line, ",")
	if len(fields) != Pixels+1 {
		return image, 0, fmt.Errorf("%d fields, not %d", len(fields), Pixels+1)
	}
	for i := range image {
		grey, err := strconv.ParseUint(fields[i], 10, 8)
		if err != nil || grey > maxGrey {
			return image, 0, fmt.Errorf("pixel %d is %q, not 0..%d", i, fields[i], maxGrey)
		}
		image[i] = float32(grey) / maxGrey
	}
	digit, err := strconv.ParseUint(fields[Pixels], 10, 8)
	if err != nil || digit >= Classes {
		return image, 0, fmt.Errorf("the label is %q, not a digit", fields[Pixels])
	}
	return image, uint8(digit), nil
}
