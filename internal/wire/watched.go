package wire

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// kernelPings has the kernels of both ends tell whether the other machine is there. A process that
// is starved, or computes, cannot be taken for a machine that has gone.
var kernelPings = net.KeepAliveConfig{Enable: true, Idle: pingAfter, Interval: time.Second, Count: int(lostAfter / time.Second)}

// Watch has the kernel end a TCP connection whose other machine has gone: where what is sent is not
// acknowledged for 5 s, or, while nothing is sent, after 15 s. Of another connection it does
// nothing.
func Watch(conn net.Conn) {
	socket, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	// What fails here is said by the next read, or leaves gRPC's own pings.
	_ = socket.SetKeepAliveConfig(kernelPings)
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(lostAfter.Milliseconds()))
	})
}

// watched is a connection that is watched. It hides its socket from gRPC, which would give the
// kernel of the other machine as long to answer as a process has.
type watched struct{ net.Conn }

// watch is Watch, and hides the socket.
func watch(conn net.Conn) net.Conn {
	Watch(conn)
	if _, ok := conn.(*net.TCPConn); ok {
		return watched{conn}
	}
	return conn // whose socket tells who the peer is
}

// watching is a listener that watches the connections it accepts.
type watching struct{ net.Listener }

func (l watching) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return watch(conn), nil
}
