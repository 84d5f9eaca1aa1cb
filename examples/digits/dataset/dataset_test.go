package dataset

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
	"testing"
)

func TestLoad(t *testing.T) {
	train, heldOut, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	if train.Len() != 1438 || heldOut.Len() != 359 {
		t.Errorf("%d images to train on and %d held out, want 1438 and 359", train.Len(), heldOut.Len())
	}
	var count [Classes]int
	for _, set := range []*Images{train, heldOut} {
		if len(set.Pixels) != set.Len()*Pixels {
			t.Errorf("%d pixels for %d images", len(set.Pixels), set.Len())
		}
		for _, p := range set.Pixels {
			if p < 0 || p > 1 {
				t.Fatalf("pixel %v is outside 0..1", p)
			}
		}
		for _, label := range set.Labels {
			count[label]++
		}
	}
	if want := [Classes]int{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}; count != want {
		t.Errorf("images per digit: %v, want %v", count, want)
	}
	if got := heldOut.Labels[0]; got != 4 {
		t.Errorf("first image held out is a %d, want the fifth of the file, a 4", got)
	}
}

func TestDataIsThePublishedOne(t *testing.T) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, z); err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8" {
		t.Errorf("SHA-256 of the uncompressed data is %s", got)
	}
}

func TestParseDigitsNamesTheBadLine(t *testing.T) {
	good := strings.Repeat("3,", Pixels) + "7\n"
	for _, c := range []struct{ name, line, want string }{
		{"short", "1,2,3", "dataset: line 2: 3 fields, not 65"},
		{"empty", "", "dataset: line 2: 1 fields, not 65"},
		{"too dark", "17," + good[2:], `dataset: line 2: pixel 0 is "17", not 0..16`},
		{"negative", "-1," + good[2:], `dataset: line 2: pixel 0 is "-1", not 0..16`},
		{"no number", strings.Replace(good, "3,7", "x,7", 1), `dataset: line 2: pixel 63 is "x", not 0..16`},
		{"label", strings.Replace(good, "7", "10", 1), `dataset: line 2: the label is "10", not a digit`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := parseDigits(strings.NewReader(good + strings.TrimSuffix(c.line, "\n") + "\n" + good))
			if err == nil || err.Error() != c.want {
				t.Errorf("error %v, want %s", err, c.want)
			}
		})
	}
}

func TestParseDigitsReportsATruncatedStream(t *testing.T) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV[:len(digitsCSV)/2]))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parseDigits(z); err == nil {
		t.Error("half a file was taken for a whole one")
	}
}
