package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestFresh: the committed files are the current output of the generator.
func TestFresh(t *testing.T) {
	all := modules()
	names, err := filepath.Glob("../../ptx/*.ptx")
	if err != nil || len(names) != len(all) {
		t.Errorf("%d files, not %d: %v", len(names), len(all), err)
	}
	for name, want := range all {
		got, err := os.ReadFile(filepath.Join("../../ptx", name+".ptx"))
		if err != nil || string(got) != want {
			t.Errorf("%s is not what is committed (%v): run go generate ./collective/cuda", name, err)
		}
	}
}
