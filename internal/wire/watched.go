package wire

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// kernelPings configures TCP keepalives, by which the kernel detects a dead machine: unlike gRPC's
// pings they do not depend on a busy process.
var kernelPings = net.KeepAliveConfig{Enable: true, Idle: pingAfter, Interval: time.Second, Count: int(lostAfter / time.Second)}

// Watch has the kernel close a TCP connection to a dead machine: 5 s after unacknowledged data, or
// after 15 s while idle. It does nothing for other connections.
func Watch(conn net.Conn) {
	socket, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	// Errors are ignored: the next read returns them, or gRPC's own pings remain.
	_ = socket.SetKeepAliveConfig(kernelPings)
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(lostAfter.Milliseconds()))
	})
}

// watched is a watched connection. It hides its socket from gRPC, which would otherwise set the
// kernel's timeout to that of a process.
type watched struct{ net.Conn }

// watch calls Watch and hides the socket.
func watch(conn net.Conn) net.Conn {
	Watch(conn)
	if _, ok := conn.(*net.TCPConn); ok {
		return watched{conn}
	}
	return conn // a unix socket must stay visible: it identifies the peer
}

// watching is a listener whose connections are watched.
type watching struct{ net.Listener }

func (l watching) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return watch(conn), nil
}
