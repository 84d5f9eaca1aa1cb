// Package safefile opens and creates files in places where other users of the machine may have put
// something before: a symbolic link to a file of this user, a file or folder that they own, or a
// pipe that blocks a process that opens it.
//
// It checks a file by the descriptor that is used, not by its name: it must be a regular file, it
// must belong to this user or to root, and no other user may be able to write to it. If a person
// has named the file, a symbolic link in its place is followed if the link belongs to this user or
// to root, who could have named the target themselves, and is refused otherwise. If this program
// has chosen the name, a symbolic link is always refused. Links among the folders above the file
// are followed as usual, because users put folders on other disks that way. The target is
// checked like any file. Hard links to files of others are left to the kernel
// (fs.protected_hardlinks).
//
// Files are created with O_EXCL, and have the requested mode whatever the umask is.
//
// The package also wraps calls that some file systems lack: locks, syncs, and exchanges of names.
// It recognizes the errors that mean that, and continues without the call if possible, which
// TellLacks reports.
package safefile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Modes of new files, and of existing files of this user that are written to.
const (
	// Private is for this user alone; folders get 0700.
	Private fs.FileMode = 0o600
	// Shared is for files that all may read, on this user's request; folders get 0755.
	Shared fs.FileMode = 0o644
)

// Mode returns Shared or Private.
func Mode(shared bool) fs.FileMode {
	if shared {
		return Shared
	}
	return Private
}

// maxLinks bounds the links that are followed, as in the kernel. maxRaces bounds the attempts if
// another file gets the name between two calls.
const (
	maxLinks = 40
	maxRaces = 100
)

// always are flags of every call. Opening does not block, whatever the file is.
const always = unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NOCTTY | unix.O_NONBLOCK

// request says how a file is opened, and which files are accepted.
type request struct {
	flags   int         // in addition to always
	mode    fs.FileMode // of a new file, and of an existing one that is written to; 0: unchanged
	create  bool        // create the file if it does not exist
	streams bool        // accept a pipe or a device
	plain   bool        // refuse links
	anyones bool        // accept every owner and mode
	secret  bool        // refuse a file that others may read
}

// Append opens a file for appending, and creates it if it does not exist. access is os.O_WRONLY or
// os.O_RDWR. The path may also name a pipe, a terminal or another device, and, as /dev/stdout or
// /dev/fd/3, any file that this process has inherited. If access is os.O_WRONLY, Append waits a few
// seconds for the reader of a named pipe.
func Append(path string, access int, mode fs.FileMode) (*os.File, error) {
	return request{flags: access | unix.O_APPEND, mode: mode, create: true, streams: true}.open(path)
}

