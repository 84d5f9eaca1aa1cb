package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// MakeDir creates a folder for files of the given mode, and the missing folders above it. The umask
// does not matter. It leaves an existing folder as it is, and accepts a link to a folder if the
// link belongs to this user or to root.
func MakeDir(path string, mode fs.FileMode) error {
	perm := uint32(mode | 0o700 | mode&0o044>>2)
	err := unix.Mkdir(path, perm)
	if parent := filepath.Dir(path); errors.Is(err, unix.ENOENT) && parent != path {
		if err := MakeDir(parent, mode); err != nil {
			return err
		}
		err = unix.Mkdir(path, perm)
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return isDir(path)
	case err != nil:
		return &fs.PathError{Op: "mkdir", Path: path, Err: err}
	}
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_DIRECTORY|always, 0) })
	if err != nil {
		return wrap(path, err)
	}
	defer unix.Close(fd)
	var made unix.Stat_t
	if err := unix.Fstat(fd, &made); err != nil || made.Mode&0o777 == perm || int(made.Uid) != os.Geteuid() {
		return wrap(path, err)
	}
	chmod(fd, fs.FileMode(perm))
	return nil
}

// isDir returns an error if the path is not a folder, or is a link that another user has created.
func isDir(path string) error {
	link, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if owner := owner(link); link.Mode().Type() == fs.ModeSymlink && !ours(owner, path) {
		return fmt.Errorf("%s is a symbolic link of %s, who can change where it leads: name the folder itself, or remove the link",
			path, userName(owner))
	}
	if fi, err := os.Stat(path); err != nil {
		return err
	} else if !fi.IsDir() {
		return &fs.PathError{Op: "mkdir", Path: path, Err: unix.ENOTDIR}
	}
	return nil
}

// MakePrivateDir is like MakeDir, for a folder of this user alone, which it checks as PrivateDir
// does. It closes an empty folder of this user to others, since systems that create folders for
// services leave some of them open.
func MakePrivateDir(path string) error {
	if err := MakeDir(path, Private); err != nil {
		return err
	}
	if there, err := os.ReadDir(path); err == nil && len(there) == 0 {
		_ = os.Chmod(path, 0o700) // if it fails, the folder is not this user's, or as open as before
	}
	return PrivateDir(path)
}

// PrivateDir returns an error if the path is not a folder of this user, or if others may list or
// enter it. A link to such a folder is accepted: only this user or root can have created its
// contents.
func PrivateDir(path string) error {
	fi, err := os.Stat(path)
	if err != nil {
		return err
	}
	switch owner := owner(fi); {
	case !fi.IsDir():
		return fmt.Errorf("%s is not a folder", path)
	case int(owner) != os.Geteuid() && (owner == 0 || !ours(owner, filepath.Join(path, "any"))):
		return fmt.Errorf("%s belongs to %s, not to user %d: name a folder of your own", path, userName(owner), os.Geteuid())
	case fi.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("others may enter %s (mode %#o): chmod 700 it", path, fi.Mode().Perm())
	}
	return nil
}

// SecretDir is like PrivateDir, for folders of secrets: it also returns an error if other users
// could replace any of the folders and links on the way.
func SecretDir(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	at, links := "/", 0
	for rest := names(path); len(rest) > 0; {
		if err := unreplaced(at); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		next := filepath.Join(at, rest[0]) // at contains no links, so the kernel resolves .. the same way
		rest = rest[1:]
		fi, err := os.Lstat(next)
		if err != nil {
			return err
		}
		if fi.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		if owner := owner(fi); owner != 0 && int(owner) != os.Geteuid() && int(owner) != unmapped() {
			return fmt.Errorf("%s: %s is a symbolic link of %s, who can change where it leads", path, next, userName(owner))
		}
		if links++; links > maxLinks {
			return wrap(path, unix.ELOOP)
		}
		target, err := os.Readlink(next)
		if err != nil {
			return err
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = slices.Concat(names(target), rest)
	}
	return PrivateDir(at)
}

func names(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(name string) bool { return name == "" || name == "." })
}

// unreplaced returns an error if users other than this one and root may replace what is in a
// folder.
func unreplaced(dir string) error {
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st := fi.Sys().(*syscall.Stat_t)
	switch {
	case st.Uid != 0 && int(st.Uid) != os.Geteuid() && int(st.Uid) != unmapped():
		return fmt.Errorf("%s belongs to %s, who could replace its contents: name a folder elsewhere", dir, userName(st.Uid))
	case writable(st.Mode&0o777, st.Gid) && fi.Mode()&fs.ModeSticky == 0:
		return fmt.Errorf("others may write to %s (mode %#o) and could replace what is in it: chmod go-w it, or name a folder elsewhere",
			dir, st.Mode&0o777)
	}
	return nil
}

func owner(fi fs.FileInfo) uint32 { return fi.Sys().(*syscall.Stat_t).Uid }
