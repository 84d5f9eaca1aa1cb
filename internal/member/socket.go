package member

import (
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/plan"
)

// InheritedSocket returns this process's end of the socket by which its launcher takes calls for
// the driver; nil: there is none, because the launcher takes no calls, because a process between
// the launcher and this one has not passed the socket on, or because InheritedSocket has returned
// it before.
func InheritedSocket() net.Conn { return socketOf(plan.OwnSocket()) }

// socketOf returns the socket with that inode and descriptor, which it closes; nil: the descriptor
// is another file, or none.
func socketOf(fd int, inode uint64) net.Conn {
	var is unix.Stat_t
	if inode == 0 || unix.Fstat(fd, &is) != nil || is.Mode&unix.S_IFMT != unix.S_IFSOCK || is.Ino != inode {
		return nil
	}
	f := os.NewFile(uintptr(fd), "worker socket")
	defer f.Close()
	conn, err := net.FileConn(f) // a duplicate, which children do not inherit
	if err != nil {
		return nil
	}
	return conn
}
