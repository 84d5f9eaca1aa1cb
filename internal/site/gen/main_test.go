package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWrite: a site replaces a site, and nothing else.
func TestWrite(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a", "site")
	if err := write("../../..", folder); err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(folder, "stale.html")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := write("../../..", folder); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stale); err == nil {
		t.Error("a page of the last site is still there")
	}
	if left, err := os.ReadDir(filepath.Dir(folder)); err != nil || len(left) != 1 {
		t.Errorf("beside the site: %v, %v", left, err)
	}

	if err := os.Remove(filepath.Join(folder, "search-index.js")); err != nil {
		t.Fatal(err)
	}
	if err := write("../../..", folder); err == nil || !strings.Contains(err.Error(), "holds something other than a site") {
		t.Errorf("replaced what is no site: %v", err)
	}
	if _, err := os.Stat(filepath.Join(folder, "index.html")); err != nil {
		t.Error(err)
	}
	if err := write(t.TempDir(), filepath.Join(t.TempDir(), "site")); err == nil || !strings.Contains(err.Error(), "ls-files") {
		t.Errorf("made a site of no repository: %v", err)
	}
}
