package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// User is the user that a worker runs as, if not this process's own.
type User struct {
	Name     string
	UID, GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
	// Home is the user's home directory.
	Home string
}

// credential returns the credential for the kernel, or nil for this process's own user.
func (u *User) credential() *syscall.Credential {
	if u == nil {
		return nil
	}
	return &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
}

// Explain adds to a permission error what the user may not do, and the path whose mode forbids it:
// that of the directory or the program, or of a directory above it. It checks modes only.
func (u *User) Explain(err error, dir, program string) error {
	if u == nil || !errors.Is(err, syscall.EACCES) {
		return err
	}
	if !filepath.IsAbs(program) {
		program = filepath.Join(dir, program)
	}
	for what, path := range map[string]string{"enter the working directory": dir, "run": program} {
		if at := u.stopped(path); at != "" {
			return fmt.Errorf("user %s may not %s %s, because of the mode of %s: %w", u.Name, what, path, at, err)
		}
	}
	return fmt.Errorf("user %s may not run %s in %s: %w", u.Name, program, dir, err)
}

// stopped returns the first part of an absolute path that the user may not search or execute.
func (u *User) stopped(path string) string {
	at := "/"
	for _, name := range append([]string{""}, strings.Split(path, "/")...) {
		at = filepath.Join(at, name)
		fi, err := os.Stat(at)
		if err != nil {
			return ""
		}
		if !u.may(fi) {
			return at
		}
	}
	return ""
}

// may returns whether the mode gives the user the right to search or execute.
func (u *User) may(fi os.FileInfo) bool {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || u.UID == 0 {
		return true
	}
	shift := 0
	switch {
	case st.Uid == u.UID:
		shift = 6
	case st.Gid == u.GID:
		shift = 3
	default:
		for _, g := range u.Groups {
			if st.Gid == g {
				shift = 3
			}
		}
	}
	return st.Mode>>shift&1 != 0
}
