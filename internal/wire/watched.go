package wire

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// kernelPings has the kernels of both ends tell whether the other machine is there. A process that
// is starved, or computes, cannot be taken for a machine that has gone.
var kernelPings = net.KeepAliveConfig{Enable: true, Idle: pingAfter, Interval: time.Second, Count: int(lostAfter / time.Second)}

// watched is a connection whose end lostAfter bounds. It hides its socket from gRPC, which would
// bound it by the time that a process has to answer.
type watchedConn struct{ net.Conn }

// watch has what is sent on a connection acknowledged within lostAfter, or the connection ended.
func watch(conn net.Conn) net.Conn {
	socket, ok := conn.(*net.TCPConn)
	if !ok {
		return conn
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return conn // it is closed
	}
	set := func(fd uintptr) {
		// Where this fails, the pings of kernel and gRPC remain.
		_ = syscall.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(lostAfter.Milliseconds()))
	}
	if raw.Control(set) != nil {
		return conn
	}
	return watchedConn{conn}
}

// watched is a listener that watches the connections it accepts.
type watched struct{ net.Listener }

func (l watched) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if socket, ok := conn.(*net.TCPConn); ok {
		_ = socket.SetKeepAliveConfig(kernelPings) // of a connection that has ended already
	}
	return watch(conn), nil
}
