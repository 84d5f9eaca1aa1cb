package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const stranger = 65534

// In a folder where others can create files, the lock file can be a link that another user has
// planted. Acquire does not change the link's target, whoever created the link.
func TestPlantedLock(t *testing.T) {
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Symlink(victim, filepath.Join(dir, lockName))); err != nil {
		t.Fatal(err)
	}
	lock, err := Acquire(dir, false, Owner{Job: "mine"})
	lock.Release()
	if err == nil || !strings.Contains(err.Error(), "symbolic link") || !strings.Contains(err.Error(), "remove the link") {
		t.Errorf("a link in place of the lock: %v", err)
	}
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
		t.Errorf("what the link names holds %q, %v", text, err)
	}
}

func TestForeignLock(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, lockName)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Acquire(dir, false, Owner{}); err == nil || !strings.Contains(err.Error(), "named pipe") {
		t.Errorf("a pipe in place of the lock: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root may give files to another user")
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("theirs"), 0o666), os.Chown(path, stranger, stranger)); err != nil {
		t.Fatal(err)
	}
	if _, err := Acquire(dir, false, Owner{}); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a lock of another user: %v", err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "theirs" {
		t.Errorf("it holds %q, %v", text, err)
	}
}

// A named pipe with the name of an incomplete file does not block a writer.
func TestPlantedPipe(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, strings.Replace(temporary, "*", "x", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
}

// A job continues only from checkpoints that only this user or root could have written; links must
// belong to one of them too. Other checkpoints can be opened for reading.
func TestOpenOwn(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, false, sample, sampleTensors, blobs(), func(int64) {}); err != nil {
		t.Fatal(err)
	}
	path, link := Path(dir, 7), Path(dir, 8)
	if err := os.Symlink(filepath.Base(path), link); err != nil {
		t.Fatal(err)
	}
	open := func(how func(string) (*File, error), path, says string) {
		t.Helper()
		f, err := how(path)
		if err == nil {
			f.Close()
		}
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", path, err, says)
		}
	}
	open(OpenOwn, path, "")
	open(OpenOwn, link, "")
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	open(OpenOwn, path, "chmod go-w")
	open(Open, path, "")
	if os.Geteuid() != 0 {
		t.Skip("only root may give files to another user")
	}
	if err := errors.Join(os.Chmod(path, 0o644), os.Chown(path, stranger, stranger)); err != nil {
		t.Fatal(err)
	}
	open(OpenOwn, path, "belongs to user 65534")
	open(Open, path, "")
	if err := os.Lchown(link, stranger, stranger); err != nil {
		t.Fatal(err)
	}
	open(OpenOwn, link, "symbolic link of user 65534")
}

// Files and folders have their fixed modes, whatever the umask is.
func TestModes(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		old := syscall.Umask(umask)
		for shared, want := range map[bool][2]os.FileMode{false: {0o700, 0o600}, true: {0o755, 0o644}} {
			dir := filepath.Join(t.TempDir(), "a")
			lock, err := Acquire(dir, shared, Owner{})
			if err = errors.Join(err, Write(dir, shared, sample, sampleTensors, blobs(), func(int64) {})); err != nil {
				t.Fatal(err)
			}
			lock.Release()
			for path, want := range map[string]os.FileMode{dir: want[0], Path(dir, 7): want[1], filepath.Join(dir, lockName): 0o600} {
				if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
					t.Errorf("umask %#o, shared %v: %s has mode %v, want %v, %v", umask, shared, path, fi.Mode().Perm(), want, err)
				}
			}
		}
		syscall.Umask(old)
	}
}
