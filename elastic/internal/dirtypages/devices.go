package dirtypages

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Bypass returns the reason why something may write to this process's memory past its page tables:
// a device that the process has opened, an io_uring, or pinned memory. It returns "" if there is
// nothing of that kind. It examines each open file, in less than a microsecond, and allocates
// almost nothing.
func Bypass() (string, error) {
	kept := buffers.Get().(*[]byte)
	defer buffers.Put(kept)
	buffer := *kept
	dir, err := unix.Open("/proc/self/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("/proc/self/fd: %w", err)
	}
	defer unix.Close(dir)
	for {
		n, err := unix.ReadDirent(dir, buffer)
		if err != nil {
			return "", fmt.Errorf("/proc/self/fd: %w", err)
		}
		if n == 0 {
			return pinned(buffer)
		}
		for entries := buffer[:n]; len(entries) > nameAt; {
			length := int(binary.NativeEndian.Uint16(entries[lengthAt:]))
			name, _, _ := bytes.Cut(entries[nameAt:length], []byte{0})
			entries = entries[length:]
			if name[0] == '.' {
				continue
			}
			fd, err := strconv.Atoi(string(name))
			if err != nil {
				return "", fmt.Errorf("/proc/self/fd: %q", name)
			}
			if found, err := bypasses(dir, fd); err != nil || found != "" {
				return found, err
			}
		}
	}
}

var buffers = sync.Pool{New: func() any { return new(make([]byte, 4096)) }}

// Offsets in struct linux_dirent64.
const (
	lengthAt = 16
	nameAt   = 19
)

// Devices that transfer no memory, by major number: memory devices (null, zero, random) and
// terminals.
const (
	majorMem      = 1
	majorTTY      = 4
	majorTTYAux   = 5
	majorPtyFirst = 136
	majorPtyLast  = 143
)

// calmFiles are the files without a name that never write to memory on their own.
var calmFiles = []string{"[eventpoll]", "[eventfd]", "[userfaultfd]", "[pidfd]", "[timerfd]",
	"[signalfd]", "inotify", "[fanotify]", "[perf_event]"}

// bypasses returns the name of an open file that may be a device's. It returns "" if it is not, or
// if the file has been closed meanwhile. dir is a descriptor of /proc/self/fd.
func bypasses(dir, fd int) (string, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err == unix.EBADF {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("fstat: %w", err)
	}
	kind := stat.Mode & unix.S_IFMT
	switch kind {
	case unix.S_IFSOCK, unix.S_IFIFO, unix.S_IFDIR, unix.S_IFBLK:
		return "", nil
	case unix.S_IFCHR:
		switch major := unix.Major(uint64(stat.Rdev)); {
		case major == majorMem, major == majorTTY, major == majorTTYAux, majorPtyFirst <= major && major <= majorPtyLast:
			return "", nil
		}
	}
	var buffer [256]byte
	n, err := unix.Readlinkat(dir, strconv.Itoa(fd), buffer[:])
	switch {
	case err == unix.ENOENT:
		return "", nil
	case err != nil:
		return "", fmt.Errorf("readlink: %w", err)
	case n > 0 && buffer[0] == '/' && kind == unix.S_IFREG:
		return "", nil
	}
	if nameless, ok := bytes.CutPrefix(buffer[:n], []byte("anon_inode:")); ok && slices.Contains(calmFiles, string(nameless)) {
		return "", nil
	}
	return string(buffer[:n]), nil
}

// pinned reports memory that the kernel has pinned for this process, such as the fixed buffers of
// an io_uring whose files are all closed. buffer has room for the whole status file.
func pinned(buffer []byte) (string, error) {
	fd, err := unix.Open("/proc/self/status", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("/proc/self/status: %w", err)
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, buffer)
	if err != nil {
		return "", fmt.Errorf("/proc/self/status: %w", err)
	}
	_, after, found := bytes.Cut(buffer[:n], []byte("\nVmPin:"))
	size, _, _ := bytes.Cut(after, []byte("\n"))
	if size = bytes.TrimSpace(size); !found || bytes.HasPrefix(size, []byte("0 ")) {
		return "", nil
	}
	return "pinned memory of " + string(size), nil
}
