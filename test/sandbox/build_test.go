package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestBuild: programs that were built before are not linked again, and do not change while a test
// uses them.
func TestBuild(t *testing.T) {
	var files []os.FileInfo
	for range 2 {
		dir := t.TempDir()
		if err := Build(dir, "github.com/hvdrun/hvdrun/examples/hello"); err != nil {
			t.Fatal(err)
		}
		fi, err := os.Stat(filepath.Join(dir, "hello"))
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm()&0o100 == 0 {
			t.Errorf("%s is not executable: %v", fi.Name(), fi.Mode())
		}
		_, kept, unlock, err := folders()
		if err != nil {
			t.Fatal(err)
		}
		unlock()
		if fi, err = os.Stat(filepath.Join(kept, "hello")); err != nil {
			t.Fatal(err)
		}
		files = append(files, fi)
	}
	if !os.SameFile(files[0], files[1]) {
		t.Error("an unchanged program is linked twice")
	}
	if err := Build(t.TempDir(), "github.com/hvdrun/hvdrun/no/such/program"); err == nil {
		t.Error("a package that is not there is built")
	}
}

// TestOnce: a file is made once for the same parts; what fails is tried again.
func TestOnce(t *testing.T) {
	t.Setenv("GOCACHE", t.TempDir())
	made := 0
	for i, parts := range []string{"a", "a", "b", "b"} {
		text, err := Once(parts, func(path string) error {
			if made++; made == 2 {
				return errors.New("no luck")
			}
			return os.WriteFile(path, []byte(parts), 0o600)
		})
		if want := []int{1, 1, 2, 3}[i]; made != want || (i == 2) != (err != nil) || err == nil && string(text) != parts {
			t.Errorf("%q, %v, made %d times, want %d", text, err, made, want)
		}
	}
}

func TestCopyWhereNoLinkCanBe(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := os.WriteFile(from, []byte("program"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := link(from, to); err != nil {
		t.Fatal(err)
	}
	if err := link(from, to); err == nil {
		t.Error("a file that is there is replaced")
	}
	if text, err := os.ReadFile(to); err != nil || string(text) != "program" {
		t.Errorf("%q, %v", text, err)
	}
}
