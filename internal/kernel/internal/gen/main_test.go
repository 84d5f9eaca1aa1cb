package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestFresh: the files in the package equal the generator's output.
func TestFresh(t *testing.T) {
	files, err := generate()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if got, err := os.ReadFile(filepath.Join("..", "..", name)); err != nil {
			t.Error(err)
		} else if !bytes.Equal(got, want) {
			t.Errorf("%s is not what the generator writes; run make generate", name)
		}
	}
}
