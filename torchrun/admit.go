package torchrun

import (
	"net"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// ownProcess admits connections of processes that this one has started, and of what those have.
func ownProcess(conn net.Conn) error { return proc.OwnPeer(conn) }
