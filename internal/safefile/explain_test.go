package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestExplain: an error with a remedy names it once, and other errors stay as they are.
func TestExplain(t *testing.T) {
	user := os.Geteuid()
	for _, c := range []struct {
		err  error
		want string
	}{
		{&fs.PathError{Op: "write", Path: "f", Err: unix.ENOSPC}, "write f: no space left on device: free space there, or name another place"},
		{&fs.PathError{Op: "write", Path: "f", Err: unix.EDQUOT},
			fmt.Sprintf("write f: disk quota exceeded: the quota of user %d is used up: free space there, or name another place", user)},
		{&fs.PathError{Op: "mkdir", Path: "d", Err: unix.EROFS}, "mkdir d: read-only file system: the file system is read-only: name another place"},
		{&os.LinkError{Op: "rename", Old: "a", New: "b", Err: unix.ENOSPC}, "rename a b: no space left on device: free space there, or name another place"},
		{&fs.PathError{Op: "write", Path: "f", Err: unix.EFBIG},
			"write f: file too large: a file may have no more bytes: raise the limit (ulimit -f), or name another place"},
		{&fs.PathError{Op: "open", Path: "f", Err: unix.EACCES},
			fmt.Sprintf("open f: permission denied: give user %d the permission (chmod, chown), or name another place", user)},
		{&fs.PathError{Op: "fork/exec", Path: "f", Err: unix.EACCES}, "fork/exec f: permission denied"},
		{os.NewSyscallError("bind", unix.EACCES), "bind: permission denied"},
		{errors.New("other"), "other"},
	} {
		wrapped := fmt.Errorf("p: %w", c.err)
		got := Explain(wrapped)
		if got.Error() != "p: "+c.want || !errors.Is(got, c.err) {
			t.Errorf("%q, want %q", got, "p: "+c.want)
		}
		if again := Explain(fmt.Errorf("q: %w", got)); again.Error() != "q: "+got.Error() {
			t.Errorf("explained twice: %q", again)
		}
	}
	if err := Explain(nil); err != nil {
		t.Error(err)
	}
}
