package wire

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// kernelPings configures TCP keepalives, by which the kernel detects a dead machine. Unlike gRPC's
// pings, they do not depend on a busy process.
var kernelPings = net.KeepAliveConfig{Enable: true, Idle: pingAfter, Interval: time.Second, Count: int(lostAfter / time.Second)}

// Watch makes the kernel close a TCP connection to a dead machine: 5 s after unacknowledged data,
// or after 15 s while idle. It has no effect on other connections.
func Watch(conn net.Conn) {
	socket, ok := bare(conn).(*net.TCPConn)
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

// bare returns the connection below the wrappers of a listener.
func bare(conn net.Conn) net.Conn {
	for {
		above, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return conn
		}
		conn = above.NetConn()
	}
}

// watched is a watched connection. It hides its socket from gRPC, which would otherwise replace the
// kernel's timeout by that for a busy process.
type watched struct{ net.Conn }

// NetConn returns the connection that it hides.
func (w watched) NetConn() net.Conn { return w.Conn }

// watching is a listener whose connections are watched. Their own type hides their sockets.
type watching struct{ net.Listener }

func (l watching) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	Watch(conn)
	return conn, nil
}
