package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestFresh: the files in the repository equal the generator's output. The list is compared
// unpacked, because another version of Go can compress it differently.
func TestFresh(t *testing.T) {
	root := filepath.Join("..", "..", "..", "..")
	l, err := collect(root)
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(root, "internal", "licenses", "licenses.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if _, err := got.ReadFrom(z); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(bytes.TrimSpace(got.Bytes()), want) {
		t.Error("licenses.json.gz is not what the generator writes; run make generate")
	}
	notice, err := os.ReadFile(filepath.Join(root, "NOTICE"))
	if err != nil || string(notice) != l.notice() {
		t.Errorf("NOTICE is not what the generator writes; run make generate (%v)", err)
	}
}
