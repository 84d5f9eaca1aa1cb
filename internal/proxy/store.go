package proxy

import (
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/internal/wire"
)

// driverStore is the driver's store as the program reaches it. It is for one goroutine at a time:
// that of hello, then that of a join.
type driverStore struct {
	door   *tcpstore.Door // nil: there is none
	number uint64         // of the store behind it; 0: unknown
}

// openStore opens a port of loopback, for the program and what it starts, that leads to the
// driver's store.
func (p *proxy) openStore() (err error) {
	p.store.door, err = tcpstore.OpenDoor(tcpstore.DoorConfig{
		Bounds: identity.WorkerStore, What: "proxy", Log: p.cfg.Log,
		Admit: func(conn net.Conn) error { return proc.PeerBelow(conn, p.pid) },
		Serve: func(d *tcpstore.Door, conn net.Conn) {
			far, err := p.member.Dial(p.ctx, wire.StoreProtocol)
			if err != nil {
				if p.ctx.Err() == nil {
					p.cfg.Log.Warnf("proxy: worker %v does not reach the driver's store: %v", p.env.Slot.SlotID, err)
				}
				return
			}
			d.Carry(conn, far)
		},
	})
	return err
}

// follow opens another port where the store is that of another driver: by that the program sees
// that it is empty.
func (p *proxy) follow(number uint64) error {
	was := p.store.number
	p.store.number = number
	if number == was || was == 0 || number == 0 {
		return nil
	}
	old := p.store.door
	defer old.Close() // later: the port must be another
	return p.openStore()
}

func (p *proxy) storeAddr() *storeAddr {
	at := p.store.door.Addr()
	return &storeAddr{at.IP.String(), at.Port}
}
