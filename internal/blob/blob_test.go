package blob

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func open(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func put(t *testing.T, s *Store, value []byte) ID {
	t.Helper()
	w, err := s.Create(int64(len(value)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(value); err != nil {
		t.Fatal(err)
	}
	id, err := w.Commit()
	if err != nil || id != sha256.Sum256(value) {
		t.Fatalf("%v, %v", id, err)
	}
	return id
}

func read(s *Store, id ID) ([]byte, error) {
	f, size, err := s.Open(id)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err == nil && int64(len(b)) != size {
		err = errors.New("another size")
	}
	return b, err
}

// TestValues: processes that open the same store share its values, written in any order of their
// bytes, and each value is counted.
func TestValues(t *testing.T) {
	cfg := Config{Root: t.TempDir(), Run: "r", Host: "h", Most: 1 << 20}
	a, b := open(t, cfg), open(t, cfg)
	other := open(t, Config{Root: cfg.Root, Run: "r", Host: "other"})
	value := make([]byte, 100_000)
	rand.NewChaCha8([32]byte{1}).Read(value)
	w, err := a.Create(int64(len(value)))
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(10) {
		if _, err := w.WriteAt(value[i*10_000:(i+1)*10_000], int64(i)*10_000); err != nil {
			t.Fatal(err)
		}
	}
	id, err := w.Commit()
	if err != nil || id != sha256.Sum256(value) {
		t.Fatalf("%v, %v", id, err)
	}
	if put(t, b, value) != id {
		t.Error("the same value has another name")
	}
	if got, err := read(b, id); err != nil || !bytes.Equal(got, value) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	none := put(t, b, nil)
	if got, err := read(a, none); err != nil || len(got) != 0 {
		t.Errorf("nothing is %q, %v", got, err)
	}
	if _, err := read(other, id); !errors.Is(err, ErrMissing) || other.Has(id) {
		t.Errorf("another host's store has it: %v", err)
	}
	if all, err := b.List(); err != nil || len(all) != 2 {
		t.Errorf("%v, %v", all, err)
	}
	if taken, _, err := b.Usage(); err != nil || taken != 100_000 {
		t.Errorf("%d bytes are taken, %v", taken, err)
	}
	if err := errors.Join(b.Remove(id), a.Remove(id)); err != nil || a.Has(id) {
		t.Errorf("removed: %v", err)
	}
	if taken, _, _ := a.Usage(); taken != 0 {
		t.Errorf("%d bytes are taken of nothing", taken)
	}
}

// TestFull: a full store returns an error, and aborted values free their space.
func TestFull(t *testing.T) {
	s := open(t, Config{Root: t.TempDir(), Run: "r", Most: 1000})
	id := put(t, s, make([]byte, 600))
	_, err := s.Create(500)
	if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "600 of at most 1000 bytes are taken, and 500 more") {
		t.Errorf("%v", err)
	}
	w, err := s.Create(400)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt(make([]byte, 401), 0); err == nil {
		t.Error("more bytes than were said")
	}
	if _, err := w.Commit(); err == nil {
		t.Error("a value without all its bytes")
	}
	put(t, s, bytes.Repeat([]byte{1}, 400))
	if err := s.Remove(id); err != nil {
		t.Fatal(err)
	}
	put(t, s, bytes.Repeat([]byte{2}, 600))
}

// TestKilled: a process that is killed while it writes, with the store open, leaves nothing that
// uses space.
func TestKilled(t *testing.T) {
	if os.Getenv("BLOB_ROOT") != "" {
		s, err := Open(Config{Root: os.Getenv("BLOB_ROOT"), Run: "r", Most: 1000})
		if err != nil {
			t.Fatal(err)
		}
		w, err := s.Create(900)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write(make([]byte, 10))
		os.Stdout.WriteString("written\n")
		select {}
	}
	root := t.TempDir()
	s := open(t, Config{Root: root, Run: "r", Most: 1000})
	cmd := exec.Command(os.Args[0], "-test.run", "^TestKilled$")
	cmd.Env = append(os.Environ(), "BLOB_ROOT="+root)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Create(900); !errors.Is(err, ErrFull) {
		t.Errorf("while it lives: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	put(t, s, make([]byte, 900))
	if names, _ := filepath.Glob(filepath.Join(s.dir, unfinished+"*")); len(names) > 0 {
		t.Errorf("%v are left", names)
	}
}

// TestRemoval: the last process that closes a store removes it; a store that no process has open is
// removed after an hour.
func TestRemoval(t *testing.T) {
	root := t.TempDir()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				s, err := Open(Config{Root: root, Run: "r", Host: "h"})
				if err != nil {
					t.Error(err)
					return
				}
				w, err := s.Create(3)
				if err == nil {
					_, _ = w.Write([]byte("abc"))
					_, err = w.Commit()
				}
				if err = errors.Join(err, s.Close()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if names, _ := os.ReadDir(top(root, os.Geteuid())); len(names) > 0 {
		t.Errorf("%v is left", names)
	}
	old, err := Open(Config{Root: root, Run: "old"})
	if err != nil {
		t.Fatal(err)
	}
	put(t, old, []byte("x"))
	old.live.Close() // as if its process were killed
	open(t, Config{Root: root, Run: "new"})
	if _, err := os.Stat(old.dir); err != nil {
		t.Fatalf("it is removed at once: %v", err)
	}
	then := time.Now().Add(-2 * stale)
	if err := os.Chtimes(old.dir, then, then); err != nil {
		t.Fatal(err)
	}
	open(t, Config{Root: root, Run: "new"})
	if _, err := os.Stat(old.dir); !os.IsNotExist(err) {
		t.Errorf("it is left: %v", err)
	}
}

// TestClean removes what killed processes of a user have left, but nothing that the user's links
// point to. A folder of another user in its place stays.
func TestClean(t *testing.T) {
	root, uid := t.TempDir(), os.Geteuid()
	killed := open(t, Config{Root: root, Run: "r", Host: "killed"})
	put(t, killed, []byte("x"))
	killed.live.Close()
	used := open(t, Config{Root: root, Run: "r", Host: "used"})
	id := put(t, used, []byte("y"))
	own := top(root, uid)
	if uid == 0 { // as root, for another user
		uid = 12345
		theirs := func(path string, _ fs.DirEntry, err error) error { return errors.Join(err, os.Lchown(path, uid, uid)) }
		if err := errors.Join(os.Rename(own, top(root, uid)), filepath.WalkDir(top(root, uid), theirs)); err != nil {
			t.Fatal(err)
		}
		own = top(root, uid)
	}
	outside, run := t.TempDir(), filepath.Join(own, nameOf("r"))
	for _, name := range []string{liveName, "kept"} {
		if err := os.WriteFile(filepath.Join(outside, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Lchown(outside, uid, -1),
		os.Symlink(outside, filepath.Join(run, "linked")),
		os.Symlink(filepath.Join(outside, "kept"), filepath.Join(run, nameOf("killed"), "linked")),
		os.Symlink(own, top(root, uid+1)),
	); err != nil {
		t.Fatal(err)
	}
	clean(top(root, uid), "r", uid+1)
	clean(top(root, uid+1), "r", uid)
	if _, err := os.Stat(filepath.Join(run, nameOf("killed"))); err != nil {
		t.Errorf("another user's folder, or one behind a link, was cleaned: %v", err)
	}
	clean(top(root, uid), "r", uid)
	if _, err := os.Stat(filepath.Join(run, nameOf("killed"))); !os.IsNotExist(err) {
		t.Errorf("it is left: %v", err)
	}
	if _, err := os.Stat(filepath.Join(run, nameOf("used"), id.String())); err != nil {
		t.Errorf("a store that is open: %v", err)
	}
	if names, err := os.ReadDir(outside); len(names) != 2 {
		t.Errorf("behind a link: %v, %v", names, err)
	}
}

// TestBorrow: a value of another store of the same run is available without a copy, is counted, and
// stays when the other store removes it.
func TestBorrow(t *testing.T) {
	root := t.TempDir()
	beside := open(t, Config{Root: root, Run: "r", Host: "scheduler"})
	s := open(t, Config{Root: root, Run: "r", Host: "h", Most: 1 << 20})
	value := bytes.Repeat([]byte("value"), 10_000)
	id := put(t, beside, value)
	if err := s.Borrow(id, "another"); !errors.Is(err, ErrMissing) {
		t.Errorf("of a store that is not there: %v", err)
	}
	if err := s.Borrow(ID{1}, "scheduler"); !errors.Is(err, ErrMissing) {
		t.Errorf("a value that is not there: %v", err)
	}
	for range 2 {
		if err := s.Borrow(id, "scheduler"); err != nil {
			t.Fatal(err)
		}
	}
	if taken, _, err := s.Usage(); err != nil || taken != int64(len(value)) {
		t.Errorf("%d bytes are taken, %v", taken, err)
	}
	if err := beside.Remove(id); err != nil {
		t.Fatal(err)
	}
	if b, err := read(s, id); err != nil || !bytes.Equal(b, value) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if err := s.Remove(id); err != nil {
		t.Fatal(err)
	}
	if taken, _, err := s.Usage(); err != nil || taken != 0 {
		t.Errorf("then %d bytes are taken, %v", taken, err)
	}
	large := put(t, beside, make([]byte, 1<<20+1))
	if err := s.Borrow(large, "scheduler"); !errors.Is(err, ErrFull) {
		t.Errorf("a value for which there is no room: %v", err)
	}
	if taken, _, _ := s.Usage(); taken != 0 || s.Has(large) {
		t.Errorf("%d bytes are taken by a value that has no room", taken)
	}
}
