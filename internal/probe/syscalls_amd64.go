package probe

import (
	"maps"

	"golang.org/x/sys/unix"
)

// Newer architectures lack these.
func init() {
	maps.Copy(otherCalls, map[int]string{
		unix.SYS_POLL: "poll", unix.SYS_SELECT: "select", unix.SYS_EPOLL_WAIT: "epoll_wait", unix.SYS_PAUSE: "pause", unix.SYS_OPEN: "open",
		unix.SYS_STAT: "stat", unix.SYS_LSTAT: "lstat", unix.SYS_ACCESS: "access", unix.SYS_READLINK: "readlink", unix.SYS_MKDIR: "mkdir",
		unix.SYS_RMDIR: "rmdir", unix.SYS_UNLINK: "unlink", unix.SYS_RENAME: "rename", unix.SYS_FORK: "fork", unix.SYS_VFORK: "vfork",
	})
}
