package server

import (
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// driverStore gives the program access to the driver's store at a loopback port, which admits only
// the program and its children. It is for one goroutine at a time: that of hello, then the one that
// writes.
type driverStore struct {
	t      *talk
	door   *tcpstore.Door
	number uint64 // of the driver's store; 0: unknown
}

func (s *driverStore) open() (err error) {
	t := s.t
	s.door, err = tcpstore.OpenDoor(tcpstore.DoorConfig{
		Bounds: identity.WorkerStore, What: "line", Log: t.server.cfg.Log,
		Admit: func(conn net.Conn) error { return proc.PeerBelow(conn, t.pid) },
		Serve: func(_ *tcpstore.Door, conn net.Conn) { t.server.cfg.Stream(t.inc, line.StoreProtocol, conn) },
	})
	return err
}

// follow opens another port if the store is another driver's. From the new address the program
// knows that the store is empty.
func (s *driverStore) follow(number uint64) error {
	was := s.number
	s.number = number
	if number == was || was == 0 || number == 0 {
		return nil
	}
	old := s.door
	defer old.Close() // deferred, so that the new port differs
	return s.open()
}

func (s *driverStore) addr() *storeAddr {
	at := s.door.Addr()
	return &storeAddr{at.IP.String(), at.Port}
}

func (s *driverStore) close() { s.door.Close() }
