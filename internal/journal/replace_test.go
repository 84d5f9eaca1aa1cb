package journal

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func payloads(records []string) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for _, r := range records {
			if !yield([]byte(r)) {
				return
			}
		}
	}
}

func holds(t *testing.T, path string, want []string) {
	t.Helper()
	if got, _, err := readAll(content(t, path)); err != nil || !slices.Equal(got, want) {
		t.Fatalf("it holds %.100q, %v; want %.100q", got, err, want)
	}
}

// TestReplaceAtRandom: after any appends, replacements, cuts and reopenings, the journal contains
// what was written last, although its files contain more.
func TestReplaceAtRandom(t *testing.T) {
	for seed := range uint64(15) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		path := filepath.Join(t.TempDir(), "journal")
		j, err := Create(path, "run")
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		record := func() string { return strings.Repeat("x", 1+rnd.IntN(3)*10) } // many of one size, so that old ones line up
		for range 60 {
			switch rnd.IntN(6) {
			case 0:
				want = want[:0]
				for range rnd.IntN(4) {
					want = append(want, record())
				}
				err = j.Replace(payloads(want), rnd.IntN(4) == 0)
			case 1:
				err = j.Reserve(int64(1+rnd.IntN(3)) * 1000)
			case 2: // its process dies within a record, and within the next Replace
				_, torn := j.file.WriteAt([]byte{7, 0, 0, 0, 1, 2}, j.mark.end)
				if j.next != nil {
					_, _, err = j.write(payloads(slices.Concat(want, []string{record()})))
				}
				err = errors.Join(torn, err, j.Close())
				if err == nil {
					j, _, err = Open(path, func([]byte) error { return nil })
				}
			default:
				want = append(want, record())
				err = j.Append([]byte(want[len(want)-1]))
			}
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			holds(t, path, want)
			if is, err := Locked(path); err != nil || !is {
				t.Fatalf("seed %d: locked %v, %v", seed, is, err)
			}
			if _, _, err := Open(path, nil); !errors.Is(err, ErrLocked) {
				t.Fatalf("seed %d: a second writer: %v", seed, err)
			}
		}
		if err := errors.Join(j.Release(), j.Close()); err != nil {
			t.Fatal(err)
		}
		holds(t, path, want)
		if fi, err := os.Stat(path); err != nil || fi.Size() != j.Size() {
			t.Errorf("%d bytes were released to %d, %v", j.Size(), fi.Size(), err)
		}
		if all, _ := os.ReadDir(filepath.Dir(path)); len(all) != 1 {
			t.Errorf("%d files are left", len(all))
		}
	}
}

// TestReplaceMends: a journal that lacks records is complete after Replace.
func TestReplaceMends(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := Create(path, "run")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := errors.Join(j.Append([]byte("one")), j.SetBehind()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := readAll(content(t, path)); !errors.Is(err, ErrBehind) {
		t.Errorf("got %v", err)
	}
	for _, bad := range []string{"", strings.Repeat("x", MaxRecord+1)} {
		if err := j.Replace(payloads([]string{bad}), true); err == nil {
			t.Errorf("a record of %d bytes passes", len(bad))
		}
	}
	if err := j.Replace(payloads([]string{"all"}), true); err != nil {
		t.Fatal(err)
	}
	if err := j.Append([]byte("two")); err != nil {
		t.Fatal(err)
	}
	holds(t, path, []string{"all", "two"})
	if err := Remove(path); err != nil {
		t.Error(err)
	}
}

// TestReserve: on a full disk, a journal with reserved space accepts records and can be replaced
// repeatedly.
func TestReserve(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a file system that is filled")
	}
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	defer unix.Unmount(disk, unix.MNT_DETACH)
	path := filepath.Join(disk, "journal")
	j, err := Create(path, "run")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { j.Close() }()
	if err := j.Reserve(10 << 20); !errors.Is(err, unix.ENOSPC) || j.Room() != 0 {
		t.Errorf("room for more than there is: %v, %d", err, j.Room())
	}
	const room = 64 << 10
	if err := j.Reserve(room); err != nil || j.Room() != room {
		t.Fatal(err, j.Room())
	}
	fill(t, filepath.Join(disk, "ballast"))
	for n := range 20 {
		want := []string{fmt.Sprint(n)}
		if err := j.Replace(payloads(want), true); err != nil {
			t.Fatal(err)
		}
		for j.Size() < room-2000 {
			want = append(want, strings.Repeat("x", 1000+n))
			if err := j.Append([]byte(want[len(want)-1])); err != nil {
				t.Fatal(err)
			}
		}
		if err := j.Sync(); err != nil {
			t.Fatal(err)
		}
		holds(t, path, want)
		if n%3 == 0 { // another process continues with it
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			if j, _, err = Open(path, func([]byte) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	big := strings.Repeat("x", 2*room)
	if err := j.Replace(payloads([]string{big}), true); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than there is room for: %v", err)
	}
	if err := j.Append([]byte("more")); err != nil {
		t.Error(err)
	}
}

// fill creates a file that uses up the disk.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 64 << 10; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
}
