package line

import (
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/plan"
)

// InheritedSocket returns the inherited end of the line of this process, the worker with that
// incarnation. It returns nil if a process between the launcher and this one has not passed the
// socket on, and from the second call on.
func InheritedSocket(incarnation string) net.Conn {
	fd, ok := plan.OwnSocket()
	if !ok {
		return nil
	}
	return socketOf(fd, incarnation)
}

// socketOf returns the socket of the worker at the descriptor, and closes the descriptor. It
// returns nil if the descriptor is another file, or not open.
func socketOf(fd int, incarnation string) net.Conn {
	peer, err := unix.Getpeername(fd)
	if at, is := peer.(*unix.SockaddrUnix); err != nil || !is || at.Name != plan.SocketName(incarnation) {
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
