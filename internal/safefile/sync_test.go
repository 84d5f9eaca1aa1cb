package safefile

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSync: the meaning of each error of a sync: a file system without the call is reported once,
// and a disk that fails is an error each time.
func TestSync(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(filepath.Join(dir, "f"), Private)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	answer := error(nil)
	call := func(int) error { return answer }
	fsync, fdatasync = call, call
	defer func() { fsync, fdatasync = unix.Fsync, unix.Fdatasync }()
	all := func() []error { return []error{Sync(f), SyncData(f), SyncDir(dir)} }
	for _, answer = range []error{nil, unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP, unix.EPERM} {
		if err := errors.Join(all()...); err != nil {
			t.Errorf("%v: %v", answer, err)
		}
	}
	for _, answer = range []error{unix.EIO, unix.ENOSPC, unix.EDQUOT, unix.EROFS} {
		for i, err := range all() {
			if !errors.Is(err, answer) || !strings.Contains(err.Error(), []string{f.Name(), f.Name(), dir}[i]) {
				t.Errorf("%v: %v", answer, err)
			}
		}
	}
	var told []string
	TellLacks(func(text string) { told = append(told, text) })
	defer TellLacks(func(string) {})
	answer = unix.ENOSYS
	all()
	if len(told) != 2 || !strings.Contains(told[0], f.Name()+" has no fsync (invalid argument)") {
		t.Errorf("told of %q", told)
	}
}

// TestExchange: the meaning of each error of an exchange of names.
func TestExchange(t *testing.T) {
	defer func() { renameat2 = unix.Renameat2 }()
	for _, c := range []struct {
		answer    error
		exchanged bool
		is        error
		a, b      string // the contents of the names afterwards
	}{
		{nil, true, nil, "2", "1"},
		{unix.EINVAL, false, nil, "", "1"}, {unix.ENOSYS, false, nil, "", "1"},
		{unix.EOPNOTSUPP, false, nil, "", "1"}, {unix.EPERM, false, nil, "", "1"},
		{unix.EIO, false, unix.EIO, "1", "2"}, {unix.ENOSPC, false, unix.ENOSPC, "1", "2"},
	} {
		renameat2 = unix.Renameat2
		if c.answer != nil {
			renameat2 = func(int, string, int, string, uint) error { return c.answer }
		}
		dir := t.TempDir()
		a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
		if err := errors.Join(Replace(a, []byte("1"), Private), Replace(b, []byte("2"), Private)); err != nil {
			t.Fatal(err)
		}
		exchanged, err := Exchange(a, b)
		if exchanged != c.exchanged || !errors.Is(err, c.is) {
			t.Errorf("%v: %v, %v", c.answer, exchanged, err)
		}
		for path, want := range map[string]string{a: c.a, b: c.b} {
			if text, err := OwnText(path, 10); string(text) != want {
				t.Errorf("%v: %s has %q, %v; want %q", c.answer, path, text, err, want)
			}
		}
	}
}
