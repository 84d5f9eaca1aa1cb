package main

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

const (
	pixels  = 8 * 8 // of an image, row by row
	classes = 10    // the digits
	maxGrey = 16    // a pixel is 0..maxGrey
)

// digitsCSV is the data set, see README.md: a line for each image, its pixels and then its label.
//
//go:embed digits.csv.gz
var digitsCSV []byte

// images is a set of labelled images. Image i has the pixels[i*64:(i+1)*64] of the slice, each 0..1, and labels[i].
type images struct {
	pixels []float32
	labels []uint8
}

func (s *images) len() int { return len(s.labels) }

// image returns the pixels of image i; the slice belongs to the set.
func (s *images) image(i int) []float32 { return s.pixels[i*pixels : (i+1)*pixels] }

func (s *images) add(image []float32, label uint8) {
	s.pixels = append(s.pixels, image...)
	s.labels = append(s.labels, label)
}

// loadDigits returns the images to train on and those that are held out to judge the result: every fifth of the data
// set, the same ones in every worker and every run.
func loadDigits() (train, heldOut *images, err error) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return nil, nil, fmt.Errorf("digits: %w", err)
	}
	all, err := parseDigits(z)
	if err != nil {
		return nil, nil, err
	}
	train, heldOut = new(images), new(images)
	for i, label := range all.labels {
		part := train
		if i%5 == 4 {
			part = heldOut
		}
		part.add(all.image(i), label)
	}
	return train, heldOut, nil
}

// parseDigits reads lines of 64 pixels and a label, separated by commas. An error names the line.
func parseDigits(r io.Reader) (*images, error) {
	set := new(images)
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		image, label, err := parseDigit(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("digits: line %d: %w", n, err)
		}
		set.add(image[:], label)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("digits: after line %d: %w", set.len(), err)
	}
	return set, nil
}

func parseDigit(line string) (image [pixels]float32, label uint8, err error) {
	fields := strings.Split(line, ",")
	if len(fields) != pixels+1 {
		return image, 0, fmt.Errorf("%d fields, not %d", len(fields), pixels+1)
	}
	for i := range image {
		grey, err := strconv.ParseUint(fields[i], 10, 8)
		if err != nil || grey > maxGrey {
			return image, 0, fmt.Errorf("pixel %d is %q, not 0..%d", i, fields[i], maxGrey)
		}
		image[i] = float32(grey) / maxGrey
	}
	digit, err := strconv.ParseUint(fields[pixels], 10, 8)
	if err != nil || digit >= classes {
		return image, 0, fmt.Errorf("the label is %q, not a digit", fields[pixels])
	}
	return image, uint8(digit), nil
}