// Rewrite is like Append, for a new file: it truncates a regular file.
func Rewrite(path string, mode fs.FileMode) (*os.File, error) {
	f, err := Append(path, os.O_WRONLY, mode)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && fi.Mode().IsRegular() {
		err = f.Truncate(0)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// AppendPlain is like Append, for a name that this program has chosen: it refuses links.
func AppendPlain(path string, access int, mode fs.FileMode) (*os.File, error) {
	return request{flags: access | unix.O_APPEND, mode: mode, create: true, streams: true, plain: true}.open(path)
}

// Update opens a regular file for reading and writing, and keeps its contents. If create is set, it
// creates a missing file. It is for names that this program has chosen: it refuses links.
func Update(path string, mode fs.FileMode, create bool) (*os.File, error) {
	return request{flags: unix.O_RDWR, mode: mode, create: create, plain: true}.open(path)
}

// Create creates a file and opens it for reading and writing. If the name exists, the error is
// fs.ErrExist.
func Create(path string, mode fs.FileMode) (*os.File, error) {
	f, err := request{flags: unix.O_RDWR, mode: mode}.make(path)
	if err != nil {
		return nil, &fs.PathError{Op: "create", Path: path, Err: err}
	}
	return f, nil
}

// CreateText creates a file with a text, as Create does. The file is on disk when it returns. After
// an error there is no file.
func CreateText(path string, text []byte, mode fs.FileMode) error {
	f, err := Create(path, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, Sync(f), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// Read opens a regular file of any owner for reading. It is for files that a person has asked to
// see. Unlike os.Open, it does not block if the name is a pipe's.
func Read(path string) (*os.File, error) { return request{anyones: true}.open(path) }

// ReadStream is like Read, for a path that may also name a pipe or a device. It waits a few seconds
// for the writer of a named pipe.
func ReadStream(path string) (*os.File, error) {
	return request{anyones: true, streams: true}.open(path)
}

// ReadOwn is like Read, for files that decide what this process does: they must belong to this user
// or to root, and no other user may be able to write to them.
func ReadOwn(path string) (*os.File, error) { return request{}.open(path) }

// SecretText returns a secret of up to most bytes. The file must be one that ReadOwn accepts and
// that no other user may read. The path may name a pipe, since shells pass secrets as <(…); then
// SecretText blocks until the writer has closed it. It waits a few seconds for the writer of a
// named pipe.
func SecretText(path string, most int64) ([]byte, error) {
	return request{streams: true, secret: true}.text(path, most)
}

// Text returns the contents of a file of up to most bytes, which it opens as Read does.
func Text(path string, most int64) ([]byte, error) { return request{anyones: true}.text(path, most) }

// OwnText returns the contents of a file of up to most bytes, which it opens as ReadOwn does.
func OwnText(path string, most int64) ([]byte, error) { return request{}.text(path, most) }

func (r request) text(path string, most int64) ([]byte, error) {
	f, err := r.open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ReadAll(f, most)
}

// ReadAll returns the rest of an open file. It returns an error if the rest has more than most
// bytes.
func ReadAll(f *os.File, most int64) ([]byte, error) {
	var text bytes.Buffer
	if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() {
		text.Grow(int(min(fi.Size(), most)) + bytes.MinRead)
	}
	_, err := text.ReadFrom(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		return nil, err
	case int64(text.Len()) > most:
		return nil, fmt.Errorf("%s has more than %d bytes", f.Name(), most)
	}
	return text.Bytes(), nil
}

// Replace writes a file that appears under its name as a whole or not at all. It does not write to
// an existing file of that name: it replaces a link, and processes that have the old file open do
// not see the new contents.
func Replace(path string, text []byte, mode fs.FileMode) error {
	return replace(path, text, mode, func(*os.File) error { return nil })
}

// ReplaceSynced is like Replace, for a file that must be on disk when it returns.
func ReplaceSynced(path string, text []byte, mode fs.FileMode) error {
	if err := replace(path, text, mode, Sync); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

func replace(path string, text []byte, mode fs.FileMode, written func(*os.File) error) error {
	f, err := createTemp(path, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = written(f)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// open opens the file that the path names. It examines the file before, because opening a device or
// a pipe may have effects, and compares it afterwards, because it may have been replaced meanwhile.
func (r request) open(path string) (*os.File, error) {
	at, links := path, 0
	for range maxRaces {
		p, err := unix.Open(at, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, unix.ENOENT) && r.create:
			f, err := r.make(at)
			if errors.Is(err, unix.EEXIST) {
				continue // another process has created it
			}
			return f, wrap(path, err)
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, wrap(path, err)
		}
		f, next, err := r.openSeen(p, path, at)
		unix.Close(p)
		if errors.Is(err, errChanged) {
			continue
		}
		if next == "" || err != nil {
			return f, err
		}
		if at, links = next, links+1; links > maxLinks {
			return nil, wrap(path, unix.ELOOP)
		}
	}
	return nil, fmt.Errorf("%s was replaced each time that it was opened", path)
}

// errChanged: another file has the name now.
var errChanged = errors.New("the file was replaced")

// openSeen opens the file at the path at, to which p is an O_PATH descriptor. If that is a link, it
// returns the next path.
func (r request) openSeen(p int, path, at string) (f *os.File, next string, err error) {
	var seen unix.Stat_t
	if err := unix.Fstat(p, &seen); err != nil {
		return nil, "", wrap(path, err)
	}
	flags, open := r.flags|always, unix.Open
	switch kind := seen.Mode & unix.S_IFMT; {
	case kind == unix.S_IFLNK:
		if on(p, unix.PROC_SUPER_MAGIC) && r.streams && !r.plain {
			return r.inherited(path, at)
		}
		next, err = r.follow(p, &seen, path, at)
		return nil, next, err
	case kind == unix.S_IFREG:
	case kind == unix.S_IFIFO && r.streams:
		open = openPipe
	case kind == unix.S_IFCHR && r.streams:
		flags &^= unix.O_NONBLOCK
	default:
		return nil, "", fmt.Errorf("%s is %s: name a regular file", path, kindName(kind))
	}
	if err := r.judge(&seen, path, at); err != nil {
		return nil, "", err
	}
	fd, err := retry(func() (int, error) { return open(at, flags, 0) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return nil, "", errChanged
	} else if err != nil {
		return nil, "", wrap(path, err)
	}
	var opened unix.Stat_t
	if err := unix.Fstat(fd, &opened); err != nil || opened.Dev != seen.Dev || opened.Ino != seen.Ino {
		unix.Close(fd)
		return nil, "", errChanged
	}
	// Only a trusted owner can have changed the mode or owner since judge.
	if r.settles(&opened) && opened.Mode&0o777 != uint32(r.mode) {
		chmod(fd, r.mode)
	}
	return file(fd, at, opened.Mode), "", nil
}

// file returns fd as a file. Reads and writes of pipes and terminals wait in the runtime's poller,
// as for files opened by package os.
func file(fd int, path string, mode uint32) *os.File {
	_ = unix.SetNonblock(fd, mode&unix.S_IFMT != unix.S_IFREG) // otherwise a blocked read or write holds a thread
	return os.NewFile(uintptr(fd), path)
}

func othersUse(path string, mode uint32) error {
	return fmt.Errorf("others may use %s (mode %#o): chmod 600 it", path, mode&0o777)
}

// inherited opens a link of /proc/self/fd, to which /dev/stdout and /dev/fd lead. It checks no
// owner: the parent process has opened the target, and nobody else can create such a link. It
// leaves the mode, which is not this program's to choose.
func (r request) inherited(path, at string) (*os.File, string, error) {
	// O_NONBLOCK, since the writer of a named pipe may have gone; the pipe then has the rest.
	fd, err := retry(func() (int, error) {
		return unix.Open(at, r.flags|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	})
	if err != nil {
		return nil, "", wrap(path, err)
	}
	var opened unix.Stat_t
	if err := unix.Fstat(fd, &opened); err != nil {
		unix.Close(fd)
		return nil, "", wrap(path, err)
	}
	switch kind := opened.Mode & unix.S_IFMT; {
	case kind != unix.S_IFREG && kind != unix.S_IFIFO && kind != unix.S_IFCHR:
		err = fmt.Errorf("%s is %s: name a file or a pipe", path, kindName(kind))
	case r.secret && opened.Mode&0o077 != 0:
		err = othersUse(path, opened.Mode)
	default:
		return file(fd, path, opened.Mode), "", nil
	}
	unix.Close(fd)
	return nil, "", err
}

// follow returns the target of the link p.
func (r request) follow(p int, link *unix.Stat_t, path, at string) (string, error) {
	if r.plain {
		return "", fmt.Errorf("%s is a symbolic link of %s, and hvdrun creates a file there: remove the link", path, userName(link.Uid))
	}
	if !r.anyones && !ours(link.Uid, at) {
		return "", fmt.Errorf("%s is a symbolic link of %s, who can change where it leads: name the file itself, or remove the link",
			path, userName(link.Uid))
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(p, "", buf)
	if err != nil {
		return "", wrap(path, err)
	}
	if target := string(buf[:n]); filepath.IsAbs(target) {
		return target, nil
	} else if target == "" {
		return "", wrap(path, unix.ENOENT)
	} else {
		return filepath.Dir(at) + "/" + target, nil // not filepath.Join, which would resolve .. lexically
	}
}

// judge returns an error if the file that was found must not be used.
func (r request) judge(found *unix.Stat_t, path, at string) error {
	perm := found.Mode & 0o777
	switch {
	case r.anyones || found.Mode&unix.S_IFMT == unix.S_IFCHR: // only root creates devices
		return nil
	case !ours(found.Uid, at):
		return fmt.Errorf("%s belongs to %s: remove it, name another file, or have it given to user %d", path, userName(found.Uid),
			os.Geteuid())
	case r.secret && perm&0o077 != 0:
		return othersUse(path, perm)
	case found.Mode&unix.S_IFMT == unix.S_IFREG && writable(perm, found.Gid) && !r.settles(found) && networkName(at) == "":
		return fmt.Errorf("others may write to %s (mode %#o): chmod go-w it", path, perm)
	}
	return nil
}

// settles reports whether the mode of an existing file is set to the requested one.
func (r request) settles(found *unix.Stat_t) bool {
	return r.mode != 0 && found.Mode&unix.S_IFMT == unix.S_IFREG && int(found.Uid) == os.Geteuid()
}

// chmod sets the mode of an open file. A file system without modes, or with one mode for all files,
// refuses that; its mount options decide who may use its files.
func chmod(fd int, mode fs.FileMode) { _ = unix.Fchmod(fd, uint32(mode)) }

// make creates a new file. It fails with EEXIST if the name exists.
func (r request) make(path string) (*os.File, error) {
	flags := r.flags | always | unix.O_CREAT | unix.O_EXCL
	fd, err := retry(func() (int, error) { return unix.Open(path, flags, uint32(r.mode)) })
	if err != nil {
		return nil, err
	}
	var made unix.Stat_t
	if err := unix.Fstat(fd, &made); err != nil {
		unix.Close(fd)
		return nil, errors.Join(err, os.Remove(path))
	}
	if made.Mode&0o777 != uint32(r.mode) { // because of the umask
		chmod(fd, r.mode)
	}
	return file(fd, path, unix.S_IFREG), nil
}

// retry repeats a system call that signals interrupt.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func wrap(path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: "open", Path: path, Err: err}
}

func kindName(kind uint32) string {
	switch kind {
	case unix.S_IFDIR:
		return "a folder"
	case unix.S_IFIFO:
		return "a named pipe"
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFLNK:
		return "a symbolic link"
	}
	return "a device"
}
