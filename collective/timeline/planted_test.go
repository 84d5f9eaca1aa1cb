package timeline

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// In a folder where others can create files, such as /tmp, a link in place of a rank's file is not
// followed: its target is neither truncated nor appended to.
func TestPlantedFile(t *testing.T) {
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	cfg := Config{Filename: filepath.Join(dir, "trace"), RunID: "r", MaxBytes: 1 << 20}
	path, _ := Path(cfg.Filename, 0)
	if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Symlink(victim, path)); err != nil {
		t.Fatal(err)
	}
	if _, err := openRank(cfg, 0, 0); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link in place of the file: %v", err)
	}
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
		t.Errorf("what the link names holds %q, %v", text, err)
	}
}

// A file of another run is truncated, and gets the requested mode.
func TestModeOfOldFile(t *testing.T) {
	for shared, want := range map[bool]os.FileMode{false: 0o600, true: 0o644} {
		cfg := Config{Filename: filepath.Join(t.TempDir(), "trace"), RunID: "r", MaxBytes: 1 << 20, Shared: shared}
		path, _ := Path(cfg.Filename, 0)
		if err := errors.Join(os.WriteFile(path, []byte("of another run"), 0o600), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
		f, err := openRank(cfg, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.close(); err != nil {
			t.Error(err)
		}
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
			t.Errorf("mode %v, want %v, %v", fi.Mode().Perm(), want, err)
		}
		if text, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(text), "[\n") {
			t.Errorf("%q, %v", text, err)
		}
	}
}
