package scheduler

import (
	"context"
	"net"
	"os"
	"strconv"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

// SocketName is the name of the socket in a job's folder.
const SocketName = "tasks"

// ServeLocal serves clients on a unix socket at a path of any length until ctx ends, and then
// removes the socket. It accepts only clients of this process's user and of root. refused, if not
// nil, is called, possibly concurrently, for connections of other users.
func (s *Scheduler) ServeLocal(ctx context.Context, path string, refused func(net.Addr, error)) error {
	ln, err := wire.ListenLocal(path)
	if err != nil {
		return err
	}
	defer os.Remove(path)
	guarded := identity.TaskClients.Guard(ln)
	if refused != nil {
		guarded.OnRefused(refused)
	}
	wire.ServeLocalConns(ctx, guarded, s.cfg.Log, "tasks: clients", func(ctx context.Context, conn net.Conn, from wire.LocalPeer) {
		who := identity.Subject{RunID: s.cfg.Run, Role: identity.Driver, UID: strconv.Itoa(from.UID)}
		if err := s.Handle(ctx, conn, who); err != nil && ctx.Err() == nil {
			s.cfg.Log.Debugf("tasks: the connection of process %d: %v", from.PID, err)
		}
	})
	return nil
}
