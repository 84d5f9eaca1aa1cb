package wire

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// ServeLocal is like Serve, on a unix socket, for processes of this process's user and of root
// only: the kernel identifies the peer's user before any data is read.
func ServeLocal(ctx context.Context, ln *identity.Listener, register func(grpc.ServiceRegistrar)) error {
	return serve(ctx, MaxMessage, accepting{sameUser{insecure.NewCredentials()}, ln, &raws{}}, register)
}

// sameUser accepts peers of this process's user and of root.
type sameUser struct {
	credentials.TransportCredentials
}

func (s sameUser) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	who, err := checkUser(conn)
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	conn, _, err = s.TransportCredentials.ServerHandshake(conn)
	return conn, localInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, who}, err
}

// localInfo is what the kernel reports about the other end of a unix socket.
type localInfo struct {
	credentials.CommonAuthInfo
	LocalPeer
}

// AuthType makes it a credentials.AuthInfo.
func (localInfo) AuthType() string { return "unix" }

// LocalPeer is the process that was at the other end of a unix socket when it connected.
type LocalPeer struct{ UID, PID int }

// LocalCaller returns the process that calls a handler over a unix socket, or the zero LocalPeer
// for any other connection.
func LocalCaller(ctx context.Context) LocalPeer {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return LocalPeer{}
	}
	info, _ := p.AuthInfo.(localInfo)
	return info.LocalPeer
}

// UserError refuses the connection of a process of another user.
type UserError struct{ LocalPeer }

// Error names the user.
func (e *UserError) Error() string { return fmt.Sprintf("wire: user %d is refused", e.UID) }

func (s sameUser) Clone() credentials.TransportCredentials { return s }

// checkUser returns the process at the other end, or a *UserError if its user may not connect.
func checkUser(conn net.Conn) (LocalPeer, error) {
	var none LocalPeer
	local, ok := bare(conn).(*net.UnixConn)
	if !ok {
		return none, fmt.Errorf("wire: a connection of type %T has no user", bare(conn))
	}
	raw, err := local.SyscallConn()
	if err != nil {
		return none, fmt.Errorf("wire: %w", err)
	}
	var who *unix.Ucred
	var unknown error
	if err := raw.Control(func(fd uintptr) {
		who, unknown = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return none, fmt.Errorf("wire: %w", err)
	}
	if unknown != nil {
		return none, fmt.Errorf("wire: the peer's user: %w", unknown)
	}
	peer := LocalPeer{UID: int(who.Uid), PID: int(who.Pid)}
	if peer.UID != 0 && peer.UID != os.Geteuid() {
		return none, &UserError{peer}
	}
	return peer, nil
}

// maxSocketPath is the longest path in the address of a unix socket.
const maxSocketPath = 107

// ListenLocal listens on a unix socket at a path of any length, with mode 0600. It replaces an
// existing socket, which nobody may be using. Closing the listener leaves the file.
func ListenLocal(path string) (*net.UnixListener, error) {
	if fi, err := os.Lstat(path); err == nil && fi.Mode().Type() == os.ModeSocket {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	var ln *net.UnixListener
	err := withShortPath(path, func(short string) (err error) {
		ln, err = net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // the short path may be invalid by then
	// Some file systems do not support modes of sockets. In a private folder the mode does not
	// matter.
	if err := os.Chmod(path, 0o600); err != nil && !private(filepath.Dir(path)) {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// private returns whether a folder belongs to this user, and only this user and root can enter it.
func private(dir string) bool {
	var is unix.Stat_t
	return unix.Stat(dir, &is) == nil && int(is.Uid) == os.Geteuid() && is.Mode&0o077 == 0
}

// ServeLocalConns calls handle, in a goroutine each, with the connections of a unix socket from
// processes of this process's user and of root, until ctx ends: the kernel identifies the user
// before any data is read. It closes ln, and returns when every call of handle has returned. handle
// must close its connection, and return when ctx ends. what names the server in log.
func ServeLocalConns(
	ctx context.Context, ln *identity.Listener, log logrus.FieldLogger, what string, handle func(ctx context.Context, conn net.Conn, from LocalPeer),
) {
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	ln.Serve(log, what, func(conn *identity.Conn) {
		from, err := checkUser(conn)
		if err != nil {
			ln.Refused(conn, err)
		}
		if err != nil || !conn.Proven() {
			conn.Close()
			return
		}
		handle(ctx, conn, from)
	})
}

// DialLocal connects to the unix socket at a path of any length.
func DialLocal(ctx context.Context, path string) (conn net.Conn, err error) {
	err = withShortPath(path, func(short string) (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, "unix", short)
		return err
	})
	return conn, err
}

// LocalServer returns the process that listens on the unix socket at a path of any length.
func LocalServer(ctx context.Context, path string) (LocalPeer, error) {
	conn, err := DialLocal(ctx, path)
	if err != nil {
		return LocalPeer{}, fmt.Errorf("wire: %w", err)
	}
	defer conn.Close()
	return checkUser(conn)
}

// NewLocalClient returns a connection to the server of the unix socket at a path of any length. It
// does no I/O until the first call.
func NewLocalClient(path string) (*grpc.ClientConn, error) {
	return newClient("local", insecure.NewCredentials(), func(ctx context.Context, _ string) (net.Conn, error) { return DialLocal(ctx, path) })
}

// withShortPath calls use with a path that is short enough for an address: path itself, or one
// through its directory, which is open until use returns.
func withShortPath(path string, use func(short string) error) error {
	if len(path) <= maxSocketPath {
		return use(path)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return use("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path))
}
